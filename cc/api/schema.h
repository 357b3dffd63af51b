// What calls.h and routing.h say of each slot and parameter of a call, read off `visit` once for each kind of call.
//
// A slot's words are its shapes and its element types: "[M, N] plain", "[M] | [T, k] int32", "as result". A shape
// contains
//   a number       that length
//   a letter       a length that is the same wherever the call has the letter, within the limits of `kLengths` in
//                  schema.cc
//   ? or +         any length; any but 0
//   ...            alone: any rank
// Shapes that | separates have different ranks, which tell them apart. Types are those of a name in GROUPED_TYPES, or
// "as NAME": the one that another slot has; "as NAME" alone: its shape and type. ", with NAME" behind them: the slot is
// present if and only if that other one is. `X_table`, present, asks for X beside it.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "cc/api/tensor.h"

namespace grouped {

// Sets of element types, besides those of a single one, which are called as it is.
#define GROUPED_TYPES(X)                                                                                         \
  X("plain", DType::f32, DType::bf16, DType::f16)                                                                \
  X("code", DType::e4m3fn, DType::e5m2, DType::u8)                                                               \
  X("number", DType::f32, DType::bf16, DType::f16, DType::e4m3fn, DType::e5m2, DType::u8)                        \
  X("scale", DType::f32, DType::e8m0, DType::e4m3fn)                                                             \
  X("any", DType::f32, DType::bf16, DType::f16, DType::e4m3fn, DType::e5m2, DType::e8m0, DType::i32, DType::i64, \
    DType::u8, DType::u32)

using Types = uint32_t;  // bit i: the DType of that number

constexpr size_t kMaxSlots = 64;    // inputs and outputs of one call
constexpr size_t kMaxLetters = 16;  // of one call

struct SlotSchema {
  struct Shape {
    std::string text;  // "[M, N]"
    int rank = 0;
    int dims[kMaxRank] = {0, 0, 0, 0};  // a letter by its number, or one of the below, or kFixed + the length
  };
  static constexpr int kAnyLength = -1, kNotEmpty = -2, kFixed = 1 << 16;

  std::string name;
  bool optional;
  std::string text;           // as calls.h has it
  std::vector<Shape> shapes;  // empty: any
  Types types = 0;            // 0: those of another slot
  std::string types_text;
  int like = -1;     // slot that has the same shape and type
  int type_of = -1;  // slot that has the same type
  int with = -1;     // slot that is present if and only if this one is
  int table = -1;    // input that holds the slot's addresses where it is not packed
};

struct Letter {
  std::string name;
  int64_t least, most;
  const char* what;  // "groups"
};

struct Schema {
  const char* call;
  std::vector<SlotSchema> slots;  // inputs, then outputs, in the order of `visit`: that of arguments and addresses
  size_t inputs = 0;
  std::vector<std::pair<std::string, std::variant<int64_t, float, std::string>>> params;  // names and defaults
  std::vector<Letter> letters;
  std::vector<std::pair<size_t, size_t>> shared;  // (input, output) that are one buffer: `into` and the first, ...
  int tokens = -1, places = -1;                   // letters T and k, where the call has both

  size_t outputs() const { return slots.size() - inputs; }

  // As a visitor it gathers names and words; `finish` reads the words.
  void input(const char* name, TensorView&, const char* text) { add(name, false, text, true); }
  void optional(const char* name, TensorView&, const char* text) { add(name, true, text, true); }
  void output(const char* name, TensorView&, const char* text) { add(name, false, text, false); }
  void optional_output(const char* name, TensorView&, const char* text) { add(name, true, text, false); }
  template <class T>
  void param(const char* name, T& value) {
    params.emplace_back(name, value);
  }
  void finish();

 private:
  void add(const char* name, bool optional, const char* text, bool input);
  int slot_named(std::string_view name, size_t from, size_t to) const;
  int slot_meant(const SlotSchema& of, std::string_view name) const;
  int letter(std::string_view name);
  SlotSchema::Shape shape(const SlotSchema& of, std::string_view text);
};

template <class Call>
const Schema& schema() {
  static const Schema value = [] {
    Schema found;
    found.call = Call::kName;
    Call().visit(found);
    found.finish();
    return found;
  }();
  return value;
}

// The slots of one call, in the order of its schema.
struct Views {
  const TensorView* all[kMaxSlots];
  size_t count = 0;

  void input(const char*, TensorView& view, const char*) { all[count++] = &view; }
  void optional(const char*, TensorView& view, const char*) { all[count++] = &view; }
  void output(const char*, TensorView& view, const char*) { all[count++] = &view; }
  void optional_output(const char*, TensorView& view, const char*) { all[count++] = &view; }
  template <class T>
  void param(const char*, T&) {}
};

// Empty, or the first slot that is not as the schema says, in words: its presence, type, rank, lengths, and how much
// memory it takes. Looks at no data.
std::string mismatch(const Schema& schema, const Views& views);

// Names of the sets of element types and their members.
std::vector<std::pair<std::string, std::vector<std::string>>> type_sets();

}  // namespace grouped
