// Entry points for XLA: read a call's buffers and attributes, choose the instruction set, run on XLA's
// threads.
#include "call.h"
#include "threads.h"
#include "xla/ffi/api/ffi.h"

#ifndef SOURCES
#define SOURCES ""
#define BUILT_WITH ""
#endif

namespace ffi = xla::ffi;

namespace {

// The instruction sets that this library contains and the processor supports, the widest first.
struct Instructions {
  const char* name;
  const Kernels* kernels;
};
std::vector<Instructions> known_instructions() {
  std::vector<Instructions> known;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    known.push_back({"avx512", &KERNELS_WIDE});
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    known.push_back({"avx2", &KERNELS_AVX2});
#endif
#if defined(__aarch64__)
  known.push_back({"neon", &KERNELS_PLAIN});
#endif
  known.push_back({"plain", &KERNELS_PLAIN});
  return known;
}
std::atomic<const Instructions*>& chosen() {
  // never destroyed: XLA's threads may still compute while the process exits
  static const auto& known = *new std::vector<Instructions>(known_instructions());
  static std::atomic<const Instructions*> chosen{known.data()};
  return chosen;
}
const Kernels& kernels() { return *chosen().load()->kernels; }

template <class T>
const T* array(const ffi::AnyBuffer& buffer) {
  return buffer.element_count() ? (const T*)buffer.untyped_data() : nullptr;
}

int64_t axis(const ffi::AnyBuffer& buffer, int at) { return buffer.dimensions()[at]; }

ffi::Error called(int kind, ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  float scale, float softcap, int64_t threshold, float keeps, bool fixed,
                  int64_t block_q, int64_t block_k, ffi::Span<const int32_t> program,
                  ffi::Span<const int32_t> constants) {
  Call call{};
  call.fixed = fixed;
  std::vector<ffi::AnyBuffer> in;
  for (size_t i = 0; i < args.size(); i++) in.push_back(args.get<ffi::AnyBuffer>(i).value());
  std::vector<ffi::AnyBuffer> out;
  for (size_t i = 0; i < rets.size(); i++) out.push_back(*rets.get<ffi::AnyBuffer>(i).value());
  const ffi::AnyBuffer &query = in[0], &key = in[1], &value = in[2];
  call.B = axis(query, 0), call.T = axis(query, 1), call.N = axis(query, 2);
  call.H = axis(query, 3), call.S = axis(key, 1), call.K = axis(key, 2), call.Hv = axis(value, 3);
  switch (query.element_type()) {
    case ffi::F32: call.dtype = Dtype::float32; break;
    case ffi::BF16: call.dtype = Dtype::bfloat16; break;
    case ffi::F16: call.dtype = Dtype::float16; break;
    default: return ffi::Error::InvalidArgument("query: must be float32, bfloat16 or float16");
  }
  call.query = query.untyped_data(), call.key = key.untyped_data();
  call.value = value.untyped_data();
  call.scale = scale, call.softcap = softcap, call.threshold = (uint32_t)threshold;
  call.kept = keeps;
  call.q_vectors = array<int32_t>(in[3]), call.k_vectors = array<int32_t>(in[4]);
  call.num_q = axis(in[3], 0), call.lead_q = axis(in[3], 1);
  call.num_k = axis(in[4], 0), call.lead_k = axis(in[4], 1);
  call.pairs = array<int8_t>(in[5]);
  call.pairs_b = axis(in[5], 0), call.pairs_n = axis(in[5], 1);
  call.bias = array<void>(in[6]);
  call.bias_is_wide = in[6].element_type() == ffi::F32;
  for (int i = 0; i < 4; i++) call.bias_shape[i] = axis(in[6], i);
  call.slopes = array<float>(in[7]), call.slopes_b = axis(in[7], 0);
  call.sinks = array<float>(in[8]), call.sinks_b = axis(in[8], 0);
  call.dropout = array<uint32_t>(in[9]);
  call.order = array<int32_t>(in[10]), call.full = array<int32_t>(in[11]);
  call.seen = array<int32_t>(in[12]);
  call.tiles_b = axis(in[10], 0), call.tiles_n = axis(in[10], 1);
  call.tile_rows = axis(in[10], 2), call.tile_columns = axis(in[10], 3);
  call.block_q = block_q, call.block_k = block_k;
  call.program = program.begin(), call.num_operations = program.size() / 4;
  call.constants = constants.begin(), call.num_constants = constants.size();
  call.threads = pool.num_threads();
  const Parallel parallel = [&](int64_t count, const std::function<void(int64_t)>& work) {
    run(pool, count, work, kind == 3);
  };
  if (kind == 0 || kind == 3) {
    call.out = out[0].untyped_data(), call.out_is_wide = out[0].element_type() == ffi::F32;
    call.row_max = (float*)out[1].untyped_data(), call.log_sum = (float*)out[2].untyped_data();
    (kind == 0 ? kernels().forward : kernels().few_queries)(call, parallel);
    return ffi::Error::Success();
  }
  call.do_ = in[13].untyped_data();
  call.saved_max = array<float>(in[14]), call.saved_sum = array<float>(in[15]);
  call.D = array<float>(in[16]);
  if (kind == 1) {
    call.dq = out[0].untyped_data(), call.dk = out[1].untyped_data();
    call.dv = out[2].untyped_data();
    call.slope_rows = out.size() > 3 ? (float*)out[3].untyped_data() : nullptr;
    kernels().backward(call, parallel);
  } else {
    call.dbias = (float*)out[0].untyped_data();
    kernels().backward_bias(call, parallel);
  }
  return ffi::Error::Success();
}

template <int kind>
ffi::Error handle(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  float scale, float softcap, int64_t threshold, float keeps, bool fixed,
                  int64_t block_q, int64_t block_k, ffi::Span<const int32_t> program,
                  ffi::Span<const int32_t> constants) {
  try {
    return called(kind, pool, args, rets, scale, softcap, threshold, keeps, fixed, block_q,
                  block_k, program, constants);
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "attention: no memory is left");
  }
}

