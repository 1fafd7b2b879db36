// Softmax over rows that lie one after the other. Up to about 16K columns x (y and dy in backward) is read once
// and stays in registers; beyond that, and in fp64, it is read twice, the first time for the largest z and the sum
// at once. The part of a causal row that is not seen is not read.
#pragma once

#include "softmax.cuh"

namespace memkern {
namespace {

// Threads of a block that has several rows.
constexpr int kRowBlock = 256;

// y of V columns, of which the first `live` are seen: the others are 0, unless all that is seen of the row is masked.
template <class T, class O, class A, int V>
__device__ __forceinline__ void finish_columns(const Forward<T, O>& a, const Finish<A>& finish, int64_t live,
                                               bool any, A (&y)[V]) {
#pragma unroll
  for (int i = 0; i < V; ++i) {
    y[i] = finish(y[i]);
    if (a.shape.causal && any && i >= live) y[i] = 0;
  }
}

template <class T, class O, int V, int P, bool Additive>
__global__ void __launch_bounds__(P * V == 8 ? kRowBlock : kMaxRowThreads, 1)
    forward_rows(const Forward<T, O> a, int threads) {
  using A = acc_t<T>;
  __shared__ typename RowSum<A>::Slots slots;
  RowSum<A> row_sum(slots, threads);
  const Columns<V, P> mine(threadIdx.x % threads, threads);
  const int64_t row = int64_t(blockIdx.x) * (blockDim.x / threads) + threadIdx.x / threads;
  const bool has_row = row < a.shape.outer;
  const int live = has_row ? int(a.shape.live(row)) - mine.first : 0;
  const uint64_t seed = a.dropout.read_seed();
  const A scale = a.scale.positive;
  A x[P][V], added[P][V];
  load_row<Additive>(a, row, a.mask.start(row), mine.first, [&](int p) { return mine.at(p); }, live, x, added);

  A top[1] = {-A(INFINITY)};
#pragma unroll
  for (int p = 0; p < P; ++p)
#pragma unroll
    for (int i = 0; i < V; ++i) top[0] = larger(top[0], rank<Additive>(x[p][i], scale, added[p][i]));
  row_sum.max(top);
  A sum[1] = {0};
#pragma unroll
  for (int p = 0; p < P; ++p) {
    A of_pack = 0;
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const A z = below<Additive>(x[p][i], scale, added[p][i], top[0]), e = exponential<O>(z);
      of_pack += e;
      x[p][i] = a.log ? z : e;
    }
    sum[0] += of_pack;
  }
  row_sum(sum);

  const Finish<A> finish(a.log, a.zero_masked, sum[0]);
  const int64_t start = row * a.shape.n + mine.first;
  const int left = has_row ? int(a.shape.n) - mine.first : 0;
#pragma unroll
  for (int p = 0; p < P; ++p)
    if (mine.at(p) < left) {
      finish_columns(a, finish, live - mine.at(p), sum[0] != 0, x[p]);
      store_results(a, seed, start + mine.at(p), x[p]);
    }
}

// A block a row.
template <class T, class O, int V, bool Additive>
__global__ void __launch_bounds__(kMaxRowThreads) forward_rows_looped(const Forward<T, O> a, int threads) {
  using A = acc_t<T>;
  __shared__ typename RowSum<A>::Slots slots;
  RowSum<A> row_sum(slots, threads);
  const int64_t row = blockIdx.x, live = a.shape.live(row), step = int64_t(threads) * V;
  const int64_t mask_start = a.mask.start(row);
  const uint64_t seed = a.dropout.read_seed();
  const A scale = a.scale.positive;
  A x[1][V], added[1][V];
  const auto load_at = [&](int64_t c) {
    load_row<Additive>(a, row, mask_start, c, [](int) { return 0; }, live - c, x, added);
  };

  MaxSum<Additive, A> mine;
  for (int64_t c = threadIdx.x * V; c < live; c += step) {
    load_at(c);
    A top = mine.max;
#pragma unroll
    for (int i = 0; i < V; ++i) top = larger(top, rank<Additive>(x[0][i], scale, added[0][i]));
    mine.template raise<O>(top, scale);
    A of_pack = 0;
#pragma unroll
    for (int i = 0; i < V; ++i) of_pack += exponential<O>(below<Additive>(x[0][i], scale, added[0][i], top));
    mine.sum += of_pack;
  }
  A top[1] = {mine.max};
  row_sum.max(top);
  mine.template raise<O>(top[0], scale);
  A sum[1] = {mine.sum};
  row_sum(sum);

  const Finish<A> finish(a.log, a.zero_masked, sum[0]);
  for (int64_t c = threadIdx.x * V; c < a.shape.n; c += step) {
    load_at(c);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const A z = below<Additive>(x[0][i], scale, added[0][i], top[0]);
      x[0][i] = a.log ? z : exponential<O>(z);
    }
    finish_columns(a, finish, live - c, sum[0] != 0, x[0]);
    store_results(a, seed, row * a.shape.n + c, x[0]);
  }
}

