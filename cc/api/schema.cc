#include "cc/api/schema.h"

#include <algorithm>

#include "cc/api/check.h"

namespace grouped {
namespace {

// Of one operand. No machine has more, and sums and small multiples of such sizes stay far below 2^63.
constexpr int64_t kMostBytes = int64_t{1} << 48;

// Limits of letters. Rows, places and tokens may be missing, every other axis has at least one element (MAT-7). Rows
// are numbered with 32 bits; groups: GRP-11; the kernels hold a token's scores for E experts of one router in
// registers.
constexpr struct {
  const char* name;
  int64_t least, most;
  const char* what;
} kLengths[] = {
    {"M", 0, INT32_MAX, "rows"}, {"P", 0, INT32_MAX, "places"}, {"T", 0, INT64_MAX, "tokens"},
    {"G", 1, 65535, "groups"},   {"S", 1, 65535, "sequences"},  {"E", 1, 1024, "experts"},
    {"V", 1, INT32_MAX, "rows"}, {"bins", 1, 65536, "bins"},
};

constexpr Types bit(DType type) { return Types{1} << static_cast<int>(type); }
template <class... Each>
constexpr Types set_of(Each... types) {
  return (bit(types) | ...);
}

constexpr struct {
  const char* name;
  Types types;
} kSets[] = {
#define X(name, ...) {name, set_of(__VA_ARGS__)},
    GROUPED_TYPES(X)
#undef X
#define X(name, tag, bytes) {name, bit(DType::tag)},
        GROUPED_DTYPES(X)
#undef X
};

std::string names_of(Types types) {
  std::string names;
#define X(name, tag, bytes) \
  if (types & bit(DType::tag)) names += (names.empty() ? "" : ", ") + std::string(name);
  GROUPED_DTYPES(X)
#undef X
  return names;
}

std::string_view stripped(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

// What precedes `mark`, which is taken off `text` with it; all of it where there is no mark.
std::string_view cut(std::string_view* text, std::string_view mark) {
  const size_t at = text->find(mark);
  const std::string_view before = text->substr(0, at);
  text->remove_prefix(at == std::string_view::npos ? text->size() : at + mark.size());
  return stripped(before);
}

std::string named(const SlotSchema& slot, const TensorView& view) { return "`" + slot.name + "`: " + describe(view); }

}  // namespace

void Schema::add(const char* name, bool optional, const char* text, bool input) {
  SlotSchema slot;
  slot.name = name;
  slot.optional = optional;
  slot.text = text;
  slots.push_back(std::move(slot));
  inputs += input ? 1 : 0;
}

int Schema::slot_named(std::string_view name, size_t from, size_t to) const {
  for (size_t i = from; i < to; ++i) {
    if (slots[i].name == name) return static_cast<int>(i);
  }
  return -1;
}

int Schema::slot_meant(const SlotSchema& of, std::string_view name) const {
  const bool buffer = of.name.compare(0, 4, "into") == 0;  // of a result; other words mean an operand first
  int found = slot_named(name, buffer ? inputs : 0, buffer ? slots.size() : inputs);
  if (found < 0) found = slot_named(name, 0, slots.size());
  GROUPED_CHECK(found >= 0,
                std::string(call) + " has no slot `" + std::string(name) + "`, which `" + of.name + "` names");
  return found;
}

int Schema::letter(std::string_view name) {
  for (size_t i = 0; i < letters.size(); ++i) {
    if (letters[i].name == name) return static_cast<int>(i);
  }
  GROUPED_CHECK(letters.size() < kMaxLetters, std::string(call) + " has more letters than kMaxLetters");
  Letter made = {"", 1, INT64_MAX, "elements"};
  for (const auto& row : kLengths) {
    if (row.name == name) made = {"", row.least, row.most, row.what};
  }
  made.name = std::string(name);
  letters.push_back(made);
  const int at = static_cast<int>(letters.size()) - 1;
  if (name == "T") tokens = at;
  if (name == "k") places = at;
  return at;
}

SlotSchema::Shape Schema::shape(const SlotSchema& of, std::string_view text) {
  SlotSchema::Shape made;
  made.text = std::string(text);
  GROUPED_CHECK(text.size() > 2 && text.front() == '[' && text.back() == ']',
                std::string(call) + ": `" + of.name + "` has no shape in \"" + of.text + "\"");
  text = text.substr(1, text.size() - 2);
  while (!text.empty()) {
    const std::string_view dim = cut(&text, ",");
    GROUPED_CHECK(made.rank < kMaxRank, std::string(call) + ": `" + of.name + "` has more axes than kMaxRank");
    int& to = made.dims[made.rank++];
    if (dim == "?") {
      to = SlotSchema::kAnyLength;
    } else if (dim == "+") {
      to = SlotSchema::kNotEmpty;
    } else if (dim.front() >= '0' && dim.front() <= '9') {
      to = SlotSchema::kFixed + std::stoi(std::string(dim));
    } else {
      to = letter(dim);
    }
  }
  return made;
}

void Schema::finish() {
  GROUPED_CHECK(slots.size() <= kMaxSlots, std::string(call) + " has more slots than kMaxSlots");
  for (size_t i = 0; i < slots.size(); ++i) {
    SlotSchema& slot = slots[i];
    std::string_view rest = slot.text;
    std::string_view words = cut(&rest, ", with ");
    if (!rest.empty()) slot.with = slot_meant(slot, rest);
    if (words.substr(0, 3) == "as ") {
      slot.like = slot_meant(slot, words.substr(3));
    } else {
      const size_t end = words.rfind(']') + 1;
      std::string_view shapes = words.substr(0, end);
      const std::string_view types = stripped(words.substr(end));
      if (shapes == "[...]") shapes = "";
      while (!shapes.empty()) slot.shapes.push_back(shape(slot, cut(&shapes, "|")));
      if (types.substr(0, 3) == "as ") {
        slot.type_of = slot_meant(slot, types.substr(3));
      } else {
        for (const auto& set : kSets) {
          if (set.name == types) slot.types = set.types;
        }
        GROUPED_CHECK(slot.types != 0,
                      std::string(call) + ": `" + slot.name + "` has no type in \"" + slot.text + "\"");
        slot.types_text = names_of(slot.types);
      }
    }
    // A destination that is reached through addresses has no packed buffer, on either side.
    slot.table = slot_named((i < inputs ? slot.name : "into") + "_table", 0, inputs);
    if (i < inputs) continue;
    for (const std::string& into : {std::string(i == inputs ? "into" : ""), "into_" + slot.name}) {
      const int buffer = slot_named(into, 0, inputs);
      if (buffer >= 0) shared.emplace_back(static_cast<size_t>(buffer), i);
    }
  }
  if (tokens < 0) places = -1;
}

namespace {

// The checks say in `wrong` what they find, and nothing where all is well: XLA's edge asks at every run.
bool say(std::string* wrong, const SlotSchema& slot, const TensorView& view, const std::string& expected) {
  *wrong = named(slot, view) + ", expected " + expected;
  return false;
}

// Whether sizes can be computed with; an axis may hide behind one that is zero.
bool has_size(const SlotSchema& slot, const TensorView& view, std::string* wrong) {
  int64_t bytes = dtype_bytes(view.dtype);
  for (int axis = 0; axis < view.rank; ++axis) {
    if (view.dims[axis] < 0) return say(wrong, slot, view, "no negative axis");
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(view.dims[axis], 1), &bytes) || bytes > kMostBytes) {
      return say(wrong, slot, view, "no more than memory can hold, 2^48 bytes");
    }
  }
  return true;
}

bool same(const TensorView& a, const TensorView& b) {
  return a.rank == b.rank && a.dtype == b.dtype && std::equal(a.dims, a.dims + std::max(a.rank, 0), b.dims);
}

bool has_companions(const Schema& schema, const SlotSchema& slot, const TensorView& view, const Views& views,
                    std::string* wrong) {
  if (slot.with >= 0 && view.present() != views.all[slot.with]->present()) {
    return say(wrong, slot, view, "it if and only if there is `" + schema.slots[slot.with].name + "`");
  }
  if (slot.table >= 0 && !view.present() && views.all[slot.table]->present()) {
    return say(wrong, slot, view, "its packed form beside `" + schema.slots[slot.table].name + "`");
  }
  return true;
}

bool has_type(const Schema& schema, const SlotSchema& slot, const TensorView& view, const Views& views,
              std::string* wrong) {
  if (slot.type_of < 0) return (slot.types & bit(view.dtype)) != 0 || say(wrong, slot, view, slot.types_text);
  return view.dtype == views.all[slot.type_of]->dtype ||
         say(wrong, slot, view, "the type of `" + schema.slots[slot.type_of].name + "`");
}

std::string expected(const SlotSchema::Shape& shape, const int64_t* lengths) {
  std::string values;
  for (int axis = 0; axis < shape.rank; ++axis) {
    const int dim = shape.dims[axis];
    const bool known = dim >= SlotSchema::kFixed || (dim >= 0 && lengths[dim] >= 0);
    const int64_t length = dim >= SlotSchema::kFixed ? dim - SlotSchema::kFixed : known ? lengths[dim] : 0;
    values += (axis ? ", " : "") + (known ? std::to_string(length) : "?");
  }
  values = "[" + values + "]";
  return values == shape.text ? values : shape.text + " = " + values;
}

// Lengths bind letters at their first place.
bool has_lengths(const Schema& schema, const SlotSchema& slot, const TensorView& view, int64_t* lengths,
                 std::string* wrong) {
  if (slot.shapes.empty()) return true;
  const SlotSchema::Shape* shape = nullptr;
  for (const SlotSchema::Shape& each : slot.shapes) {
    if (each.rank == view.rank) shape = &each;
  }
  if (shape == nullptr) {
    std::string texts;
    for (const SlotSchema::Shape& each : slot.shapes) texts += (texts.empty() ? "" : " or ") + each.text;
    return say(wrong, slot, view, texts);
  }
  for (int axis = 0; axis < view.rank; ++axis) {
    const int dim = shape->dims[axis];
    const int64_t length = view.dims[axis];
    if (dim == SlotSchema::kAnyLength) continue;
    if (dim == SlotSchema::kNotEmpty) {
      if (length < 1) return say(wrong, slot, view, "no empty axis");
    } else if (dim >= SlotSchema::kFixed) {
      if (length != dim - SlotSchema::kFixed) return say(wrong, slot, view, expected(*shape, lengths));
    } else if (lengths[dim] < 0) {
      const Letter& letter = schema.letters[static_cast<size_t>(dim)];
      if (length < letter.least || length > letter.most) {
        const std::string most = letter.most == INT64_MAX ? "or more" : "to " + std::to_string(letter.most);
        return say(wrong, slot, view,
                   std::to_string(letter.least) + " " + most + " " + letter.what + " (" + letter.name + ")");
      }
      lengths[dim] = length;
    } else if (length != lengths[dim]) {
      return say(wrong, slot, view, expected(*shape, lengths));
    }
  }
  return true;
}

}  // namespace

