// How LayerNorm and RMSNorm read weight and bias.
#pragma once

#include "../norm.h"
#include "rows.cuh"

namespace memkern {

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
