// LayerNorm and RMSNorm on the CPU. A row of a 16-bit dtype is widened into a buffer that stays in the first
// level of cache; fp32 and fp64 rows are used where they are.
#include "../norm.h"
#include "rows.h"

#include <cmath>

namespace memkern {
namespace {

constexpr int64_t kGrain = 16384;  // elements worth a thread of their own

// weight (plus one where zero_centred) or bias in the type it is computed with; `missing` where there is none.
template <class T>
std::vector<acc_t<T>> parameter_values(const MaybeTensor& parameter, int64_t columns, acc_t<T> missing,
                                       bool zero_centred = false) {
  std::vector<acc_t<T>> values(columns, missing);
  if (!parameter) return values;
  for_dtype(parameter->scalar_type(), [&](auto type) {
    const auto* from = const_data<decltype(type)>(*parameter);
    for (int64_t i = 0; i < columns; ++i) values[i] = acc_t<T>(widen(from[i])) + acc_t<T>(zero_centred);
  });
  return values;
}

template <class T>
struct Forward {
  const T *x, *residual;  // residual may be null
  const acc_t<T>*scale, *shift;
  T *y, *summed;
  acc_t<T> *mean, *rstd;  // mean may be null
  int64_t columns;
  acc_t<T> eps;
  bool centre;
};

// The statistics are those of the CUDA kernels: see Statistics in ../cuda/norm_forward.cuh.
template <class T>
MEMKERN_CLONES void forward_rows(const Forward<T>& a, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  const int64_t n = a.columns;
  std::vector<A> wide_row(n);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = a.x + row * n;
    if (a.residual) {
      const T* residual = a.residual + row * n;
      T* summed = a.summed + row * n;
      for (int64_t i = 0; i < n; ++i) store(summed + i, widen(x[i]) + widen(residual[i]));
      x = summed;
    }
    const A* z = widened(x, n, wide_row.data());
    A mean = 0, correction = 0;
    if (a.centre) {
      Sum<A> sum;
      for_lanes<A>(n, [&](int64_t i, auto value, int strand) MEMKERN_INLINED {
        load(z + i, &value);
        sum.add(strand, value);
      }, sum);
      mean = sum.total / A(n);
    }
    const T *next_x = a.x + (row + 2) * n, *next_residual = a.residual ? a.residual + (row + 2) * n : next_x;
    Sum<A> deviations, squares;
    for_lanes<A>(n, [&](int64_t i, auto value, int strand) MEMKERN_INLINED {
      load(z + i, &value);
      // The row after the next: memory takes that long to deliver it.
      __builtin_prefetch(next_x + i);
      __builtin_prefetch(next_residual + i);
      value -= mean;
      deviations.add(strand, value);
      value *= value;
      squares.add(strand, value);
    }, deviations, squares);
    if (a.centre) correction = deviations.total / A(n);
    const A variance = squares.total / A(n) - correction * correction;
    const A rstd = 1 / std::sqrt((variance < 0 ? A(0) : variance) + a.eps);
    if (a.mean) a.mean[row] = mean + correction;
    a.rstd[row] = rstd;
    T* y = a.y + row * n;
    for (int64_t i = 0; i < n; ++i) store(y + i, ((z[i] - mean) - correction) * rstd * a.scale[i] + a.shift[i]);
  }
}

template <class T>
struct Backward {
  const T *dy, *dsummed, *x;  // dsummed may be null; x is y where from_y
  const acc_t<T>*scale, *shift, *mean, *rstd;  // mean may be null
  T* dx;                      // these three: null where not needed
  acc_t<T> *dweight, *dbias;  // sums over rows, added to
  int64_t columns;
  bool centre, from_y;
};

template <class T>
MEMKERN_CLONES void backward_rows(const Backward<T>& a, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  const int64_t n = a.columns;
  std::vector<A> dy_row(n), x_row(n);
  for (int64_t row = begin; row < end; ++row) {
    const A* dy = widened(a.dy + row * n, n, dy_row.data());
    const A* x = widened(a.x + row * n, n, x_row.data());
    const A rstd = a.rstd[row];
    // x_hat = (x - offset) * factor
    A offset = a.mean ? a.mean[row] : 0, factor = rstd;
    if (a.from_y) {
      for (int64_t i = 0; i < n; ++i) x_row[i] = (x[i] - a.shift[i]) / a.scale[i];
      x = x_row.data();
      offset = 0;
      factor = 1;
    }
    const T *next_x = a.x + (row + 2) * n, *next_dy = a.dy + (row + 2) * n;
    Sum<A> of_g, of_g_x_hat;
    for_lanes<A>(n, [&](int64_t i, auto x_hat, int strand) MEMKERN_INLINED {
      auto grad = x_hat, g = x_hat, sum = x_hat;
      load(x + i, &x_hat);
      // The row after the next: memory takes that long to deliver it.
      __builtin_prefetch(next_x + i);
      __builtin_prefetch(next_dy + i);
      x_hat = (x_hat - offset) * factor;
      load(dy + i, &grad);
      load(a.scale + i, &g);
      g *= grad;
      of_g.add(strand, g);
      g *= x_hat;
      of_g_x_hat.add(strand, g);
      if (a.dweight) {
        load(a.dweight + i, &sum);
        sum += grad * x_hat;
        put(a.dweight + i, sum);
      }
      if (a.dbias) {
        load(a.dbias + i, &sum);
        sum += grad;
        put(a.dbias + i, sum);
      }
    }, of_g, of_g_x_hat);
    if (!a.dx) continue;
    const A mean_g = a.centre ? of_g.total / A(n) : 0;
    const A mean_g_x_hat = of_g_x_hat.total / A(n);
    T* dx = a.dx + row * n;
    const auto at = [&](int64_t i) MEMKERN_INLINED {
      return (dy[i] * a.scale[i] - mean_g - (x[i] - offset) * factor * mean_g_x_hat) * rstd;
    };
    if (a.dsummed) {
      const T* dsummed = a.dsummed + row * n;
      for (int64_t i = 0; i < n; ++i) store(dx + i, at(i) + widen(dsummed[i]));
    } else {
      for (int64_t i = 0; i < n; ++i) store(dx + i, at(i));
    }
  }
}

constexpr int64_t kStrand = 32;  // rows

// Adds sums to what is at `to`, and sets them back to zero.
template <class A>
MEMKERN_CLONES void move_sums(A* from, A* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    to[i] += from[i];
    from[i] = 0;
  }
}

