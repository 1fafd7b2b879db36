// LayerNorm and RMSNorm on CUDA: arguments and results; the kernels are in the files included here.
#include "norm_backward.cuh"
#include "norm_forward.cuh"

namespace memkern {
namespace {

struct Results {
  Tensor y, summed, mean, rstd;
};

// LayerNorm where centre, else RMSNorm, whose mean has no elements.
Results forward(const Tensor& input, const MaybeTensor& residual_input, const MaybeTensor& weight_input,
                const MaybeTensor& bias_input, int64_t columns, double eps, bool centre, bool zero_centred) {
  const OnDeviceOf device(input);
  const int64_t rows = norm_rows(input, columns);
  const Tensor x = torch::stable::contiguous(input);
  const MaybeTensor residual = in_rows(x, residual_input, "residual");
  const MaybeTensor weight = parameter(x, weight_input, columns, "weight");
  const MaybeTensor bias = parameter(x, bias_input, columns, "bias");
  const bool fp32 = parameters_are_fp32(x, weight, bias);
  const ScalarType dtype = statistics_dtype(x);
  Results out{fresh(x, x.sizes(), x.scalar_type()), fresh_if(residual.has_value(), x, residual, "summed"),
              fresh(x, {centre ? rows : 0}, dtype), fresh(x, {rows}, dtype)};
  for_dtype(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    using A = acc_t<T>;
    Forward<T> a{};
    a.x = const_data<T>(x);
    a.residual = const_data<T>(residual);
    a.parameters = {const_data<void>(weight), const_data<void>(bias), fp32, zero_centred && weight};
    a.y = mutable_data<T>(out.y);
    a.summed = mutable_data<T>(out.summed);
    a.mean = mutable_data<A>(out.mean);
    a.rstd = mutable_data<A>(out.rstd);
    a.rows = rows;
    a.columns = columns;
    a.eps = static_cast<A>(eps);
    a.centre = centre;
    run_forward(a, x, device.stream);
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm_forward(const Tensor& x, const MaybeTensor& residual,
                                                              const MaybeTensor& weight, const MaybeTensor& bias,
                                                              int64_t columns, double eps) {
  const Results out = forward(x, residual, weight, bias, columns, eps, true, false);
  return {out.y, out.summed, out.mean, out.rstd};
}

std::tuple<Tensor, Tensor, Tensor> rms_norm_forward(const Tensor& x, const MaybeTensor& residual,
                                                    const MaybeTensor& weight, int64_t columns, double eps,
                                                    bool zero_centred) {
  const Results out = forward(x, residual, weight, std::nullopt, columns, eps, false, zero_centred);
  return {out.y, out.summed, out.rstd};
}

struct Gradients {
  Tensor dx, dweight, dbias;
};

Gradients backward(const Tensor& grad, const MaybeTensor& grad_summed, const Tensor& input,
                   const MaybeTensor& weight_input, const MaybeTensor& bias_input, const MaybeTensor& mean_input,
                   const Tensor& rstd_input, int64_t columns, bool centre, bool zero_centred, bool from_y,
                   bool need_dx, bool need_dweight, bool need_dbias) {
  const OnDeviceOf device(input);
  const int64_t rows = norm_rows(input, columns);
  const Tensor x = torch::stable::contiguous(input), dy = in_rows(x, grad, "dy");
  const MaybeTensor dsummed = in_rows(x, grad_summed, "dsummed");
  const MaybeTensor weight = parameter(x, weight_input, columns, "weight");
  const MaybeTensor bias = parameter(x, bias_input, columns, "bias");
  const bool fp32 = parameters_are_fp32(x, weight, bias);
  const Tensor rstd = statistics(x, rstd_input, rows, "rstd");
  const MaybeTensor mean = from_y || !mean_input ? MaybeTensor() : statistics(x, *mean_input, rows, "mean");
  Gradients out{fresh_if(need_dx, x, x, "dx"), fresh_if(need_dweight, x, weight, "dweight"),
                fresh_if(need_dbias, x, bias, "dbias")};
  if (columns == 0) return out;

  const int64_t chunk = rows_in_partial(rows, columns), partials = (rows + chunk - 1) / chunk;
  const ScalarType dtype = statistics_dtype(x);
  Tensor dweight_partials = fresh(x, {need_dweight ? partials : 0, columns}, dtype);
  Tensor dbias_partials = fresh(x, {need_dbias ? partials : 0, columns}, dtype);
  for_dtype(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    using A = acc_t<T>;
    Backward<T> a{};
    a.dy = const_data<T>(dy);
    a.dsummed = const_data<T>(dsummed);
    a.x = const_data<T>(x);
    a.parameters = {const_data<void>(weight), const_data<void>(bias), fp32, zero_centred && weight};
    a.mean = const_data<A>(mean);
    a.rstd = const_data<A>(rstd);
    a.dx = mutable_data<T>(out.dx);
    a.dweight = mutable_data<A>(dweight_partials);
    a.dbias = mutable_data<A>(dbias_partials);
    a.rows = rows;
    a.columns = columns;
    a.rows_in_partial = chunk;
    a.centre = centre;
    a.from_y = from_y;
    if (rows > 0) need_dbias ? run_backward<T, true>(a, device.stream) : run_backward<T, false>(a, device.stream);
    const auto add_up = [&](const Tensor& from, Tensor& to, auto parameter_type) {
      using W = decltype(parameter_type);
      if (to.numel() > 0)
        launch(finalise<A, W>, (columns + 31) / 32, 32 * kFinaliseRows, 0, device.stream, const_data<A>(from),
               mutable_data<W>(to), partials, columns);
    };
    const auto add_up_both = [&](auto parameter_type) {
      add_up(dweight_partials, out.dweight, parameter_type);
      add_up(dbias_partials, out.dbias, parameter_type);
    };
    if constexpr (sizeof(T) == 2) {
      if (fp32) return add_up_both(float{});
    }
    add_up_both(T{});
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& dy, const MaybeTensor& dsummed, const Tensor& x,
                                                       const MaybeTensor& weight, const MaybeTensor& bias,
                                                       const Tensor& mean, const Tensor& rstd, int64_t columns,
                                                       bool from_y, bool need_dx, bool need_dweight, bool need_dbias) {
  const Gradients out = backward(dy, dsummed, x, weight, bias, mean, rstd, columns, true, false, from_y, need_dx,
                                 need_dweight, need_dbias);
  return {out.dx, out.dweight, out.dbias};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& dy, const MaybeTensor& dsummed, const Tensor& x,
                                             const MaybeTensor& weight, const Tensor& rstd, int64_t columns,
                                             bool zero_centred, bool from_y, bool need_dx, bool need_dweight) {
  const Gradients out = backward(dy, dsummed, x, weight, std::nullopt, std::nullopt, rstd, columns, false,
                                 zero_centred, from_y, need_dx, need_dweight, false);
  return {out.dx, out.dweight};
}

}  // namespace
}  // namespace memkern

STABLE_TORCH_LIBRARY_IMPL(MEMKERN_CUDA_NAMESPACE, MEMKERN_CUDA_KEY, m) {
  m.impl("layer_norm_forward", TORCH_BOX(&memkern::layer_norm_forward));
  m.impl("layer_norm_backward", TORCH_BOX(&memkern::layer_norm_backward));
  m.impl("rms_norm_forward", TORCH_BOX(&memkern::rms_norm_forward));
  m.impl("rms_norm_backward", TORCH_BOX(&memkern::rms_norm_backward));
}
