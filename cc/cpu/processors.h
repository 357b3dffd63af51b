// How many threads are worth having here.
#pragma once

#include <string>

namespace grouped {

// Processors that this process may keep busy, at least 1: those that its affinity names, at most as many as the CPU
// quota of its cgroups pays for, rounded up. `root` is put before the paths of /proc and /sys; tests have their own.
int usable_processors(const std::string& root = "");

// What the quotas pay for, in processors; 0: there is none. Of cgroup v2 the least of the group and those above it
// counts, of v1 that of the cpu controller likewise.
double quota_processors(const std::string& root = "");

}  // namespace grouped