// to[i] = the sum of count partials, in order.
template <class A, class W>
MEMKERN_CLONES void add_up(const A* partials, int64_t count, int64_t stride, A* buffer, W* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) buffer[i] = 0;
  for (int64_t p = 0; p < count; ++p)
    for (int64_t i = 0; i < n; ++i) buffer[i] += partials[p * stride + i];
  for (int64_t i = 0; i < n; ++i) store(to + i, buffer[i]);
}

// LayerNorm where centre, else RMSNorm, whose mean has no elements.
std::tuple<Tensor, Tensor, Tensor, Tensor> forward(const Tensor& input, const MaybeTensor& residual_input,
                                                   const MaybeTensor& weight_input, const MaybeTensor& bias_input,
                                                   int64_t columns, double eps, bool centre, bool zero_centred) {
  const int64_t rows = norm_rows(input, columns);
  const Tensor x = torch::stable::contiguous(input);
  const MaybeTensor residual = in_rows(x, residual_input, "residual");
  const MaybeTensor weight = parameter(x, weight_input, columns, "weight");
  const MaybeTensor bias = parameter(x, bias_input, columns, "bias");
  const ScalarType dtype = statistics_dtype(x);
  Tensor y = fresh(x, x.sizes(), x.scalar_type()), summed = fresh_if(residual.has_value(), x, residual, "summed");
  Tensor mean = fresh(x, {centre ? rows : 0}, dtype), rstd = fresh(x, {rows}, dtype);
  for_dtype(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    using A = acc_t<T>;
    const auto scale = parameter_values<T>(weight, columns, 1, zero_centred);
    const auto shift = parameter_values<T>(bias, columns, 0);
    const Forward<T> a{const_data<T>(x), const_data<T>(residual), scale.data(), shift.data(), mutable_data<T>(y),
                       mutable_data<T>(summed), mutable_data<A>(mean), mutable_data<A>(rstd), columns,
                       static_cast<A>(eps), centre};
    const int64_t grain = columns > 0 ? std::max<int64_t>(kGrain / columns, 1) : 1;
    torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
      forward_rows<T>(a, begin, end);
    });
  });
  return {y, summed, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad, const MaybeTensor& grad_summed, const Tensor& input,
                                            const MaybeTensor& weight_input, const MaybeTensor& bias_input,
                                            const MaybeTensor& mean_input, const Tensor& rstd_input, int64_t columns,
                                            bool centre, bool zero_centred, bool from_y, bool need_dx,
                                            bool need_dweight, bool need_dbias) {
  const int64_t rows = norm_rows(input, columns);
  const Tensor x = torch::stable::contiguous(input), dy = in_rows(x, grad, "dy");
  const MaybeTensor dsummed = in_rows(x, grad_summed, "dsummed");
  const MaybeTensor weight = parameter(x, weight_input, columns, "weight");
  const MaybeTensor bias = parameter(x, bias_input, columns, "bias");
  const Tensor rstd = statistics(x, rstd_input, rows, "rstd");
  const MaybeTensor mean = from_y || !mean_input ? MaybeTensor() : statistics(x, *mean_input, rows, "mean");
  Tensor dx = fresh_if(need_dx, x, x, "dx"), dweight = fresh_if(need_dweight, x, weight, "dweight");
  Tensor dbias = fresh_if(need_dbias, x, bias, "dbias");
  if (columns == 0) return {dx, dweight, dbias};

  // Blocks of rows follow from rows and columns, not from the number of threads: nor do the sums.
  const int64_t in_block = (std::max(kGrain / columns, rows / 64) / kStrand + 1) * kStrand;
  const int64_t blocks = (rows + in_block - 1) / in_block;
  for_dtype(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    using A = acc_t<T>;
    const auto scale = parameter_values<T>(weight, columns, 1, zero_centred);
    const auto shift = parameter_values<T>(bias, columns, 0);
    // Sums of kStrand rows, of blocks, of all: the rounding error stays that of short sums.
    std::vector<A> dweights(need_dweight ? blocks * columns : 0), dbiases(need_dbias ? blocks * columns : 0);
    torch::stable::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
      // Half a page apart: a store at a load's place in another page would hold that load up.
      constexpr int64_t page = 4096 / sizeof(A);
      const int64_t apart = columns + (page + page / 2 - columns % page) % page;
      std::vector<A> strand(apart + columns);
      A *dweight_strand = need_dweight ? strand.data() : nullptr, *dbias_strand = need_dbias ? &strand[apart] : nullptr;
      Backward<T> a{const_data<T>(dy), const_data<T>(dsummed), const_data<T>(x), scale.data(), shift.data(),
                    const_data<A>(mean), const_data<A>(rstd), mutable_data<T>(dx),
                    dweight_strand, dbias_strand, columns, centre, from_y};
      for (int64_t first = begin * in_block; first < std::min(rows, end * in_block); first += kStrand) {
        backward_rows<T>(a, first, std::min(rows, first + kStrand));
        const int64_t block = first / in_block * columns;
        if (dweight_strand) move_sums(dweight_strand, &dweights[block], columns);
        if (dbias_strand) move_sums(dbias_strand, &dbiases[block], columns);
      }
    });
    const auto finish = [&](const std::vector<A>& partials, Tensor& to) {
      for_dtype(to.scalar_type(), [&](auto parameter_type) {
        using W = decltype(parameter_type);
        if constexpr (std::is_same_v<A, float> != std::is_same_v<W, double>) {
          W* out = mutable_data<W>(to);
          torch::stable::parallel_for(0, to.numel(), kGrain, [&](int64_t begin, int64_t end) {
            std::vector<A> buffer(end - begin);
            add_up(partials.data() + begin, blocks, columns, buffer.data(), out + begin, end - begin);
          });
        }
      });
    };
    finish(dweights, dweight);
    finish(dbiases, dbias);
  });
  return {dx, dweight, dbias};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm_forward(const Tensor& x, const MaybeTensor& residual,
                                                              const MaybeTensor& weight, const MaybeTensor& bias,
                                                              int64_t columns, double eps) {
  return forward(x, residual, weight, bias, columns, eps, true, false);
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& dy, const MaybeTensor& dsummed, const Tensor& x,
                                                       const MaybeTensor& weight, const MaybeTensor& bias,
                                                       const Tensor& mean, const Tensor& rstd, int64_t columns,
                                                       bool from_y, bool need_dx, bool need_dweight, bool need_dbias) {
  return backward(dy, dsummed, x, weight, bias, mean, rstd, columns, true, false, from_y, need_dx, need_dweight,
                  need_dbias);
}