// Sets the columns of a pack to 0 from `live` on.
template <class O, int V>
__device__ __forceinline__ void trim(Pack<O, V>& pack, int64_t live) {
#pragma unroll
  for (int i = 0; i < V; ++i)
    if (i >= live) pack.value[i] = O(0.0f);
}

template <class T, class O, int V>
__device__ __forceinline__ acc_t<T> sum_of_terms(const Backward<T, O>& a, const Pack<O, V>& dy, const Pack<O, V>& y,
                                                 uint32_t kept) {
  acc_t<T> each[V], sum = 0;
  terms(a, dy, y, kept, each);
#pragma unroll
  for (int i = 0; i < V; ++i) sum += each[i];
  return sum;
}

template <class T, class O, int V, int P>
__global__ void __launch_bounds__(P * V == 8 ? kRowBlock : kMaxRowThreads)
    backward_rows(const Backward<T, O> a, int threads) {
  using A = acc_t<T>;
  __shared__ typename RowSum<A>::Slots slots;
  RowSum<A> row_sum(slots, threads);
  const Columns<V, P> mine(threadIdx.x % threads, threads);
  const int64_t row = int64_t(blockIdx.x) * (blockDim.x / threads) + threadIdx.x / threads;
  const int64_t start = row * a.shape.n + mine.first;
  const bool has_row = row < a.shape.outer;
  const int live = has_row ? int(a.shape.live(row)) - mine.first : 0;
  const uint64_t seed = a.dropout.read_seed();
  Pack<O, V> dy[P] = {}, y[P] = {};
#pragma unroll
  for (int p = 0; p < P; ++p)
    if (mine.at(p) < live) {
      dy[p] = load<O, V>(a.dy + start + mine.at(p));
      y[p] = load<O, V>(a.y + start + mine.at(p));
    }
  if (a.shape.causal) {
#pragma unroll
    for (int p = 0; p < P; ++p) {
      trim(dy[p], live - mine.at(p));
      trim(y[p], live - mine.at(p));
    }
  }
  uint32_t kept = 0;
  if (a.dropout.seed) {
#pragma unroll 1  // side by side, they would need registers that hold the row
    for (int p = 0; p < P; ++p) kept |= kept_bits<V>(a.dropout, seed, start + mine.at(p)) << (p * V);
  }
  A sum[1] = {0};
#pragma unroll
  for (int p = 0; p < P; ++p) sum[0] += sum_of_terms(a, dy[p], y[p], kept >> (p * V));
  row_sum(sum);
  const int left = has_row ? int(a.shape.n) - mine.first : 0;
#pragma unroll
  for (int p = 0; p < P; ++p)
    if (mine.at(p) < left) {
      forget_unpacked(dy[p]);
      forget_unpacked(y[p]);
      store_dx(a, start + mine.at(p), dy[p], y[p], kept >> (p * V), [&](int) { return sum[0]; });
    }
}

