// One launch over many tensors: their pointers and sizes travel in the kernel's arguments, so that nothing
// is copied to the device first and the launch can be captured in a CUDA graph. A block takes one chunk of
// one tensor.
#pragma once

#include <vector>

#include "launch.cuh"
#include "vec.cuh"

namespace memkern {

constexpr int kChunkThreads = 256;
constexpr size_t kArgumentBytes = 32764;  // the most that a launch can be given

// Some tensors and what they share. Item: has chunks(), the number of blocks for it.
template <class Item, class Shared>
struct Batch {
  static constexpr int kMost = (kArgumentBytes - sizeof(Shared) - 16) / (sizeof(Item) + sizeof(unsigned));
  Shared shared;
  int count = 0;
  unsigned end[kMost];  // chunks of the items up to and including this one
  Item item[kMost];

  // The item that a block works on: the first that ends after it.
  __device__ int item_of(unsigned block) const {
    int low = 0, high = count - 1;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (end[middle] > block)
        high = middle;
      else
        low = middle + 1;
    }
    return low;
  }
  __device__ unsigned first_chunk(int i) const { return i == 0 ? 0 : end[i - 1]; }
};

// Calls launch(batch, number of its first item, number of its first chunk, its chunks) for as many items at
// a time as fit.
template <class Shared, class Item, class Launch>
void in_batches(const Shared& shared, const std::vector<Item>& items, Launch launch) {
  using Items = Batch<Item, Shared>;
  static_assert(sizeof(Items) <= kArgumentBytes);
  Items batch;
  batch.shared = shared;
  int64_t chunk = 0;
  for (size_t first = 0; first < items.size(); first += batch.count) {
    unsigned chunks = 0;
    batch.count = static_cast<int>(std::min<size_t>(items.size() - first, Items::kMost));
    for (int i = 0; i < batch.count; ++i) {
      batch.item[i] = items[first + i];
      batch.end[i] = chunks += batch.item[i].chunks();
    }
    launch(batch, static_cast<int64_t>(first), chunk, static_cast<int64_t>(chunks));
    chunk += chunks;
  }
}

// How a tensor, or several of one shape side by side, is cut for Width elements at a time: the head, then
// vectors, then the rest. A chunk is Vectors vectors, or as many elements where there are none.
template <int Width, int Vectors>
struct Cut {
  int64_t n;
  int head;  // elements before all are aligned to a vector; -1: they never are

  __host__ __device__ int64_t vectors() const { return head < 0 ? 0 : (n - head) / Width; }

  unsigned chunks() const {
    const int64_t parts = head < 0 ? n : std::max<int64_t>(vectors(), 1), a_chunk = head < 0 ? Width * Vectors : Vectors;
    return static_cast<unsigned>((parts + a_chunk - 1) / a_chunk);
  }

  // Calls body(number of elements, the first one) for what this thread has to do in a chunk. The first chunk
  // has the head and the rest.
  template <class Body>
  __device__ __forceinline__ void for_each(unsigned chunk, Body body) const {
    if (head < 0) {
      const int64_t first = int64_t(chunk) * (Width * Vectors), last = min(n, first + Width * Vectors);
      for (int64_t i = first + threadIdx.x; i < last; i += kChunkThreads) body(std::integral_constant<int, 1>(), i);
      return;
    }
    const int64_t first = int64_t(chunk) * Vectors, last = min(vectors(), first + Vectors);
    for (int64_t v = first + threadIdx.x; v < last; v += kChunkThreads)
      body(std::integral_constant<int, Width>(), head + v * Width);
    const int64_t whole = vectors() * Width;
    if (chunk == 0 && threadIdx.x < n - whole)
      body(std::integral_constant<int, 1>(), threadIdx.x < head ? int64_t(threadIdx.x) : threadIdx.x + whole);
  }
};

// Elements before the first boundary of `width` elements of `size` bytes.
inline int head_of(const void* pointer, int size, int width) {
  const auto element = static_cast<int>(reinterpret_cast<uintptr_t>(pointer) / size % width);
  return (width - element) % width;
}

// The sum of value over the block, for its first thread, in one order whatever the hardware.
__device__ __forceinline__ double block_sum(double value) {
  __shared__ double warps[32];
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_down_sync(~0u, value, lanes);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  __syncthreads();  // an earlier sum has been read
  if (lane == 0) warps[warp] = value;
  __syncthreads();
  double sum = 0;
  if (threadIdx.x == 0)
    for (unsigned w = 0; w < blockDim.x / 32; ++w) sum += warps[w];
  return sum;
}

}  // namespace memkern
