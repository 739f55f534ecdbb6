#include "call.h"
#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC target("avx2,fma,f16c")
#define LANES 8
#define NAMESPACE avx2
#include "vectors.h"
#include "matmul.h"
#include "mask.h"
#include "attention.h"
#include "products.h"
#include "norms.h"

const Kernels KERNELS_AVX2 = {avx2::forward, avx2::few_queries, avx2::backward,
                              avx2::backward_bias, avx2::product, avx2::norm};
#endif