ffi::Error multiplied(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weights,
                      ffi::AnyBuffer scale, ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> y,
                      bool turned, bool x_turned, bool fixed) {
  Product p{};
  p.rows = axis(*y, 0), p.inputs = axis(x, x_turned ? 0 : 1), p.outputs = axis(*y, 1);
  p.threads = pool.num_threads(), p.x_turned = x_turned, p.fixed = fixed;
  p.x = array<float>(x), p.weights = weights.untyped_data(), p.turned = turned;
  p.bias = array<float>(bias);
  if (weights.element_type() == ffi::U32) {
    p.group_scale = scale.untyped_data(), p.groups = axis(scale, 0);
    p.half = scale.element_type() == ffi::F16;
  } else {
    p.scale = array<float>(scale);
  }
  p.y = (float*)y->untyped_data();
  switch (weights.element_type()) {
    case ffi::F32: p.dtype = Weights::float32; break;
    case ffi::BF16: p.dtype = Weights::bfloat16; break;
    case ffi::S8: p.dtype = Weights::int8; break;
    case ffi::U32: p.dtype = Weights::int4; break;
    default: return ffi::Error::InvalidArgument("weights: must be float32, bfloat16, int8 or uint32");
  }
  try {
    kernels().product(p, [&](int64_t count, const std::function<void(int64_t)>& work) {
      run(pool, count, work, true);
    });
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "product: no memory is left");
  }
  return ffi::Error::Success();
}

ffi::Error normalised(ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::AnyBuffer bias,
                      ffi::Result<ffi::AnyBuffer> y, float eps, bool centred) {
  Norm n{};
  n.rows = axis(x, 0), n.width = axis(x, 1);
  n.x = array<float>(x), n.scale = array<float>(scale), n.bias = array<float>(bias);
  n.eps = eps, n.centred = centred, n.y = (float*)y->untyped_data();
  kernels().norm(n);
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)
#define HANDLER(name, kind)                                       \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, handle<kind>,               \
                                ffi::Ffi::Bind()                  \
                                    .Ctx<ffi::ThreadPool>()       \
                                    .RemainingArgs()              \
                                    .RemainingRets()              \
                                    .Attr<float>("scale")         \
                                    .Attr<float>("softcap")       \
                                    .Attr<int64_t>("threshold")   \
                                    .Attr<float>("kept")          \
                                    .Attr<bool>("fixed")          \
                                    .Attr<int64_t>("block_q")     \
                                    .Attr<int64_t>("block_k")     \
                                    .Attr<ffi::Span<const int32_t>>("program") \
                                    .Attr<ffi::Span<const int32_t>>("constants"))

HANDLER(attention_forward, 0);
HANDLER(attention_backward, 1);
HANDLER(attention_backward_bias, 2);
HANDLER(attention_few_queries, 3);
XLA_FFI_DEFINE_HANDLER_SYMBOL(weight_product, multiplied,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("turned")
                                  .Attr<bool>("x_turned")
                                  .Attr<bool>("fixed"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(row_norm, normalised,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("eps")
                                  .Attr<bool>("centred"));
// The hashes of the sources and of the commands that compiled them, from setup.py.
extern "C" const char* attention_sources() { return SOURCES; }
extern "C" const char* attention_built_with() { return BUILT_WITH; }
extern "C" const char* attention_instructions() { return chosen().load()->name; }
// Select another instruction set; return whether the processor supports it.
extern "C" bool attention_use(const char* name) {
  static const auto& known = *new std::vector<Instructions>(known_instructions());
  for (const Instructions& one : known)
    if (!std::strcmp(one.name, name)) {
      chosen() = &one;
      return true;
    }
  return false;
}
#pragma GCC visibility pop
