// Softmax over a dimension that is not the last: x is outer x n x inner. Neighbouring threads have neighbouring
// packs of the inner dimension, and the threads that share a pack's columns ("strands") take turns along n. What
// the strands of a block can hold in registers is read once; a longer dimension, and fp64, is read twice.
#pragma once

#include "softmax.cuh"

namespace memkern {
namespace {

constexpr int kInnerThreads = 512;

struct InnerPlan {
  bool looped;
  int lanes, threads;  // lanes: packs side by side in a block; both are powers of two
};

// `held`: of n that a strand can hold; `items`: how many packs there are to do of `pack_bytes` each.
inline InnerPlan inner_plan(int64_t n, int held, int pack_bytes, bool is_fp64) {
  const int fewest = std::max(32 / pack_bytes, 1);  // lanes that read whole sectors
  int64_t strands = 1;
  while (strands * held < n) strands *= 2;
  const bool looped = is_fp64 || strands * fewest > kInnerThreads;
  if (looped) strands = kInnerThreads / (2 * fewest);
  const int lanes = std::max(static_cast<int>(256 / strands), looped ? 2 * fewest : fewest);
  return {looped, lanes, static_cast<int>(std::max<int64_t>(lanes * strands, 32))};
}

// This thread's place.
template <int V>
struct Strand {
  int first, count;     // the strand's first along n, and how many strands there are
  int64_t start, step;  // where its pack is at the first of n, and from one to the next
  bool has_pack;

  __device__ __forceinline__ Strand(const SoftmaxShape& shape, const Divisor& inner_packs, int lanes)
      : first(threadIdx.x / lanes), count(blockDim.x / lanes), step(shape.inner) {
    int64_t pack;
    const int64_t outer = inner_packs(int64_t(blockIdx.x) * lanes + threadIdx.x % lanes, pack);
    start = outer * shape.n * shape.inner + pack * V;
    has_pack = outer < shape.outer;
  }
  // Where the p-th pack that it holds is.
  __device__ __forceinline__ int64_t at(int p) const { return start + (first + p * int64_t(count)) * step; }
};

// Combines each of V values over the strands that share a pack, in a fixed order. All threads of the block call.
template <class A, int V>
class StrandReduction {
 public:
  __device__ __forceinline__ explicit StrandReduction(int lanes) : slots_(dynamic_shared<A>()), lanes_(lanes) {}

  __device__ __forceinline__ void sum(A (&values)[V]) {
    fold(values, [](A a, A b) { return a + b; });
  }
  __device__ __forceinline__ void max(A (&values)[V]) {
    fold(values, [](A a, A b) { return larger(a, b); });
  }

 private:
  template <class Merge>
  __device__ __forceinline__ void fold(A (&values)[V], Merge merge) {
    for (int reach = 16; reach >= lanes_; reach /= 2)
#pragma unroll
      for (int v = 0; v < V; ++v) values[v] = merge(values[v], __shfl_xor_sync(~0u, values[v], reach));
    // A part is what a warp, or a strand that is wider, has come to.
    const int width = lanes_ < 32 ? 32 : lanes_, parts = blockDim.x / width, place = threadIdx.x % width;
    if (parts == 1) return;
    const int lane = threadIdx.x % lanes_;
    if (place < lanes_) store_values(slots_ + (threadIdx.x / width * lanes_ + lane) * V, values);
    __syncthreads();
    load_values(slots_ + lane * V, values);
    for (int part = 1; part < parts; ++part) {
      A other[V];
      load_values(slots_ + (part * lanes_ + lane) * V, other);
#pragma unroll
      for (int v = 0; v < V; ++v) values[v] = merge(values[v], other[v]);
    }
    __syncthreads();
  }

