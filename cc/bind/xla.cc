// NOTE: attributes are bound as a whole and read by name, because a handler that binds single ones refuses any other;
// so a field may be added to a call without a new target.
#include "cc/bind/xla.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "cc/api/kept.h"
#include "cc/bind/launch.h"
#include "xla/ffi/api/ffi.h"

namespace grouped {
namespace {

// All that XLA passes to a handler, undecoded.
struct Frame {
  const XLA_FFI_CallFrame* raw;
};

}  // namespace
}  // namespace grouped

template <>
struct xla::ffi::internal::Decode<xla::ffi::internal::AttrsTag<grouped::Frame>> {
  static std::optional<grouped::Frame> call(DecodingOffsets&, DecodingContext& context, DiagnosticEngine&) {
    return grouped::Frame{context.call_frame};
  }
};

namespace grouped {
namespace {

namespace ffi = xla::ffi;

class XlaPool final : public Pool {
 public:
  explicit XlaPool(ffi::ThreadPool pool) : pool_(pool) {}
  int threads() const override { return static_cast<int>(std::max<int64_t>(pool_.num_threads(), 1)); }
  void schedule(std::function<void()> task) override { pool_.Schedule(std::move(task)); }

 private:
  ffi::ThreadPool pool_;
};

DType dtype_of(ffi::DataType type) {
  switch (type) {
    case ffi::F32:
      return DType::f32;
    case ffi::BF16:
      return DType::bf16;
    case ffi::F16:
      return DType::f16;
    case ffi::F8E4M3FN:
      return DType::e4m3fn;
    case ffi::F8E5M2:
      return DType::e5m2;
    case ffi::F8E8M0FNU:
      return DType::e8m0;
    case ffi::U32:
      return DType::u32;
    case ffi::S32:
      return DType::i32;
    case ffi::S64:
      return DType::i64;
    case ffi::U8:
      return DType::u8;
    default:
      throw std::invalid_argument("an operand's element type is not known to the native calls (XLA type " +
                                  std::to_string(static_cast<int>(type)) + ")");
  }
}

TensorView view_of(const ffi::AnyBuffer& buffer) {
  const ffi::AnyBuffer::Dimensions dims = buffer.dimensions();
  if (dims.size() > kMaxRank) throw std::invalid_argument("an operand has rank " + std::to_string(dims.size()));
  TensorView view;
  view.dtype = dtype_of(buffer.element_type());
  view.rank = static_cast<int>(dims.size());
  std::copy(dims.begin(), dims.end(), view.dims);
  return view;
}

// The attributes of one call: the names that are the binding's own, and the call's parameters.
struct Attributes {
  int64_t operands = 0;  // bit i: input slot i is present
  int64_t results = 1;   // bit i: output slot i is present
  std::string_view arch;
  std::string_view implementation;
  Params params;

