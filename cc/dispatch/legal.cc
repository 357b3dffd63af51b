#include "cc/dispatch/legal.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <vector>

#include "cc/api/check.h"
#include "cc/math/activation.h"
#include "cc/math/store.h"

namespace grouped {
namespace {

// Tiles of the quantisers are this long: blocks and segments divide it.
constexpr int64_t kLongestBlock = 128;

// A set of integers that parameters share.
struct Integers {
  bool (*has)(int64_t value);
  const char* words;
};

constexpr bool is_power_of_two(int64_t value) { return value > 0 && (value & (value - 1)) == 0; }
constexpr bool is_block(int64_t value) { return value >= 16 && value <= kLongestBlock && is_power_of_two(value); }

constexpr Integers kFlag = {[](int64_t v) { return v == 0 || v == 1; }, "0 or 1"};
constexpr Integers kHalf = {[](int64_t v) { return v >= 0 && v <= 2; }, "0, 1 or 2"};
constexpr Integers kAxis = {[](int64_t v) { return v >= 0 && v <= 2; }, "0, 1 or 2"};
constexpr Integers kBlock = {[](int64_t v) { return v == 0 || is_block(v); }, "0, 16, 32, 64 or 128"};
constexpr Integers kOuter = {[](int64_t v) { return v == 1 || is_block(v); }, "1, 16, 32, 64 or 128"};
constexpr Integers kSegment = {[](int64_t v) { return v == 0 || (v <= kLongestBlock && is_power_of_two(v)); },
                               "0 or a divisor of 128"};
constexpr Integers kCount = {[](int64_t v) { return v >= 0 && v <= int64_t{1} << 48; }, "0 to 2^48"};
constexpr Integers kRowsOfGroup = {[](int64_t v) { return v >= 0 && v <= INT32_MAX; }, "0 to 2^31 - 1"};
constexpr Integers kIterations = {[](int64_t v) { return v >= 0 && v <= 1024; }, "0 to 1024"};
constexpr Integers kPositive = {[](int64_t v) { return v >= 1 && v <= INT32_MAX; }, "1 to 2^31 - 1"};
// Two forms take a stream each, numbered with 32 bits.
constexpr Integers kStream = {[](int64_t v) { return v >= 0 && v < UINT32_MAX; }, "0 to 2^32 - 2"};

// Of the parameters that are numbers. An integer without a row is a flag, the smallest set: no flag needs a row.
constexpr struct {
  const char* name;
  const Integers* set;
} kIntegers[] = {
    {"rhs_axis", &kAxis},         {"low_rhs_axis", &kAxis},
    {"factor_axis", &kAxis},      {"rows_hint", &kRowsOfGroup},
    {"lhs_half", &kHalf},         {"rhs_half", &kHalf},
    {"result_half", &kHalf},      {"lhs_block", &kBlock},
    {"rhs_block", &kBlock},       {"rhs_block_outer", &kOuter},
    {"segment", &kSegment},       {"rows", &kCount},
    {"interleave", &kCount},      {"block", &kBlock},
    {"block_outer", &kOuter},     {"stream", &kStream},
    {"iterations", &kIterations}, {"num_groups", &kPositive},
    {"topk_groups", &kPositive},  {"group_topk", &kPositive},
    {"slots", &kPositive},        {"axis", &kAxis},
    {"order", &kCount},           {"count", &kPositive},
    {"num_experts", &kPositive},  {"capacity", &kPositive},
    {"align", &kPositive},        {"ranks", &kPositive},
};

struct Words {
  const char* name;
  std::vector<std::string_view> all;
};

const Words kWords[] = {
    {"fp32_mode", {"tf32x3", "tf32", "ieee"}},
    {"promote", {"every_128", "never"}},
    {"rule", {"fp32", "e8m0", "nvfp4"}},
    {"four_over_six", {"", "absolute", "square"}},
    {"algorithm", {"max", "most_recent"}},
    {"score", {"softmax", "sigmoid", "sqrt_softplus"}},
    {"compute", {"", "float32", "bfloat16", "float16"}},
    {"kind",
     {
#define X(text, tag, gated) text,
         GROUPED_ACTIVATIONS(X)
#undef X
     }},
};

// The row of a table for a parameter, or null; what is stored of activated rows has the parameters of what is stored.
template <class Row, size_t N>
const Row* row_of(const Row (&rows)[N], std::string_view name) {
  constexpr std::string_view kActivated = "activated_";
  if (name.substr(0, kActivated.size()) == kActivated) name.remove_prefix(kActivated.size());
  const Row* found = std::find_if(rows, rows + N, [&](const Row& row) { return row.name == name; });
  return found != rows + N ? found : nullptr;
}

// The rows of a call's parameters, found once for each kind of call: XLA's edge asks at every run.
struct Row {
  const Integers* integers = nullptr;
  const Words* words = nullptr;
};

struct Rows {
  std::vector<Row> rows;

  template <class... Operand>
  void input(Operand&&...) {}
  template <class... Operand>
  void optional(Operand&&...) {}
  template <class... Operand>
  void output(Operand&&...) {}
  template <class... Operand>
  void optional_output(Operand&&...) {}
  void param(const char* name, int64_t&) {
    const auto* row = row_of(kIntegers, name);
    rows.push_back({row ? row->set : &kFlag, nullptr});
  }
  void param(const char* name, std::string&) {
    const Words* row = row_of(kWords, name);
    GROUPED_CHECK(row, "parameter `" + std::string(name) + "` has no row in cc/dispatch/legal.cc");
    rows.push_back({nullptr, row});
  }
  void param(const char*, float&) { rows.emplace_back(); }

  template <class Call>
  static const std::vector<Row>& of() {
    static const std::vector<Row> rows = [] {
      Rows found;
      Call().visit(found);
      return found.rows;
    }();
    return rows;
  }
};

class Asker {
 public:
  explicit Asker(const std::vector<Row>& rows) : row_(rows.data()) {}

  std::string wrong;

  template <class... Operand>
  void input(Operand&&...) {}
  template <class... Operand>
  void optional(Operand&&...) {}
  template <class... Operand>
  void output(Operand&&...) {}
  template <class... Operand>
  void optional_output(Operand&&...) {}
  void param(const char* name, int64_t value) {
    const Integers& legal = *row_++->integers;
    if (!legal.has(value)) say(name, std::to_string(value), legal.words);
  }
  void param(const char* name, const std::string& value) {
    const auto& legal = row_++->words->all;
    if (std::find(legal.begin(), legal.end(), value) != legal.end()) return;
    std::string words;
    for (const std::string_view word : legal) words += (words.empty() ? "\"" : ", \"") + std::string(word) + "\"";
    say(name, "\"" + value + "\"", "one of " + words);
  }
  void param(const char* name, float value) {
    ++row_;
    if (std::isnan(value)) say(name, "nan", "a number");
  }

 private:
  void say(const char* name, const std::string& came, const std::string& wanted) {
    if (wrong.empty()) wrong = "`" + std::string(name) + "`: " + came + ", expected " + wanted;
  }

  const Row* row_;
};

}  // namespace

template <class Call>
std::string illegal(const Call& call) {
  Asker asker(Rows::of<Call>());
  const_cast<Call&>(call).visit(asker);  // `visit` serves visitors that write, too; this one reads
  return asker.wrong;
}

#define X(Call) template std::string illegal<Call>(const Call&);
GROUPED_CALLS(X)
#undef X

}  // namespace grouped