std::string mismatch(const Schema& schema, const Views& views) {
  int64_t lengths[kMaxLetters];
  std::fill(lengths, lengths + kMaxLetters, -1);
  std::string wrong;
  for (size_t i = 0; i < schema.slots.size(); ++i) {
    const SlotSchema& slot = schema.slots[i];
    const TensorView& view = *views.all[i];
    if (!has_companions(schema, slot, view, views, &wrong)) return wrong;
    if (!view.present()) continue;
    if (!has_size(slot, view, &wrong)) return wrong;
    if (slot.like >= 0) {
      const TensorView& other = *views.all[slot.like];
      if (!same(view, other)) {
        say(&wrong, slot, view, describe(other) + " = `" + schema.slots[slot.like].name + "`");
        return wrong;
      }
    } else if (!has_type(schema, slot, view, views, &wrong) || !has_lengths(schema, slot, view, lengths, &wrong)) {
      return wrong;
    }
  }
  if (schema.places >= 0 && lengths[schema.tokens] > 0 && lengths[schema.places] > INT32_MAX / lengths[schema.tokens]) {
    return "slots: " + std::to_string(lengths[schema.tokens]) + " tokens of " + std::to_string(lengths[schema.places]) +
           " places, expected fewer than 2^31 slots";
  }
  return wrong;
}

std::vector<std::pair<std::string, std::vector<std::string>>> type_sets() {
  return {
#define X(name, ...)                                                           \
  {name, [] {                                                                  \
     std::vector<std::string> names;                                           \
     for (const DType type : {__VA_ARGS__}) names.push_back(dtype_name(type)); \
     return names;                                                             \
   }()},
      GROUPED_TYPES(X)
#undef X
  };
}

}  // namespace grouped
