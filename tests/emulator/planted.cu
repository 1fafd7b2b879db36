// Kernels with a fault planted in them, and the same kernels without it: what the emulator is tested on.
// All read x (n floats) and write y (n floats); with `fault` 0 each is right.
#include "../../csrc/cuda/launch.cuh"
#include "../../csrc/cuda/vec.cuh"

namespace memkern {
namespace {

constexpr int kThreads = 64;

__device__ int64_t index_in_grid() { return int64_t(blockIdx.x) * blockDim.x + threadIdx.x; }

// Each block's elements in reverse, through shared memory. Fault 1: no barrier in between. Fault 2: one
// element past the end of the shared array.
template <int Threads>
__global__ void reverse(const float* x, float* y, int64_t n, int fault) {
  __shared__ float tile[Threads];
  tile[threadIdx.x + (fault == 2)] = x[index_in_grid()];
  if (fault != 1) __syncthreads();
  y[index_in_grid()] = tile[Threads - 1 - threadIdx.x];
}

// The same in dynamic shared memory, with the same faults.
__global__ void reverse_dynamic(const float* x, float* y, int64_t n, int fault) {
  float* tile = dynamic_shared<float>();
  store(tile + threadIdx.x + (fault == 2), load<float, 1>(x + index_in_grid()));
  if (fault != 1) __syncthreads();
  store(y + index_in_grid(), load<float, 1>(tile + blockDim.x - 1 - threadIdx.x));
}

// Neighbours of a warp exchanged, through shared memory. Fault 1: a shuffle instead of the barrier (it
// waits for the other lanes, but orders no memory).
__global__ void swap_neighbours(const float* x, float* y, int64_t n, int fault) {
  __shared__ float tile[kThreads];
  store(tile + threadIdx.x, load<float, 1>(x + index_in_grid()));
  if (fault == 1) {
    __shfl_xor_sync(~0u, 0, 1);
  } else {
    __syncwarp();
  }
  store(y + index_in_grid(), load<float, 1>(tile + (threadIdx.x ^ 1)));
}

// One block takes a tile after another. Fault 1: the barrier is missing that keeps the stores of one round
// behind the loads of the round before.
__global__ void rounds(const float* x, float* y, int64_t n, int fault) {
  __shared__ float tile[kThreads];
  if (blockIdx.x > 0) return;
  for (int64_t first = 0; first < n; first += kThreads) {
    tile[threadIdx.x] = x[first + threadIdx.x];
    __syncthreads();
    y[first + threadIdx.x] = tile[kThreads - 1 - threadIdx.x];
    if (fault != 1) __syncthreads();
  }
}

// Fault 1: one store past the end. Fault 2: the last element is not written.
__global__ void copy(const float* x, float* y, int64_t n, int fault) {
  const int64_t i = index_in_grid(), end = fault == 2 ? n - 1 : n;
  if (i < end) y[fault == 1 && i == n - 1 ? n : i] = x[i];
}

// 16 bytes a thread; n is a multiple of 4 and one more. Fault 1: x from its second element on, through
// load(). Fault 2: the same without load().
__global__ void wide_copy(const float* x, float* y, int64_t n, int fault) {
  const int64_t i = index_in_grid() * 4;
  if (i == 0) y[n - 1] = x[n - 1];
  if (i + 4 > n) return;
  const float* from = x + i + (fault != 0);
  store(y + i, fault == 2 ? *reinterpret_cast<const Pack<float, 4>*>(from) : load<float, 4>(from));
}

// Barriers of the block. Fault 1: half of the threads return before it. Fault 2: they wait for a shuffle
// in which lane 0 is missing. Fault 3: they come to it, but from elsewhere.
__global__ void barrier(const float* x, float* y, int64_t n, int fault) {
  const bool second_half = threadIdx.x >= kThreads / 2;
  y[index_in_grid()] = x[index_in_grid()];
  if (fault == 1 && second_half) return;
  if (fault == 2 && second_half && threadIdx.x % 32 != 0) __shfl_sync(~0u, 0, 0);
  __syncthreads();
}

// y is x summed over the warp. Faults: 1, a lane of the mask is missing; 2, a lane reads one that the mask
// leaves out; 3, a lane is not in its own mask; 4, two masks.
__global__ void warp_sum(const float* x, float* y, int64_t n, int fault) {
  const int lane = threadIdx.x % 32;
  float sum = x[index_in_grid()];
  if (fault == 1 && lane == 5) return;
  if (fault == 2 && lane < 16) __shfl_xor_sync(0xffffu, sum, 16);
  if (fault == 3) __shfl_xor_sync(0xffffu, sum, 1);
  if (fault == 4 && lane < 16) __shfl_xor_sync(lane == 7 ? ~0u : 0xffffu, sum, 1);
  for (int flip = 16; flip > 0; flip /= 2) sum += __shfl_xor_sync(~0u, sum, flip);
  y[index_in_grid()] = sum;
}

// One number a thread, to be compared with what CUDA's documentation says of these functions.
__global__ void intrinsic(const float* x, float* y, int64_t n, int which) {
  const int t = threadIdx.x, lane = t % 32, odd = t & 1;
  double result = 0;
  switch (which) {
    case 0: result = __shfl_sync(~0u, t, 3); break;
    case 1: result = __shfl_sync(~0u, t, 5, 4); break;
    case 2: result = __shfl_up_sync(~0u, t, 2, 8); break;
    case 3: result = __shfl_down_sync(~0u, double(t), 2, 8); break;
    case 4: result = __shfl_xor_sync(~0u, int64_t(t), 1); break;
    case 5: result = odd ? __shfl_xor_sync(0xaaaaaaaau, t, 2) : __shfl_xor_sync(0x55555555u, t, 4); break;
    case 6: result = __ballot_sync(~0u, lane == 3 || t == 33); break;
    case 7: result = __any_sync(~0u, t == 40) * 2 + __all_sync(~0u, t >= 32); break;
    case 8: result = __syncthreads_count(t < 5); break;
    case 9: result = __syncthreads_or(t == 63) * 4 + __syncthreads_and(t < 63) * 2 + __syncthreads_and(t < 64); break;
    case 10: result = blockIdx.x * 1000 + gridDim.x * 100 + blockDim.x; break;
    case 11: result = __half2float(__shfl_xor_sync(~0u, __float2half(t), 1)); break;
    case 12: result = __shfl_xor_sync(~0u, t, 4, 4); break;
    case 13: result = rsqrtf(16) + __fdividef(3, 2) + __expf(0) + __logf(1) + __ldg(x) * 0; break;
  }
  y[index_in_grid()] = static_cast<float>(result);
}

// How many elements of y were written before this thread's: the order in which threads run.
__global__ void place_in_order(const float* x, float* y, int64_t n, int fault) {
  int64_t written = 0;
  for (int64_t i = 0; i < n; ++i) written += y[i] == y[i];
  y[index_in_grid()] = static_cast<float>(written);
}

// A few blocks go through every stride-th element of x (stride 0: the first one, again and again).
__global__ void strided(const float* x, float* y, int64_t n, int stride) {
  const int64_t last = n / max(stride, 1);
  for (int64_t i = index_in_grid(); i < last; i += gridDim.x * blockDim.x)
    store(y + i, load<float, 1>(x + i * stride));
}

using Kernel = void (*)(const float*, float*, int64_t, int);

Tensor run(const std::string& name, const Tensor& x, int64_t fault) {
  static const std::vector<std::pair<std::string, Kernel>> kernels = {
      {"reverse", reverse<kThreads>}, {"reverse_dynamic", reverse_dynamic}, {"swap_neighbours", swap_neighbours},
      {"rounds", rounds}, {"copy", copy}, {"wide_copy", wide_copy}, {"barrier", barrier}, {"warp_sum", warp_sum},
      {"intrinsic", intrinsic}, {"place_in_order", place_in_order}, {"strided", strided}};
  const auto kernel = std::find_if(kernels.begin(), kernels.end(), [&](const auto& k) { return k.first == name; });
  STD_TORCH_CHECK(kernel != kernels.end(), "no kernel ", name);
  const OnDeviceOf device(x);
  Tensor y = new_like(x);
  const int64_t blocks = name == "strided" ? multiprocessors(x) : (x.numel() + kThreads - 1) / kThreads;
  launch(kernel->second, blocks, kThreads, kThreads * sizeof(float), device.stream,
         static_cast<const float*>(x.const_data_ptr()), static_cast<float*>(y.mutable_data_ptr()), x.numel(),
         static_cast<int>(fault));
  return y;
}

// A launch of this size, which does nothing.
void start(const Tensor& x, int64_t grid, int64_t block, int64_t shared_bytes) {
  const Kernel nothing = [](const float*, float*, int64_t, int) {};
  launch(nothing, grid, static_cast<int>(block), shared_bytes, OnDeviceOf(x).stream, nullptr, nullptr, 0, 0);
}

}  // namespace
}  // namespace memkern

STABLE_TORCH_LIBRARY(memkern_planted, m) {
  m.def("run(str kernel, Tensor x, int fault) -> Tensor");
  m.def("start(Tensor x, int grid, int block, int shared_bytes) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(memkern_planted, CPU, m) {
  m.impl("run", TORCH_BOX(&memkern::run));
  m.impl("start", TORCH_BOX(&memkern::start));
}
