// Element types and borrowed buffers: the vocabulary of every native call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace grouped {

// The one list of element types: name (as NumPy and ml_dtypes spell it), C++ tag, bytes.
#define GROUPED_DTYPES(X)       \
  X("float32", f32, 4)          \
  X("bfloat16", bf16, 2)        \
  X("float16", f16, 2)          \
  X("float8_e4m3fn", e4m3fn, 1) \
  X("float8_e5m2", e5m2, 1)     \
  X("float8_e8m0fnu", e8m0, 1)  \
  X("int32", i32, 4)            \
  X("int64", i64, 8)            \
  X("uint8", u8, 1)             \
  X("uint32", u32, 4)

enum class DType : uint8_t {
#define X(name, tag, bytes) tag,
  GROUPED_DTYPES(X)
#undef X
};

constexpr int64_t dtype_bytes(DType dtype) {
  switch (dtype) {
#define X(name, tag, bytes) \
  case DType::tag:          \
    return bytes;
    GROUPED_DTYPES(X)
#undef X
  }
  return 0;
}

constexpr const char* dtype_name(DType dtype) {
  switch (dtype) {
#define X(name, tag, bytes) \
  case DType::tag:          \
    return name;
    GROUPED_DTYPES(X)
#undef X
  }
  return "?";
}

constexpr int kMaxRank = 4;

// A row-major, contiguous buffer of the caller. An absent operand has rank -1. While a plan is made only
// dtype, rank and dims are filled in; data is read by `launch` alone.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::u8;
  int rank = -1;
  int64_t dims[kMaxRank] = {0, 0, 0, 0};

  bool present() const { return rank >= 0; }
  int64_t elements() const {
    int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= dims[i];
    return n;
  }
  int64_t bytes() const { return elements() * dtype_bytes(dtype); }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

// A buffer as a matrix: what comes before an axis, and the elements from the axis on.
struct SplitAt {
  int64_t outer = 1;
  int64_t inner = 1;

  SplitAt(const TensorView& t, int64_t axis) {
    for (int i = 0; i < t.rank; ++i) (i < axis ? outer : inner) *= t.dims[i];
  }
};

// The type and dimensions of a buffer, for errors.
std::string describe(const TensorView& t);

}  // namespace grouped