  A* slots_;
  int lanes_;
};

template <class T, class O, int V, int P>
__global__ void __launch_bounds__(kInnerThreads) forward_inner(const Forward<T, O> a, int lanes) {
  using A = acc_t<T>;
  const Strand<V> mine(a.shape, a.inner_packs, lanes);
  StrandReduction<A, V> reduction(lanes);
  const A scale = a.scale.positive;
  const uint64_t seed = a.dropout.read_seed();
  const int left = mine.has_pack ? int(a.shape.n) - mine.first : 0;
  A x[P][V], top[V], sum[V];
#pragma unroll
  for (int p = 0; p < P; ++p) {
    fill(x[p], -A(INFINITY));
    if (p * mine.count < left) load_signed(a.x + mine.at(p), a.scale.sign, x[p]);
  }
  fill(top, -A(INFINITY));
#pragma unroll
  for (int p = 0; p < P; ++p)
#pragma unroll
    for (int v = 0; v < V; ++v) top[v] = larger(top[v], x[p][v]);
  reduction.max(top);
  fill(sum, A(0));
#pragma unroll
  for (int p = 0; p < P; ++p)
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const A z = below<false>(x[p][v], scale, A(0), top[v]), e = exponential<O>(z);
      sum[v] += e;
      x[p][v] = a.log ? z : e;
    }
  reduction.sum(sum);
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const Finish<A> finish(a.log, a.zero_masked, sum[v]);
#pragma unroll
    for (int p = 0; p < P; ++p) x[p][v] = finish(x[p][v]);
  }
#pragma unroll
  for (int p = 0; p < P; ++p)
    if (p * mine.count < left) store_results(a, seed, mine.at(p), x[p]);
}

template <class T, class O, int V>
__global__ void __launch_bounds__(kInnerThreads) forward_inner_looped(const Forward<T, O> a, int lanes) {
  using A = acc_t<T>;
  const Strand<V> mine(a.shape, a.inner_packs, lanes);
  StrandReduction<A, V> reduction(lanes);
  const A scale = a.scale.positive;
  const uint64_t seed = a.dropout.read_seed();
  const int64_t end = mine.has_pack ? a.shape.n : 0;
  MaxSum<false, A> parts[V];
  for (int64_t j = mine.first; j < end; j += mine.count) {
    A x[V];
    load_signed(a.x + mine.start + j * mine.step, a.scale.sign, x);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      parts[v].template raise<O>(larger(parts[v].max, x[v]), scale);
      parts[v].sum += exponential<O>(below<false>(x[v], scale, A(0), parts[v].max));
    }
  }
  A top[V], sum[V];
#pragma unroll
  for (int v = 0; v < V; ++v) top[v] = parts[v].max;
  reduction.max(top);
#pragma unroll
  for (int v = 0; v < V; ++v) {
    parts[v].template raise<O>(top[v], scale);
    sum[v] = parts[v].sum;
  }
  reduction.sum(sum);
  for (int64_t j = mine.first; j < end; j += mine.count) {
    A x[V];
    load_signed(a.x + mine.start + j * mine.step, a.scale.sign, x);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const A z = below<false>(x[v], scale, A(0), top[v]);
      x[v] = Finish<A>(a.log, a.zero_masked, sum[v])(a.log ? z : exponential<O>(z));
    }
    store_results(a, seed, mine.start + j * mine.step, x);
  }
}

template <class T, class O, class A, int V>
__device__ __forceinline__ void add_terms(const Backward<T, O>& a, const Pack<O, V>& dy, const Pack<O, V>& y,
                                          uint32_t kept, A (&sum)[V]) {
  A each[V];
  terms(a, dy, y, kept, each);
#pragma unroll
  for (int v = 0; v < V; ++v) sum[v] += each[v];
}

template <class T, class O, int V, int P>
__global__ void __launch_bounds__(kInnerThreads) backward_inner(const Backward<T, O> a, int lanes) {
  using A = acc_t<T>;
  const Strand<V> mine(a.shape, a.inner_packs, lanes);
  StrandReduction<A, V> reduction(lanes);
  const uint64_t seed = a.dropout.read_seed();
  const int left = mine.has_pack ? int(a.shape.n) - mine.first : 0;
  Pack<O, V> dy[P], y[P];
#pragma unroll
  for (int p = 0; p < P; ++p)
    if (p * mine.count < left) {
      dy[p] = load<O, V>(a.dy + mine.at(p));
      y[p] = load<O, V>(a.y + mine.at(p));
    }
  uint32_t kept = 0;
  A sum[V];
  fill(sum, A(0));
#pragma unroll
  for (int p = 0; p < P; ++p)
    if (p * mine.count < left) {
      if (a.dropout.seed) kept |= kept_bits<V>(a.dropout, seed, mine.at(p)) << (p * V);
      add_terms(a, dy[p], y[p], kept >> (p * V), sum);
    }
  reduction.sum(sum);
#pragma unroll
  for (int p = 0; p < P; ++p)
    if (p * mine.count < left) {
      forget_unpacked(dy[p]);
      forget_unpacked(y[p]);
      store_dx(a, mine.at(p), dy[p], y[p], kept >> (p * V), [&](int v) { return sum[v]; });
    }
}