  explicit Attributes(const ffi::Dictionary& dictionary) {
    for (auto it = dictionary.begin(); it != dictionary.end(); ++it) {
      const std::string_view name = *it;
      ParamValue value;
      if (dictionary.isa<int64_t>(it)) {
        value = *dictionary.get<int64_t>(name);
      } else if (dictionary.isa<std::string_view>(it)) {
        value = *dictionary.get<std::string_view>(name);
      } else if (dictionary.isa<float>(it)) {
        value = *dictionary.get<float>(name);
      } else {
        throw std::invalid_argument("attribute `" + std::string(name) + "` must be an int64, a float or a string");
      }
      if (name == "operands" && std::holds_alternative<int64_t>(value)) {
        operands = std::get<int64_t>(value);
      } else if (name == "results" && std::holds_alternative<int64_t>(value)) {
        results = std::get<int64_t>(value);
      } else if (name == "arch" && std::holds_alternative<std::string_view>(value)) {
        arch = std::get<std::string_view>(value);
      } else if (name == "implementation" && std::holds_alternative<std::string_view>(value)) {
        implementation = std::get<std::string_view>(value);
      } else {
        params.emplace_back(name, value);
      }
    }
  }
};

// One call decoded: everything but addresses.
template <class Call>
struct Decoded {
  uint64_t operands, results;  // bit i: slot i is present
  Prepared<Call> prepared;
};

template <class Call>
Decoded<Call> decode(Platform platform, ffi::RemainingArgs args, ffi::RemainingRets rets,
                     const ffi::Dictionary& dictionary) {
  const Attributes attributes(dictionary);
  const Schema& names = schema<Call>();
  std::vector<TensorView> inputs(names.inputs);
  std::vector<TensorView> outputs(names.outputs());
  size_t next = 0;
  for (size_t slot = 0; slot < inputs.size(); ++slot) {
    if ((attributes.operands >> slot & 1) == 0) continue;
    auto buffer = args.get<ffi::AnyBuffer>(next++);
    if (!buffer.has_value()) throw std::invalid_argument("fewer operands than bits in attribute `operands`");
    inputs[slot] = view_of(*buffer);
  }
  if (next != args.size() || attributes.operands >> inputs.size() != 0) {
    throw std::invalid_argument("attribute `operands` does not fit the " + std::to_string(args.size()) + " operands");
  }
  const auto given = static_cast<size_t>(__builtin_popcountll(static_cast<uint64_t>(attributes.results)));
  if (rets.size() != given + 1 || attributes.results >> outputs.size() != 0) {
    throw std::invalid_argument("attribute `results` does not fit the " + std::to_string(rets.size()) +
                                " results (the workspace comes last)");
  }
  size_t next_result = 0;
  for (size_t slot = 0; slot < outputs.size(); ++slot) {
    if ((attributes.results >> slot & 1) == 0) continue;
    outputs[slot] = view_of(**rets.get<ffi::AnyBuffer>(next_result++));
  }
  Prepared<Call> prepared(attributes.arch, attributes.implementation, inputs, outputs, attributes.params);
  if (prepared.target().platform != platform) {
    throw std::invalid_argument("arch \"" + std::string(attributes.arch) + "\" is not of the platform that runs it");
  }
  return {static_cast<uint64_t>(attributes.operands), static_cast<uint64_t>(attributes.results), std::move(prepared)};
}

// The bytes of everything that a call is decoded from: calls with the same bytes are the same call.
class Key {
 public:
  explicit Key(const XLA_FFI_CallFrame& frame) {
    bytes_.reserve(2048);
    for (int64_t i = 0; i < frame.args.size; ++i) buffer(frame.args.args[i]);
    number(frame.args.size);
    for (int64_t i = 0; i < frame.rets.size; ++i) buffer(frame.rets.rets[i]);
    number(frame.rets.size);
    for (int64_t i = 0; i < frame.attrs.size; ++i) {
      text(*frame.attrs.names[i]);
      attribute(frame.attrs.types[i], frame.attrs.attrs[i]);
    }
  }
  // Not known where an attribute is of a kind that no call has.
  bool known() const { return known_; }
  const std::string& bytes() const { return bytes_; }

 private:
  void append(const void* from, size_t count) { bytes_.append(static_cast<const char*>(from), count); }
  void number(int64_t value) { append(&value, sizeof value); }
  void text(const XLA_FFI_ByteSpan& span) {
    number(static_cast<int64_t>(span.len));
    append(span.ptr, span.len);
  }
  void buffer(const void* given) {
    const auto& of = *static_cast<const XLA_FFI_Buffer*>(given);
    number(of.dtype);
    number(of.rank);
    append(of.dims, sizeof(int64_t) * static_cast<size_t>(of.rank));
  }
  void attribute(XLA_FFI_AttrType type, const void* value) {
    number(type);
    if (type == XLA_FFI_AttrType_STRING) return text(*static_cast<const XLA_FFI_ByteSpan*>(value));
    const auto* scalar = static_cast<const XLA_FFI_Scalar*>(value);
    known_ = known_ && type == XLA_FFI_AttrType_SCALAR &&
             (scalar->dtype == XLA_FFI_DataType_S64 || scalar->dtype == XLA_FFI_DataType_F32);
    if (!known_) return;
    number(scalar->dtype);
    append(scalar->value, scalar->dtype == XLA_FFI_DataType_S64 ? sizeof(int64_t) : sizeof(float));
  }

