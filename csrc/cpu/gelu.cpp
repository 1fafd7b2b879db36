// GELU on the CPU; the formulas are in ../math.h.
#include "loops.h"

namespace memkern {
namespace {

constexpr int64_t kGrain = 16384;  // elements worth a thread of their own

template <bool Tanh, class T>
MEMKERN_CLONES void forward_loop(const T* x, T* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) store(y + i, gelu<Tanh, T>(widen(x[i])));
}

template <bool Tanh, class T>
MEMKERN_CLONES void backward_loop(const T* dy, const T* x, T* dx, int64_t n) {
  for (int64_t i = 0; i < n; ++i) store(dx + i, widen(dy[i]) * gelu_grad<Tanh, T>(widen(x[i])));
}

Tensor gelu_forward(const Tensor& input, const std::string& approximate) {
  const bool tanh = is_tanh(approximate);
  const Tensor x = dense(input);
  Tensor y = new_like(x);
  for_dtype(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const auto* from = static_cast<const T*>(x.const_data_ptr());
    auto* to = static_cast<T*>(y.mutable_data_ptr());
    torch::stable::parallel_for(0, x.numel(), kGrain, [&](int64_t begin, int64_t end) {
      (tanh ? forward_loop<true, T> : forward_loop<false, T>)(from + begin, to + begin, end - begin);
    });
  });
  return y;
}

Tensor gelu_backward(const Tensor& grad, const Tensor& input, const std::string& approximate) {
  const bool tanh = is_tanh(approximate);
  const Tensor x = dense(input), dy = in_order_of(x, grad, "dy");
  Tensor dx = new_like(x);
  for_dtype(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const auto* from_dy = static_cast<const T*>(dy.const_data_ptr());
    const auto* from_x = static_cast<const T*>(x.const_data_ptr());
    auto* to = static_cast<T*>(dx.mutable_data_ptr());
    torch::stable::parallel_for(0, x.numel(), kGrain, [&](int64_t begin, int64_t end) {
      (tanh ? backward_loop<true, T> : backward_loop<false, T>)(from_dy + begin, from_x + begin, to + begin,
                                                                 end - begin);
    });
  });
  return dx;
}

}  // namespace
}  // namespace memkern

STABLE_TORCH_LIBRARY_IMPL(memkern_cpu, CPU, m) {
  m.impl("gelu_forward", TORCH_BOX(&memkern::gelu_forward));
  m.impl("gelu_backward", TORCH_BOX(&memkern::gelu_backward));
}
