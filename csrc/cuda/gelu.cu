// GELU on CUDA; the formulas are in ../math.h, the memory access in pointwise.cuh.
#include "../math.h"
#include "pointwise.cuh"

namespace memkern {
namespace {

template <bool Tanh, class T>
struct Forward {
  static __device__ __forceinline__ acc_t<T> apply(acc_t<T> x) { return gelu<Tanh, T>(x); }
};

template <bool Tanh, class T>
struct Backward {
  static __device__ __forceinline__ acc_t<T> apply(acc_t<T> dy, acc_t<T> x) { return dy * gelu_grad<Tanh, T>(x); }
};

Tensor gelu_forward(const Tensor& input, const std::string& approximate) {
  const bool tanh = is_tanh(approximate);
  const OnDeviceOf device(input);
  const Tensor x = dense(input);
  Tensor y = new_like(x);
  for_dtype(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const auto run = tanh ? pointwise<Forward<true, T>, T, 1> : pointwise<Forward<false, T>, T, 1>;
    run({x.const_data_ptr()}, y.mutable_data_ptr(), x.numel(), device.stream);
  });
  return y;
}

Tensor gelu_backward(const Tensor& grad, const Tensor& input, const std::string& approximate) {
  const bool tanh = is_tanh(approximate);
  const OnDeviceOf device(input);
  const Tensor x = dense(input), dy = in_order_of(x, grad, "dy");
  Tensor dx = new_like(x);
  for_dtype(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const auto run = tanh ? pointwise<Backward<true, T>, T, 2> : pointwise<Backward<false, T>, T, 2>;
    run({dy.const_data_ptr(), x.const_data_ptr()}, dx.mutable_data_ptr(), x.numel(), device.stream);
  });
  return dx;
}

}  // namespace
}  // namespace memkern

STABLE_TORCH_LIBRARY_IMPL(MEMKERN_CUDA_NAMESPACE, MEMKERN_CUDA_KEY, m) {
  m.impl("gelu_forward", TORCH_BOX(&memkern::gelu_forward));
  m.impl("gelu_backward", TORCH_BOX(&memkern::gelu_backward));
}