// A block a row.
template <class T, class O, int V>
__global__ void __launch_bounds__(kMaxRowThreads) backward_rows_looped(const Backward<T, O> a, int threads) {
  using A = acc_t<T>;
  __shared__ typename RowSum<A>::Slots slots;
  RowSum<A> row_sum(slots, threads);
  const int64_t row = blockIdx.x, start = row * a.shape.n, live = a.shape.live(row), step = int64_t(threads) * V;
  const uint64_t seed = a.dropout.read_seed();
  Pack<O, V> dy, y;
  uint32_t kept = 0;
  const auto load_at = [&](int64_t c) {
    dy = load<O, V>(a.dy + start + c);
    y = load<O, V>(a.y + start + c);
    trim(dy, live - c);
    trim(y, live - c);
    if (a.dropout.seed) kept = kept_bits<V>(a.dropout, seed, start + c);
  };
  A sum[1] = {0};
  for (int64_t c = threadIdx.x * V; c < live; c += step) {
    load_at(c);
    sum[0] += sum_of_terms(a, dy, y, kept);
  }
  row_sum(sum);
  for (int64_t c = threadIdx.x * V; c < a.shape.n; c += step) {
    dy = y = {};
    if (c < live) load_at(c);
    store_dx(a, start + c, dy, y, kept, [&](int) { return sum[0]; });
  }
}

template <int V>
bool mask_fits_packs(const MaskRows& mask) {
  const int64_t size = mask.type == MaskType::boolean ? 1 : mask.type == MaskType::fp32 ? 4 : 2;
  bool fits = mask.key_stride == 1 && is_aligned(mask.data, std::min<int64_t>(V * size, 16));
  for (int d = 0; d < mask.dims; ++d) fits &= mask.stride[d] % V == 0;
  return fits;
}

// Calls body(elements in an access, packs a thread holds: 0 where it is looped, grid and block).
template <class O, class Body>
void for_rows(const SoftmaxShape& shape, bool wide, Body body) {
  const RowPlan plan = row_plan(shape.n, wide, kWidest<O>, sizeof(O) == 8, kMaxRowThreads);
  for_plan<O>(plan, [&](auto access, auto packs) {
    const int rows = decltype(packs)::value == 0 ? 1 : std::max(kRowBlock / plan.threads, 1);
    body(access, packs, Blocks{(shape.outer + rows - 1) / rows, rows * plan.threads, plan.threads, 0});
  });
}

template <class T, class O>
void run_rows(Forward<T, O> a, cudaStream_t stream) {
  for_rows<O>(a.shape, fits_packs<kWidest<O>>(a.shape.n, a.x, a.y, a.dropped), [&](auto access, auto packs, Blocks b) {
    constexpr int V = decltype(access)::value, P = decltype(packs)::value;
    a.wide_mask = mask_fits_packs<V>(a.mask);
    const bool additive = a.mask.type > MaskType::boolean;
    if constexpr (P == 0) {
      start(additive ? forward_rows_looped<T, O, V, true> : forward_rows_looped<T, O, V, false>, b, stream, a);
    } else {
      start(additive ? forward_rows<T, O, V, P, true> : forward_rows<T, O, V, P, false>, b, stream, a);
    }
  });
}

template <class T, class O>
void run_rows(const Backward<T, O>& a, cudaStream_t stream) {
  for_rows<O>(a.shape, fits_packs<kWidest<O>>(a.shape.n, a.dy, a.y, a.dx), [&](auto access, auto packs, Blocks b) {
    constexpr int V = decltype(access)::value, P = decltype(packs)::value;
    if constexpr (P == 0) {
      start(backward_rows_looped<T, O, V>, b, stream, a);
    } else {
      start(backward_rows<T, O, V, P>, b, stream, a);
    }
  });
}

}  // namespace
}  // namespace memkern
