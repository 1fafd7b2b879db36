// What nvcc and the GPU give the CUDA sources, for g++ and the CPU. It is included ahead of every source
// file; emulator.cpp does the work.
//
// A kernel is an ordinary function here, called once for every thread of the grid, each thread on a fiber
// of its own: at a barrier or a shuffle the thread is suspended until the others have arrived. All of it
// happens in the calling OS thread.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <type_traits>

namespace memkern_emulated {

// What a thread waits for (or that it has not begun, was let go on, or has returned).
enum class At { start, released, block_barrier, warp_barrier, shuffle, vote, end };

// Runs thread() for each thread of each block. Throws what a thread threw, or std::runtime_error for a
// deadlock, a shuffle outside its mask, or a launch that a GPU would refuse.
void run(const void* kernel, int64_t grid, int block, size_t shared_bytes, const std::function<void()>& thread);

// Suspends the calling thread until the others that `at` and `mask` call for are there too. Returns, for
// a block barrier, in how many threads value was not 0; for a shuffle, the value of lane `source`; for a
// vote, a bit for each lane whose value was not 0.
uint64_t wait(At at, unsigned mask, uint64_t value, int source);

// A global access by the calling thread: must be aligned to its size. Counted where counting is on.
void accessed(const void* address, size_t bytes, bool is_store);

// Fills with 0xFF, which is a NaN in every floating type.
void poison(void* memory, size_t bytes);

void* dynamic_shared();

template <class T>
T shuffle(unsigned mask, T value, int source) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  bits = wait(At::shuffle, mask, bits, source);
  memcpy(static_cast<void*>(&value), &bits, sizeof value);
  return value;
}

}  // namespace memkern_emulated

// The hooks in the sources.
#define MEMKERN_FRESH(pointer, bytes) ::memkern_emulated::poison(pointer, bytes)
#define MEMKERN_LOADED(pointer, bytes) ::memkern_emulated::accessed(pointer, bytes, false)
#define MEMKERN_STORED(pointer, bytes) ::memkern_emulated::accessed(pointer, bytes, true)

// Shared arrays are one block's at a time. Of all the places where C++ could put them, thread_local ones
// lie together, so that emulator.cpp can poison them when a block begins.
#undef __shared__
#define __shared__ static thread_local

#undef __launch_bounds__
#define __launch_bounds__(...)

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

// Block barriers. Every thread of the block must come; one that has returned counts as missing.
inline int __syncthreads_count(int predicate) {
  return static_cast<int>(memkern_emulated::wait(memkern_emulated::At::block_barrier, 0, predicate != 0, 0));
}
inline void __syncthreads() { __syncthreads_count(0); }
inline int __syncthreads_or(int predicate) { return __syncthreads_count(predicate) != 0; }
inline int __syncthreads_and(int predicate) { return __syncthreads_count(predicate) == int(blockDim.x); }

// Warp operations. Every lane in the mask must come, with the same mask. Only __syncwarp orders memory.
inline void __syncwarp(unsigned mask = ~0u) { memkern_emulated::wait(memkern_emulated::At::warp_barrier, mask, 0, 0); }
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return static_cast<unsigned>(memkern_emulated::wait(memkern_emulated::At::vote, mask, predicate != 0, 0));
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }

// Shuffles. Past the end of its group of `width` lanes, a thread gets its own value back.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize) {
  const int lane = threadIdx.x % warpSize;
  return memkern_emulated::shuffle(mask, value, lane / width * width + (source & (width - 1)));
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize) {
  const int lane = threadIdx.x % warpSize, source = lane - static_cast<int>(delta);
  return memkern_emulated::shuffle(mask, value, source < lane / width * width ? lane : source);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize) {
  const int lane = threadIdx.x % warpSize, source = lane + static_cast<int>(delta);
  return memkern_emulated::shuffle(mask, value, source >= (lane / width + 1) * width ? lane : source);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int flip, int width = warpSize) {
  const int lane = threadIdx.x % warpSize, source = lane ^ flip;
  return memkern_emulated::shuffle(mask, value, source >= (lane / width + 1) * width ? lane : source);
}

// Device functions that the C++ library lacks; more are added when a kernel needs them.
using std::max;
using std::min;
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline double rsqrt(double x) { return 1 / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float x, float y) { return x / y; }
template <class T>
T __ldg(const T* address) {
  return *address;
}

#include "../../csrc/tensor.h"

// What launch.cuh has for the GPU.
namespace memkern {

struct OnDeviceOf {
  explicit OnDeviceOf(const Tensor&) {}
  cudaStream_t stream = nullptr;
};

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), int64_t grid, int block, size_t shared_bytes, cudaStream_t,
            const Arguments&... arguments) {
  memkern_emulated::run(reinterpret_cast<const void*>(kernel), grid, block, shared_bytes,
                        [&] { kernel(arguments...); });
}

template <class T>
T* dynamic_shared() {
  return static_cast<T*>(memkern_emulated::dynamic_shared());
}

// Few, so that grids sized by it leave each block several tiles.
inline int multiprocessors(const Tensor&) { return 4; }

}  // namespace memkern
