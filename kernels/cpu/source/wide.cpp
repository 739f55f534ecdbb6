#include "call.h"
#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#define LANES 16
#define NAMESPACE wide
#include "vectors.h"
#include "matmul.h"
#include "mask.h"
#include "attention.h"
#include "products.h"
#include "norms.h"

const Kernels KERNELS_WIDE = {wide::forward, wide::few_queries, wide::backward,
                              wide::backward_bias, wide::product, wide::norm};
#endif
