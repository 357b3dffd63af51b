#include "cc/cpu/processors.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>
#include <thread>

namespace grouped {
namespace {

// "max 100000", "150000 100000": quota and period in microseconds; 0 where there is no limit, or no such file.
double share(std::istream&& file) {
  std::string quota;
  double period = 0;
  if (!(file >> quota >> period) || quota == "max" || period <= 0) return 0;
  std::istringstream number(quota);
  double time = 0;
  return number >> time && time > 0 ? time / period : 0;
}

double share_of_v2(const std::string& folder) { return share(std::ifstream(folder + "/cpu.max")); }

double share_of_v1(const std::string& folder) {
  std::string quota, period;
  std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;
  std::ifstream(folder + "/cpu.cfs_period_us") >> period;
  return share(std::istringstream(quota + " " + period));
}

// The least share of the group `path` and all above it. In a container the mount shows the container's own group as its
// root, whatever /proc says, so that folders of the path may be missing.
void take_least(const std::string& mount, std::string path, double (*of)(const std::string&), double* least) {
  for (;;) {
    if (path == "/") path.clear();
    const double found = of(mount + path);
    if (found > 0 && (*least == 0 || found < *least)) *least = found;
    if (path.empty()) return;
    path.erase(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
  }
}

}  // namespace

double quota_processors(const std::string& root) {
  const std::string mounts = root + "/sys/fs/cgroup";
  double least = 0;
  std::ifstream groups(root + "/proc/self/cgroup");  // lines "0::/path" of v2, "4:cpu,cpuacct:/path" of v1
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1), path = line.substr(second + 1);
    if (controllers.empty()) {
      take_least(mounts, path, share_of_v2, &least);
      take_least(mounts + "/unified", path, share_of_v2, &least);  // beside v1
    } else if (("," + controllers + ",").find(",cpu,") != std::string::npos) {
      take_least(mounts + "/" + controllers, path, share_of_v1, &least);
      take_least(mounts + "/cpu", path, share_of_v1, &least);
    }
  }
  return least;
}

int usable_processors(const std::string& root) {
  cpu_set_t set;
  CPU_ZERO(&set);
  const bool known = sched_getaffinity(0, sizeof set, &set) == 0;  // no: more processors than the set holds
  const int allowed = known ? CPU_COUNT(&set) : static_cast<int>(std::thread::hardware_concurrency());
  const double paid = quota_processors(root);
  return std::max(1, paid > 0 ? static_cast<int>(std::min<double>(allowed, std::ceil(paid))) : allowed);
}

}  // namespace grouped
