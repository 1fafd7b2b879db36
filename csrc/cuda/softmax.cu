// Softmax on CUDA: arguments and results; the kernels are in the files included here.
#include "softmax_inner.cuh"
#include "softmax_rows.cuh"

namespace memkern {
namespace {

std::tuple<Tensor, Tensor> softmax_forward(const Tensor& input, const MaybeTensor& mask, int64_t dim, double scale,
                                           bool causal, bool log, bool zero_masked, double dropout,
                                           const MaybeTensor& seed, ScalarType dtype) {
  const OnDeviceOf device(input);
  check_log(log, mask, causal, dropout);
  const SoftmaxShape shape = softmax_shape(input, dim, causal);
  const Tensor x = torch::stable::contiguous(input);
  Tensor held;  // keeps the mask
  const MaskRows mask_at = mask_rows(x, mask, dim, held);
  Tensor y, dropped;
  for_dtypes(x.scalar_type(), dtype, [&](auto type, auto y_type) {
    using T = decltype(type);
    using O = decltype(y_type);
    Forward<T, O> a{};
    a.dropout = dropout_of<acc_t<T>>(x, dropout, seed);
    y = fresh(x, x.sizes(), dtype);
    dropped = dropout > 0 ? fresh(x, x.sizes(), dtype) : fresh(x, {0}, dtype);
    a.x = const_data<T>(x);
    a.mask = mask_at;
    a.y = mutable_data<O>(y);
    a.dropped = mutable_data<O>(dropped);
    a.shape = shape;
    a.scale = Scale<acc_t<T>>(static_cast<acc_t<T>>(scale));
    a.log = log;
    a.zero_masked = zero_masked;
    if (x.numel() > 0) shape.inner > 1 ? run_inner(a, device.stream) : run_rows(a, device.stream);
  });
  return {y, dropped};
}

// dx may be dy.
void backward_into(Tensor& dx, const Tensor& dy, const Tensor& result, int64_t dim, double scale, bool causal, bool log,
                   double dropout, const MaybeTensor& seed) {
  const OnDeviceOf device(result);
  check_log(log, std::nullopt, causal, dropout);
  const Tensor y = torch::stable::contiguous(result);
  for_dtypes(dx.scalar_type(), y.scalar_type(), [&](auto type, auto y_type) {
    using T = decltype(type);
    using O = decltype(y_type);
    Backward<T, O> a{};
    a.dropout = dropout_of<acc_t<T>>(y, dropout, seed);
    a.dy = const_data<O>(dy);
    a.y = const_data<O>(y);
    a.dx = mutable_data<T>(dx);
    a.shape = softmax_shape(y, dim, causal);
    a.scale = static_cast<acc_t<T>>(scale);
    a.log = log;
    if (y.numel() > 0) a.shape.inner > 1 ? run_inner(a, device.stream) : run_rows(a, device.stream);
  });
}

Tensor softmax_backward(const Tensor& dy, const Tensor& y, int64_t dim, double scale, bool causal, bool log,
                        double dropout, const MaybeTensor& seed, ScalarType dtype) {
  check_like_y(y, dy);
  check_softmax_dtypes(dtype, y.scalar_type());
  Tensor dx = fresh(y, y.sizes(), dtype);
  backward_into(dx, torch::stable::contiguous(dy), y, dim, scale, causal, log, dropout, seed);
  return dx;
}

void softmax_backward_(Tensor dy, const Tensor& y, int64_t dim, double scale, bool causal, bool log, double dropout,
                       const MaybeTensor& seed) {
  check_like_y(y, dy);
  STD_TORCH_CHECK(dy.is_contiguous(), "dy: needs to be contiguous, to be written over");
  backward_into(dy, dy, y, dim, scale, causal, log, dropout, seed);
}

}  // namespace
}  // namespace memkern

STABLE_TORCH_LIBRARY_IMPL(MEMKERN_CUDA_NAMESPACE, MEMKERN_CUDA_KEY, m) {
  m.impl("softmax_forward", TORCH_BOX(&memkern::softmax_forward));
  m.impl("softmax_backward", TORCH_BOX(&memkern::softmax_backward));
  m.impl("softmax_backward_", TORCH_BOX(&memkern::softmax_backward_));
}