template <class T, class O, int V>
__global__ void __launch_bounds__(kInnerThreads) backward_inner_looped(const Backward<T, O> a, int lanes) {
  using A = acc_t<T>;
  const Strand<V> mine(a.shape, a.inner_packs, lanes);
  StrandReduction<A, V> reduction(lanes);
  const uint64_t seed = a.dropout.read_seed();
  // Calls body with the place of each pack of this strand, its dy and y, and which of them dropout kept.
  const auto each = [&](auto body) {
    for (int64_t j = mine.first; j < (mine.has_pack ? a.shape.n : 0); j += mine.count) {
      const int64_t at = mine.start + j * mine.step;
      body(at, load<O, V>(a.dy + at), load<O, V>(a.y + at), a.dropout.seed ? kept_bits<V>(a.dropout, seed, at) : 0);
    }
  };
  A sum[V];
  fill(sum, A(0));
  each([&](int64_t, const auto& dy, const auto& y, uint32_t kept) {
    add_terms(a, dy, y, kept, sum);
  });
  reduction.sum(sum);
  each([&](int64_t at, const auto& dy, const auto& y, uint32_t kept) {
    store_dx(a, at, dy, y, kept, [&](int v) { return sum[v]; });
  });
}

// Calls body(elements in an access, how many of n a strand holds: 0 where it is looped, grid and block).
template <class T, class O, class Body>
void for_inner(const SoftmaxShape& shape, bool wide, Body body) {
  const auto with_access = [&](auto access) {
    constexpr int V = decltype(access)::value, P = (V > 1 ? 32 : 16) / V;
    const int64_t items = shape.outer * (shape.inner / V);
    const InnerPlan plan = inner_plan(shape.n, P, V * std::min(sizeof(T), sizeof(O)), sizeof(T) == 8);
    const int parts = plan.threads / std::max(plan.lanes, 32);
    const Blocks blocks{(items + plan.lanes - 1) / plan.lanes, plan.threads, plan.lanes,
                        parts * plan.lanes * V * sizeof(acc_t<T>)};
    if constexpr (sizeof(T) < 8) {
      if (!plan.looped) return body(access, std::integral_constant<int, P>{}, blocks);
    }
    body(access, std::integral_constant<int, 0>{}, blocks);
  };
  if constexpr (sizeof(T) < 8) {
    if (wide) return with_access(std::integral_constant<int, kWidest<O>>{});
  }
  with_access(std::integral_constant<int, 1>{});
}

template <class T, class O>
void run_inner(Forward<T, O> a, cudaStream_t stream) {
  for_inner<T, O>(a.shape, fits_packs<kWidest<O>>(a.shape.inner, a.x, a.y, a.dropped),
                  [&](auto access, auto held, Blocks b) {
    constexpr int V = decltype(access)::value, P = decltype(held)::value;
    a.inner_packs = Divisor(a.shape.inner / V);
    if constexpr (P == 0) {
      start(forward_inner_looped<T, O, V>, b, stream, a);
    } else {
      start(forward_inner<T, O, V, P>, b, stream, a);
    }
  });
}

template <class T, class O>
void run_inner(Backward<T, O> a, cudaStream_t stream) {
  for_inner<T, O>(a.shape, fits_packs<kWidest<O>>(a.shape.inner, a.dy, a.y, a.dx),
                  [&](auto access, auto held, Blocks b) {
    constexpr int V = decltype(access)::value, P = decltype(held)::value;
    a.inner_packs = Divisor(a.shape.inner / V);
    if constexpr (P == 0) {
      start(backward_inner_looped<T, O, V>, b, stream, a);
    } else {
      start(backward_inner<T, O, V, P>, b, stream, a);
    }
  });
}

}  // namespace
}  // namespace memkern
