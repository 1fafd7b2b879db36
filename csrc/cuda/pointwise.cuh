// Elementwise kernels over flat memory: y[i] = f(inputs[i] ...), each byte moved once.
#pragma once

#include "launch.cuh"
#include "vec.cuh"

namespace memkern {

constexpr int kPointwiseThreads = 256;
// Packs a thread loads before it uses the first: 32 bytes of each input in flight. fp64 formulas need
// the registers.
template <class T>
constexpr int kPointwisePacks = sizeof(T) == 8 ? 1 : 2;

template <class T, int Inputs>
struct PointwiseArguments {
  const T* in[Inputs];
  T* out;
  int64_t n;
  int64_t head;   // elements before the first 16-byte boundary
  int64_t packs;  // whole packs from there
};

// F: a stateless functor, acc_t<T>(acc_t<T> inputs...).
template <class F, class T, int N, int Inputs>
__device__ __forceinline__ Pack<T, N> apply(const Pack<T, N> (&in)[Inputs]) {
  acc_t<T> wide[Inputs][N], result[N];
#pragma unroll
  for (int k = 0; k < Inputs; ++k) unpack(in[k], wide[k]);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if constexpr (Inputs == 1) result[i] = F::apply(wide[0][i]);
    if constexpr (Inputs == 2) result[i] = F::apply(wide[0][i], wide[1][i]);
  }
  return pack<T, N>(result);
}

// A block takes one tile of kPointwiseThreads * kPointwisePacks<T> packs of N elements; neighbouring
// threads take neighbouring packs. The first block also does the elements before and after the packs.
template <class F, class T, int N, int Inputs>
__global__ void __launch_bounds__(kPointwiseThreads) pointwise_kernel(const PointwiseArguments<T, Inputs> a) {
  const int64_t first = int64_t(blockIdx.x) * (kPointwiseThreads * kPointwisePacks<T>) + threadIdx.x;
  Pack<T, N> in[kPointwisePacks<T>][Inputs];
#pragma unroll
  for (int j = 0; j < kPointwisePacks<T>; ++j) {
    const int64_t p = first + j * kPointwiseThreads;
    if (p < a.packs) {
#pragma unroll
      for (int k = 0; k < Inputs; ++k) in[j][k] = load<T, N>(a.in[k] + a.head + p * N);
    }
  }
#pragma unroll
  for (int j = 0; j < kPointwisePacks<T>; ++j) {
    const int64_t p = first + j * kPointwiseThreads;
    if (p < a.packs) store(a.out + a.head + p * N, apply<F>(in[j]));
  }
  if (N > 1 && blockIdx.x == 0) {
    const int64_t rest = a.n - a.packs * N;
    if (threadIdx.x < rest) {
      const int64_t i = threadIdx.x < a.head ? int64_t(threadIdx.x) : threadIdx.x + a.packs * N;
      Pack<T, 1> one[Inputs];
#pragma unroll
      for (int k = 0; k < Inputs; ++k) one[k] = load<T, 1>(a.in[k] + i);
      store(a.out + i, apply<F>(one));
    }
  }
}

inline uintptr_t past_16_bytes(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16; }

// Runs F over n elements. Pointers at one common distance from a 16-byte boundary get 16-byte accesses
// with a scalar head and tail; pointers at different distances get scalar ones throughout.
template <class F, class T, int Inputs>
void pointwise(const void* const (&in)[Inputs], void* out, int64_t n, cudaStream_t stream) {
  if (n == 0) return;
  PointwiseArguments<T, Inputs> a;
  const uintptr_t past = past_16_bytes(out);
  bool wide = true;
  for (int k = 0; k < Inputs; ++k) {
    a.in[k] = static_cast<const T*>(in[k]);
    wide &= past_16_bytes(in[k]) == past;
  }
  a.out = static_cast<T*>(out);
  a.n = n;
  a.head = wide && past != 0 ? std::min<int64_t>((16 - past) / sizeof(T), n) : 0;
  a.packs = wide ? (n - a.head) / kWidest<T> : n;
  constexpr int64_t tile = kPointwiseThreads * kPointwisePacks<T>;
  const int64_t blocks = std::max<int64_t>(1, (a.packs + tile - 1) / tile);
  launch(wide ? pointwise_kernel<F, T, kWidest<T>, Inputs> : pointwise_kernel<F, T, 1, Inputs>, blocks,
         kPointwiseThreads, 0, stream, a);
}

}  // namespace memkern
