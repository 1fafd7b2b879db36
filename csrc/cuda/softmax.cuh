// What the softmax kernels over rows and over an inner dimension share.
#pragma once

#include "../softmax.h"
#include "rows.cuh"

namespace memkern {
namespace {

// x and dx are of T, y, dropped and dy of O: T itself, or float where T has 16 bits.
template <class T, class O>
struct Forward {
  const T* x;
  MaskRows mask;
  bool wide_mask;  // each pack of it can be one access
  O *y, *dropped;
  SoftmaxShape shape;
  Divisor inner_packs;  // that inner is
  Scale<acc_t<T>> scale;
  bool log, zero_masked;
  Dropout<acc_t<T>> dropout;
};

template <class T, class O>
struct Backward {
  const O *dy, *y;
  T* dx;  // may be dy: each element is read by the thread that writes it, before it does
  SoftmaxShape shape;
  Divisor inner_packs;  // that inner is
  acc_t<T> scale;
  bool log;
  Dropout<acc_t<T>> dropout;

  // What g, the gradient before dropout, adds to its row's sum; and dx, with that sum.
  __device__ __forceinline__ acc_t<T> term(acc_t<T> g, acc_t<T> y) const { return log ? g : g * y; }
  __device__ __forceinline__ acc_t<T> result(acc_t<T> g, acc_t<T> y, acc_t<T> sum) const {
    return scale * (log ? g - exponential<T>(y) * sum : y * (g - sum));
  }
};

inline bool is_aligned(const void* pointer, int64_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// Whether packs of V fill stretches of `length` elements of these arrays (null ones aside), one after the other.
template <int V, class... Elements>
bool fits_packs(int64_t length, const Elements*... arrays) {
  return length % V == 0 && (is_aligned(arrays, V * sizeof(Elements)) && ...);
}

struct Blocks {
  int64_t count;
  int threads, share;  // in a block; that share a row, or lanes
  size_t shared_bytes;
};

template <class Kernel, class Arguments>
void start(Kernel kernel, const Blocks& blocks, cudaStream_t stream, const Arguments& arguments) {
  launch(kernel, blocks.count, blocks.threads, blocks.shared_bytes, stream, arguments, blocks.share);
}

// Calls body(type tag of x, type tag of y).
template <class Body>
void for_dtypes(ScalarType x, ScalarType y, Body body) {
  check_softmax_dtypes(x, y);
  for_dtype(x, [&](auto type) {
    using T = decltype(type);
    if constexpr (sizeof(T) == 2) {
      if (y == ScalarType::Float) return body(type, float{});
    }
    body(type, type);
  });
}

// ---- Dropout ----------------------------------------------------------------

// Calls each(i, its number) for V elements from `first` on.
template <int V, class Each>
__device__ __forceinline__ void draw(uint64_t seed, int64_t first, Each each) {
  if constexpr (V < 4) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const Numbers four = philox(seed, (first + i) / 4);
      const int lane = (first + i) % 4;
      each(i, lane < 2 ? lane == 0 ? four.value[0] : four.value[1] : lane == 2 ? four.value[2] : four.value[3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < V; i += 4) {
      const Numbers four = philox(seed, (first + i) / 4);
#pragma unroll
      for (int j = 0; j < 4; ++j) each(i + j, four.value[j]);
    }
  }
}

// ---- Forward ----------------------------------------------------------------

// V values of a row of the mask, which has one in stride; in as few accesses as there can be where wide.
template <int V, class M>
__device__ __forceinline__ void load_mask(const M* row, int64_t stride, bool wide, int64_t column, M (&out)[V]) {
  constexpr int N = kAccess<M, V>;
#pragma unroll
  for (int i = 0; i < V; i += N) {
    Pack<M, N> part;
    if (wide) part = load<M, N>(row + column + i);
    for (int j = 0; j < N; ++j)
      out[i + j] = wide ? part.value[j] : load<M, 1>(row + (column + i + j) * stride).value[0];
  }
}

// V values of sign x.
template <class T, class A, int V>
__device__ __forceinline__ void load_signed(const T* from, A sign, A (&x)[V]) {
  load_values(from, x);
  if (sign == 1) return;
#pragma unroll
  for (int i = 0; i < V; ++i) x[i] *= sign;
}

template <class A, int V>
__device__ __forceinline__ void fill(A (&values)[V], A value) {
#pragma unroll
  for (int i = 0; i < V; ++i) values[i] = value;
}

// Calls body with the row of the mask that starts there, of the type it has.
template <bool Additive, class Body>
__device__ __forceinline__ void with_mask(const MaskRows& mask, int64_t at, Body body) {
  const auto row = [&](auto type) { return static_cast<const decltype(type)*>(mask.data) + at; };
  if constexpr (Additive) {
    if (mask.type == MaskType::half) body(row(__half{}));
    else if (mask.type == MaskType::bfloat16) body(row(__nv_bfloat16{}));
    else body(row(float{}));
  } else if (mask.type == MaskType::boolean) {
    body(row(uint8_t{}));
  }
}

// P packs of a row, the first of them at column `first` and pack p at at(p) from there: sign x, and what the mask
// adds. Of columns that are masked, and all from `live` (counted from first) on, x becomes -inf; they are not read
// where a whole pack is past live.
template <bool Additive, class T, class O, class A, int V, int P, class At>
__device__ __forceinline__ void load_row(const Forward<T, O>& a, int64_t row, int64_t mask_start, int64_t first, At at,
                                         int64_t live, A (&x)[P][V], A (&added)[P][V]) {
  const T* from = a.x + row * a.shape.n + first;
#pragma unroll
  for (int p = 0; p < P; ++p) {
    fill(x[p], -A(INFINITY));
    if (at(p) < live) load_signed(from + at(p), a.scale.sign, x[p]);
  }
  const auto mask_where = [&](auto is_masked) {
#pragma unroll
    for (int p = 0; p < P; ++p)
#pragma unroll
      for (int i = 0; i < V; ++i)
        if (is_masked(p, i)) x[p][i] = -A(INFINITY);
  };
  if (a.shape.causal) mask_where([&](int p, int i) { return at(p) + i >= live; });
  with_mask<Additive>(a.mask, mask_start, [&](auto mask) {
    using M = std::decay_t<decltype(*mask)>;
    M values[P][V];
#pragma unroll
    for (int p = 0; p < P; ++p)
      if (at(p) < live) load_mask(mask, a.mask.key_stride, a.wide_mask, first + at(p), values[p]);
    if constexpr (Additive) {
#pragma unroll
      for (int p = 0; p < P; ++p)
#pragma unroll
        for (int i = 0; i < V; ++i) added[p][i] = at(p) + i < live ? A(widen(values[p][i])) : A(0);
    } else {
      mask_where([&](int p, int i) { return at(p) < live && values[p][i]; });
    }
  });
}

// What there is a largest of: z where a mask is added, else x.
template <bool Additive, class A>
__device__ __forceinline__ A rank(A x, A scale, A added) {
  return Additive ? logit(x, scale, added) : x;
}
// z less the largest, where `top` is the largest rank.
template <bool Additive, class A>
__device__ __forceinline__ A below(A x, A scale, A added, A top) {
  return Additive ? shifted(x, scale, shift_of(top), added) : shifted(x, scale, shift_of(top));
}

// The largest rank of part of a row, and the sum of the exp of what the z are below its z.
template <bool Additive, class A>
struct MaxSum {
  A max = -A(INFINITY), sum = 0;

  // To a max that is no lower. A part that is all -inf keeps the sum 0.
  template <class Storage>
  __device__ __forceinline__ void raise(A to, A scale) {
    sum *= exponential<Storage>((max - shift_of(to)) * (Additive ? A(1) : scale));
    max = to;
  }
};

// What becomes of a row's e, or of its z - m for log-softmax.
template <class A>
struct Finish {
  A factor, offset;
  bool zeros;

  __device__ __forceinline__ Finish(bool log, bool zero_masked, A sum)
      : factor(log ? A(1) : 1 / sum), offset(log ? -std::log(sum) : A(0)), zeros(zero_masked && sum == 0) {}
  __device__ __forceinline__ A operator()(A value) const { return zeros ? A(0) : std::fma(value, factor, offset); }
};

// Stores y, and dropped, of V elements from `at` on.
template <class T, class O, class A, int V>
__device__ __forceinline__ void store_results(const Forward<T, O>& a, uint64_t seed, int64_t at, A (&y)[V]) {
  store(a.y + at, pack<O, V>(y));
  if (!a.dropout.seed) return;
  draw<V>(seed, at, [&](int i, uint32_t number) { y[i] = a.dropout(y[i], number); });
  store(a.dropped + at, pack<O, V>(y));
}

// ---- Backward ---------------------------------------------------------------

// A bit for each of V elements from `at` on: whether dropout kept it.
template <int V, class A>
__device__ __forceinline__ uint32_t kept_bits(const Dropout<A>& dropout, uint64_t seed, int64_t at) {
  uint32_t bits = 0;
  draw<V>(seed, at, [&](int i, uint32_t number) { bits |= uint32_t(dropout(A(1), number) != 0) << i; });
  return bits;
}

// g and y of a pack, whose elements have the lowest bits of kept.
template <class T, class O, class A, int V>
__device__ __forceinline__ void unpack_gradients(const Backward<T, O>& a, const Pack<O, V>& dy_pack,
                                                 const Pack<O, V>& y_pack, uint32_t kept, A (&g)[V], A (&y)[V]) {
  unpack(dy_pack, g);
  unpack(y_pack, y);
  if (!a.dropout.seed) return;
#pragma unroll
  for (int i = 0; i < V; ++i) g[i] = kept >> i & 1 ? g[i] * a.dropout.factor : A(0);
}

// What each element of a pack adds to the sum of its row.
template <class T, class O, class A, int V>
__device__ __forceinline__ void terms(const Backward<T, O>& a, const Pack<O, V>& dy, const Pack<O, V>& y_pack,
                                      uint32_t kept, A (&out)[V]) {
  A y[V];
  unpack_gradients(a, dy, y_pack, kept, out, y);
#pragma unroll
  for (int i = 0; i < V; ++i) out[i] = a.term(out[i], y[i]);
}

// dx of V elements from `at` on; sum(i) is that of element i's row.
template <class T, class O, int V, class Sum>
__device__ __forceinline__ void store_dx(const Backward<T, O>& a, int64_t at, const Pack<O, V>& dy,
                                         const Pack<O, V>& y_pack, uint32_t kept, Sum sum) {
  acc_t<T> g[V], y[V];
  unpack_gradients(a, dy, y_pack, kept, g, y);
#pragma unroll
  for (int i = 0; i < V; ++i) g[i] = a.result(g[i], y[i], sum(i));
  store(a.dx + at, pack<T, V>(g));
}

}  // namespace
}  // namespace memkern
