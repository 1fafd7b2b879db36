// How LayerNorm and RMSNorm read weight and bias.
#pragma once

#include "../norm.h"
#include "rows.cuh"

namespace memkern {

<<<<<<< HEAD
struct RowPlan {
  bool wide;      // 16-byte accesses, else one element at a time
  bool looped;
  int elements;   // that a thread holds, where not looped: 8, 16 or 32
  int threads;    // that share a row
};

inline RowPlan row_plan(int64_t columns, bool wide, int64_t widest, bool is_fp64, int max_threads) {
  const int64_t packs = wide ? columns / widest : columns;
  RowPlan plan{wide, false, columns <= 256 ? 8 : wide ? 32 : 16, 1};
  if (columns <= 256 && !is_fp64) {
    while (plan.threads < packs && plan.threads < 32) plan.threads *= 2;
    return plan;
  }
  const int64_t needed = (columns + plan.elements - 1) / plan.elements;
  plan.looped = is_fp64 || needed > max_threads;
  const int64_t threads = ((plan.looped ? packs : needed) + 31) / 32 * 32;
  plan.threads = static_cast<int>(std::min<int64_t>(threads, kMaxRowThreads));
  return plan;
}

// Whether rows of this many elements of T, starting at these addresses (null ones aside), all start at a
// multiple of 16 bytes.
inline bool rows_are_aligned(int64_t columns, int64_t element_size, std::initializer_list<const void*> pointers) {
  bool aligned = columns * element_size % 16 == 0;
  for (const void* p : pointers) aligned &= reinterpret_cast<uintptr_t>(p) % 16 == 0;
  return aligned;
}

// Which columns a thread holds: P packs of V, `first + at(p)` the first column of each. Neighbouring threads
// have neighbouring packs; where a row has several warps, each has 32 P V columns side by side, so that the
// compiler knows the distance from pack to pack.
template <int V, int P>
struct Columns {
  int first, step;
  __device__ __forceinline__ Columns(int thread, int threads)
      : first((thread / 32 * 32 * P + thread % 32) * V), step(P * V == 8 ? threads * V : 32 * V) {}
  __device__ __forceinline__ int at(int p) const { return p * step; }
};

=======
>>>>>>> soft_api
template <class T>
struct Parameters {
  const void *weight, *bias;  // may be null
  bool fp32;                  // else T
  bool zero_centred;          // the scale is 1 + weight

  // All of these: for V columns from first + at on. The two are added one after the other, since at is
  // often known to the compiler.
  template <int V>
  __device__ __forceinline__ void values(const void* from, int64_t first, int at, acc_t<T> (&out)[V]) const {
    if constexpr (sizeof(T) == 2) {
      if (fp32) return load_values(static_cast<const float*>(from) + first + at, out);
    }
    load_values(static_cast<const T*>(from) + first + at, out);
  }
  template <int V>
  __device__ __forceinline__ void scale(int64_t first, int at, acc_t<T> (&out)[V]) const {
#pragma unroll
    for (int i = 0; i < V; ++i) out[i] = 1;
    if (weight) values(weight, first, at, out);
    if (!zero_centred) return;
#pragma unroll
    for (int i = 0; i < V; ++i) out[i] += 1;
  }
  template <int V>
  __device__ __forceinline__ void shift(int64_t first, int at, acc_t<T> (&out)[V]) const {
#pragma unroll
    for (int i = 0; i < V; ++i) out[i] = 0;
    if (bias) values(bias, first, at, out);
  }
};

// Scale and shift of every column, kept in shared memory for a block that has many rows; or, where shared
// is null, read from global memory each time.
template <class T>
struct BlockParameters {
  using A = acc_t<T>;
  Parameters<T> parameters;
  A* shared;
  int columns;

  // All threads of the block call it.
  template <int V>
  __device__ __forceinline__ void fill(bool with_shift) const {
    if (!shared) return;
    constexpr int N = kAccess<A, V>;
    for (int c = threadIdx.x * N; c < columns; c += blockDim.x * N) {
      A value[N];
      parameters.scale(c, 0, value);
      store_values(shared + c, value);
      if (!with_shift) continue;
      parameters.shift(c, 0, value);
      store_values(shared + columns + c, value);
    }
    __syncthreads();
  }
  template <int V>
  __device__ __forceinline__ void scale(int first, int at, A (&out)[V]) const {
    if (shared) return load_values(shared + first + at, out);
    parameters.scale(first, at, out);
  }
  template <int V>
  __device__ __forceinline__ void shift(int first, int at, A (&out)[V]) const {
    if (shared) return load_values(shared + columns + first + at, out);
    parameters.shift(first, at, out);
  }
};

}  // namespace memkern
