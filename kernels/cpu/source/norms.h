// LayerNorm and RMSNorm of few rows in one call, instead of six operations in XLA.
#pragma once

namespace NAMESPACE {

static void norm(const Norm& n) {
  for (int64_t m = 0; m < n.rows; m++) {
    const float* x = n.x + m * n.width;
    float* y = n.y + m * n.width;
    vf total{};
    float mean = 0;
    if (n.centred) {
      for (int64_t k = 0; k < n.width; k += W) total += numbers(x, k, n.width);
      mean = sum(total) / n.width;
      total = vf{};
    }
    int64_t k = 0;
    for (; k + W <= n.width; k += W) {
      const vf one = load(x + k) - mean;
      total += one * one;
    }
    float squares = sum(total);
    for (; k < n.width; k++) squares += (x[k] - mean) * (x[k] - mean);
    const float factor = 1 / std::sqrt(squares / n.width + n.eps);
    for (k = 0; k < n.width; k += W) {
      vf one = (numbers(x, k, n.width) - mean) * factor;
      if (n.scale) one *= numbers(n.scale, k, n.width);
      if (n.bias) one += numbers(n.bias, k, n.width);
      put(y, k, n.width, one);
    }
  }
}

}  // namespace NAMESPACE
