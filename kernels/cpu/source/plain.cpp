// Any processor except x86-64 with AVX2: SSE vectors on older x86-64, NEON on aarch64.
#include "call.h"
#define LANES 4
#define NAMESPACE plain
#include "vectors.h"
#include "matmul.h"
#include "mask.h"
#include "attention.h"
#include "products.h"
#include "norms.h"

const Kernels KERNELS_PLAIN = {plain::forward, plain::few_queries, plain::backward,
                               plain::backward_bias, plain::product, plain::norm};
