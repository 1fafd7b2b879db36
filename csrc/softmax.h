// Softmax: what the ops check, and the formulas, on the CPU and on CUDA. Schemas: memkern/ops.py.
#pragma once

#include <cmath>

#include "math.h"
#include "random.h"
#include "tensor.h"

namespace memkern {

// ---- Arguments --------------------------------------------------------------

// Divides by a number that the host knows: in two multiplications, where a GPU's 64-bit division takes a hundred
// instructions. n < 2^62.
struct Divisor {
  uint64_t value = 1, inverse = ~uint64_t{0};  // of 2^64, rounded down

  Divisor() = default;
  explicit Divisor(int64_t divisor) : value(divisor), inverse(~uint64_t{0} / value) {}

  // The quotient, and what is left.
  MK_HD int64_t operator()(int64_t n, int64_t& rest) const {
#ifdef __CUDA_ARCH__
    uint64_t quotient = __umul64hi(n, inverse);
#else
    uint64_t quotient = static_cast<unsigned __int128>(n) * inverse >> 64;
#endif
    rest = n - quotient * value;
    if (uint64_t(rest) < value) return quotient;  // else it is one too low
    rest -= value;
    return quotient + 1;
  }
};

// x, contiguous, is outer x n x inner, and softmax is over n.
struct SoftmaxShape {
  int64_t outer = 1, n = 1, inner = 1;
  bool causal = false;  // inner is then 1, and outer counts rows
  Divisor queries;

  // How many keys row `row` sees: the last query sees all.
  MK_HD int64_t live(int64_t row) const {
    if (!causal) return n;
    int64_t query;
    queries(row, query);
    const int64_t keys = query + 1 + n - int64_t(queries.value);
    return keys < 0 ? 0 : keys > n ? n : keys;
  }
};

inline SoftmaxShape softmax_shape(const Tensor& x, int64_t dim, bool causal) {
  const int64_t dims = std::max<int64_t>(x.dim(), 1);
  STD_TORCH_CHECK(-dims <= dim && dim < dims, "dim: got ", dim, ", needs ", -dims, " ... ", dims - 1);
  if (dim < 0) dim += dims;
  SoftmaxShape shape;
  for (int64_t d = 0; d < x.dim(); ++d) (d < dim ? shape.outer : d == dim ? shape.n : shape.inner) *= x.size(d);
  if (!causal) return shape;
  STD_TORCH_CHECK(x.dim() >= 2 && dim == x.dim() - 1, "causal: needs dim to be the last of x (queries, keys)");
  shape.causal = true;
  if (x.numel() > 0) shape.queries = Divisor(x.size(dim - 1));
  return shape;
}

// x has the inputs' dtype, y the results', which may be wider.
inline void check_softmax_dtypes(ScalarType x, ScalarType y) {
  const bool is_16_bit = x == ScalarType::Half || x == ScalarType::BFloat16;
  STD_TORCH_CHECK(x == y || (is_16_bit && y == ScalarType::Float),
                  "dtype: needs that of x, or float32 where x is float16 or bfloat16");
}

inline void check_log(bool log, const MaybeTensor& mask, bool causal, double dropout) {
  STD_TORCH_CHECK(!log || (!mask && !causal && dropout == 0), "log: log-softmax takes no mask, causal or dropout");
}

inline void check_like_y(const Tensor& y, const Tensor& dy) {
  STD_TORCH_CHECK(same_shape(y, dy) && dy.scalar_type() == y.scalar_type() && on_one_device(y, dy),
                  "dy: needs the shape, dtype and device of y");
}

template <class A>
Dropout<A> dropout_of(const Tensor& x, double rate, const MaybeTensor& seed) {
  STD_TORCH_CHECK(0 <= rate && rate < 1, "dropout: got ", rate, ", needs 0 <= dropout < 1");
  if (rate == 0) return {nullptr, 0, 1};
  STD_TORCH_CHECK(seed && seed->numel() == 1 && seed->scalar_type() == ScalarType::Long && on_one_device(x, *seed),
                  "seed: dropout needs one int64 on the device of x");
  return {const_data<int64_t>(*seed), static_cast<uint32_t>(rate * 0x1p32), static_cast<A>(1 / (1 - rate))};
}

enum class MaskType : uint8_t { none, boolean, half, bfloat16, fp32 };

// Where the mask of a row begins, as the strides of the expanded mask have it: nothing is copied.
struct MaskRows {
  static constexpr int kDims = 4;

  MaskType type = MaskType::none;
  const void* data = nullptr;
  int64_t key_stride = 1;
  int dims = 0;  // that rows are counted in; the first is the one that varies fastest
  Divisor size[kDims];
  int64_t stride[kDims];

