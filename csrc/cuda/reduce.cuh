// Sums and maxima over the threads that share a row, in a fixed order.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

namespace memkern {

constexpr int kMaxRowThreads = 512;

// Dynamic shared memory of a kernel: with RowSum's slots below the 48 KB that need no asking for.
constexpr int64_t kSharedBytes = 40 << 10;

// A row is shared by `threads` neighbouring threads: a power of two within a warp, or several warps. Every
// thread of the block must call, since the warps of a row meet at a block barrier. Two sets of slots take
// turns, so that one barrier a call is enough.
template <class A>
class RowSum {
 public:
  using Slots = A[2][kMaxRowThreads / 32][4];

  __device__ RowSum(Slots& slots, int threads) : slots_(slots), threads_(threads) {}

  // Each of the N <= 4 values becomes its sum over the row, in every thread of the row.
  template <int N>
  __device__ __forceinline__ void operator()(A (&values)[N]) {
    fold(values, [](A a, A b) { return a + b; });
  }
  // The same for the largest; NaN counts as nothing.
  template <int N>
  __device__ __forceinline__ void max(A (&values)[N]) {
    fold(values, [](A a, A b) { return std::fmax(a, b); });
  }

 private:
  template <int N, class Merge>
  __device__ __forceinline__ void fold(A (&values)[N], Merge merge) {
    for (int reach = threads_ < 32 ? threads_ / 2 : 16; reach > 0; reach /= 2)
#pragma unroll
      for (int n = 0; n < N; ++n) values[n] = merge(values[n], __shfl_xor_sync(~0u, values[n], reach));
    if (threads_ <= 32) return;
    const int warp = threadIdx.x / 32, warps = threads_ / 32, first = warp / warps * warps;
    auto& slots = slots_[turn_];
    turn_ ^= 1;
    if (threadIdx.x % 32 == 0)
#pragma unroll
      for (int n = 0; n < N; ++n) slots[warp][n] = values[n];
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; ++n) {
      values[n] = slots[first][n];
      for (int w = first + 1; w < first + warps; ++w) values[n] = merge(values[n], slots[w][n]);
    }
  }

  Slots& slots_;
  int threads_, turn_ = 0;
};

}  // namespace memkern