std::tuple<Tensor, Tensor, Tensor> rms_norm_forward(const Tensor& x, const MaybeTensor& residual,
                                                    const MaybeTensor& weight, int64_t columns, double eps,
                                                    bool zero_centred) {
  const auto [y, summed, mean, rstd] = forward(x, residual, weight, std::nullopt, columns, eps, false, zero_centred);
  return {y, summed, rstd};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& dy, const MaybeTensor& dsummed, const Tensor& x,
                                             const MaybeTensor& weight, const Tensor& rstd, int64_t columns,
                                             bool zero_centred, bool from_y, bool need_dx, bool need_dweight) {
  const auto [dx, dweight, dbias] = backward(dy, dsummed, x, weight, std::nullopt, std::nullopt, rstd, columns, false,
                                             zero_centred, from_y, need_dx, need_dweight, false);
  return {dx, dweight};
}

}  // namespace
}  // namespace memkern

STABLE_TORCH_LIBRARY_IMPL(memkern_cpu, CPU, m) {
  m.impl("layer_norm_forward", TORCH_BOX(&memkern::layer_norm_forward));
  m.impl("layer_norm_backward", TORCH_BOX(&memkern::layer_norm_backward));
  m.impl("rms_norm_forward", TORCH_BOX(&memkern::rms_norm_forward));
  m.impl("rms_norm_backward", TORCH_BOX(&memkern::rms_norm_backward));
}