  std::string bytes_;
  bool known_ = true;
};

// XLA calls a handler in each execution of a program, and decoding a call, with the choice of its kernel, takes longer
// than launching it. So decoded calls are kept.
template <class Call>
std::shared_ptr<const Decoded<Call>> decoded_before(Platform platform, ffi::RemainingArgs args, ffi::RemainingRets rets,
                                                    const XLA_FFI_CallFrame& frame) {
  constexpr size_t kMost = 1024;
  using Shared = std::shared_ptr<const Decoded<Call>>;
  static auto* kept = new Kept<Shared, kMost>[2];  // by platform; never destroyed, for a program may run at exit
  const auto made = [&] {
    return std::make_shared<const Decoded<Call>>(decode<Call>(platform, args, rets, ffi::Dictionary(&frame.attrs)));
  };
  const Key key(frame);
  return key.known() ? kept[platform == Platform::cpu ? 0 : 1].get(key.bytes(), made) : made();
}

template <class Call>
void execute(Platform platform, void* stream, Pool* pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
             const XLA_FFI_CallFrame& frame) {
  const auto call = decoded_before<Call>(platform, args, rets, frame);

  const Schema& names = schema<Call>();
  std::vector<uintptr_t> addresses(names.inputs + names.outputs(), 0);
  const auto put = [&](uint64_t present, size_t from, void** buffers) {
    for (uint64_t left = present; left != 0; left &= left - 1) {
      const auto slot = static_cast<size_t>(__builtin_ctzll(left));
      addresses[from + slot] = reinterpret_cast<uintptr_t>(static_cast<const XLA_FFI_Buffer*>(*buffers++)->data);
    }
  };
  put(call->operands, 0, frame.args.args);
  put(call->results, names.inputs, frame.rets.rets);
  auto workspace = rets.get<ffi::AnyBuffer>(rets.size() - 1);
  Buffers buffers;
  buffers.addresses = addresses.data();
  buffers.workspace = reinterpret_cast<uintptr_t>((**workspace).untyped_data());
  buffers.workspace_bytes = (**workspace).size_bytes();
  buffers.stream = stream;
  buffers.pool = pool;
  call->prepared.launch(buffers);
}

// Nothing may be thrown into XLA.
template <class Call, class Body>
ffi::Error guarded(Body body) {
  const auto words = [](const char* what) { return "jg_" + std::string(Call::kName) + "_v1: " + what; };
  try {
    body();
    return ffi::Error::Success();
  } catch (const std::invalid_argument& error) {
    return ffi::Error::InvalidArgument(words(error.what()));
  } catch (const std::exception& error) {
    return ffi::Error::Internal(words(error.what()));
  } catch (...) {
    return ffi::Error::Internal(words("an exception of unknown kind"));
  }
}

template <class Call>
ffi::Error execute_cpu(ffi::ThreadPool threads, ffi::RemainingArgs args, ffi::RemainingRets rets, Frame frame) {
  return guarded<Call>([&] {
    XlaPool pool(threads);
    execute<Call>(Platform::cpu, nullptr, &pool, args, rets, *frame.raw);
  });
}

template <class Call>
XLA_FFI_Error* cpu_handler(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::ThreadPool>()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attrs<Frame>()
                             .To(execute_cpu<Call>)
                             .release();
  return handler->Call(frame);
}

#if GROUPED_WITH_CUDA
template <class Call>
ffi::Error execute_cuda(void* stream, ffi::RemainingArgs args, ffi::RemainingRets rets, Frame frame) {
  return guarded<Call>([&] { execute<Call>(Platform::cuda, stream, nullptr, args, rets, *frame.raw); });
}

template <class Call>
XLA_FFI_Error* cuda_handler(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::PlatformStream<void*>>()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attrs<Frame>()
                             .To(execute_cuda<Call>, {ffi::Traits::kCmdBufferCompatible})
                             .release();
  return handler->Call(frame);
}
#endif

template <class Call>
void add_handlers(std::vector<XlaHandler>* handlers) {
  const std::string target = "jg_" + std::string(Call::kName) + "_v1";
  handlers->push_back({"cpu", target, reinterpret_cast<void*>(&cpu_handler<Call>)});
#if GROUPED_WITH_CUDA
  handlers->push_back({"CUDA", target, reinterpret_cast<void*>(&cuda_handler<Call>)});
#endif
}

}  // namespace

std::vector<XlaHandler> xla_handlers() {
  std::vector<XlaHandler> handlers;
#define X(Call) add_handlers<Call>(&handlers);
  GROUPED_CALLS(X)
#undef X
  return handlers;
}

int xla_ffi_api_major() { return XLA_FFI_API_MAJOR; }
int xla_ffi_api_minor() { return XLA_FFI_API_MINOR; }

}  // namespace grouped