  MK_HD int64_t start(int64_t row) const {
    int64_t at = 0, place = 0;
    for (int d = 0; d < kDims; ++d)
      if (d < dims) {
        row = size[d](row, place);
        at += place * stride[d];
      }
    return at;
  }
};

// Of a mask expanded to x's shape; `held` keeps the memory.
inline MaskRows mask_rows(const Tensor& x, const MaybeTensor& mask, int64_t dim, Tensor& held) {
  MaskRows rows;
  if (!mask) return rows;
  STD_TORCH_CHECK(dim == -1 || dim == x.dim() - 1 || x.dim() == 0, "mask: needs dim to be the last");
  STD_TORCH_CHECK(same_shape(x, *mask) && on_one_device(x, *mask), "mask: needs the shape and device of x");
  switch (mask->scalar_type()) {
    case ScalarType::Bool: rows.type = MaskType::boolean; break;
    case ScalarType::Half: rows.type = MaskType::half; break;
    case ScalarType::BFloat16: rows.type = MaskType::bfloat16; break;
    case ScalarType::Float: rows.type = MaskType::fp32; break;
    default: STD_TORCH_CHECK(false, "mask: needs bool, float16, bfloat16 or float32");
  }
  const auto walk = [&](const Tensor& m) {
    rows.dims = 0;
    for (int64_t d = m.dim() - 2; d >= 0; --d) {
      if (m.size(d) == 1) continue;
      const int last = rows.dims - 1;
      if (last >= 0 && m.stride(d) == rows.stride[last] * int64_t(rows.size[last].value)) {
        rows.size[last] = Divisor(rows.size[last].value * m.size(d));
        continue;
      }
      if (rows.dims == MaskRows::kDims) return false;
      rows.size[rows.dims] = Divisor(m.size(d));
      rows.stride[rows.dims++] = m.stride(d);
    }
    return true;
  };
  held = *mask;
  if (x.numel() == 0) return rows;
  if (!walk(held)) walk(held = torch::stable::contiguous(held));  // more dimensions than anyone broadcasts over
  rows.data = held.const_data_ptr();
  if (held.dim() > 0) rows.key_stride = held.stride(held.dim() - 1);
  return rows;
}

// ---- Formulas ---------------------------------------------------------------
//
// Of a row, with z = scale x + mask and m near the largest z:  e = exp(z - m),  y = e / sum e,  and log-softmax
// is (z - m) - log sum e. Any m will do that is one for the row, but z - m has to be accurate, which z rounded to its
// own size is not, and never far above 0. A masked z is -inf, and its e is 0.
// With g = dy after dropout,  dx = scale y (g - sum(g y)),  or, for log-softmax,  dx = scale (g - exp(y) sum(g)).

// scale x = positive (sign x), so that -inf can stand for a masked x, and the largest of sign x has the largest z.
template <class A>
struct Scale {
  A positive, sign;  // the sign of 0 is 0, beside a 1

  Scale() = default;
  explicit Scale(A scale) : positive(scale == 0 ? 1 : std::abs(scale)), sign(scale > 0 ? 1 : scale < 0 ? -1 : 0) {}
};

// m, or 0 where every z is -inf: exp(-inf - -inf) is never asked for.
template <class A>
MK_HD A shift_of(A max) {
  return max == -A(INFINITY) ? A(0) : max;
}

// Below, x has the sign of scale, and scale has none.

// z - m without a mask that is added, where top is the x of the largest z.
template <class A>
MK_HD A shifted(A x, A scale, A top) {
  return (x - top) * scale;
}

// z with one.
template <class A>
MK_HD A logit(A x, A scale, A mask) {
  return std::fma(x, scale, mask);
}

// z - m with one, where m is the largest logit().
template <class A>
MK_HD A shifted(A x, A scale, A m, A mask) {
  // Up to where the distance between neighbours is 2, and so m within 1 of the largest z, z is not rounded: what
  // mask - m loses to rounding (Knuth's two-sum) is added last, since both may be large beside z - m (a row that is
  // masked by -65504 throughout). Beyond that, z is logit(), so that no z is above m.
  constexpr A exact = sizeof(A) == 8 ? A(0x1p54) : A(0x1p25);
  const A z = logit(x, scale, mask), sum = mask - m, back = sum - mask;
  const A lost = (mask - (sum - back)) - (m + back);
  return -exact < z && z < exact ? std::fma(x, scale, sum) + lost : z - m;
}

// e^d of d <= 0 or just above; Storage is the type that y is rounded to.
template <class Storage, class A>
MK_HD A exponential(A d) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(Storage) == 2) return __expf(d);
#endif
  return std::exp(d);
}

// The larger one that is not NaN.
template <class A>
MK_HD A larger(A a, A b) {
#ifdef __CUDA_ARCH__
  return fmax(a, b);
#else
  return a > b ? a : b;
#endif
}

// What a row's e are multiplied by.
template <class A>
MK_HD A softmax_factor(A sum, bool zero_masked) {
  return zero_masked && sum == 0 ? A(0) : 1 / sum;
}

}  // namespace memkern
