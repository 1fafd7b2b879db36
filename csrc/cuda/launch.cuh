// How host code reaches the GPU: device guard, stream, launch. The emulator replaces the part marked
// so, and compiles everything else unchanged.
#pragma once

#include <cuda_runtime.h>

#include "../tensor.h"

#ifndef MEMKERN_CUDA_NAMESPACE
#define MEMKERN_CUDA_NAMESPACE memkern_cuda
#define MEMKERN_CUDA_KEY CUDA
#endif

#ifndef MEMKERN_EMULATED
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

namespace memkern {

// Makes x's device current while in scope, and names PyTorch's current stream on it.
struct OnDeviceOf {
  explicit OnDeviceOf(const Tensor& x) : guard(x.get_device_index()) {
    void* current = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &current));
    stream = static_cast<cudaStream_t>(current);
  }
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream;
};

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), int64_t grid, int block, size_t shared_bytes, cudaStream_t stream,
            Arguments... arguments) {
  if (shared_bytes > 48 << 10)  // more has to be asked for
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes)));
  kernel<<<static_cast<unsigned>(grid), block, shared_bytes, stream>>>(arguments...);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// How many multiprocessors x's device has.
inline int multiprocessors(const Tensor& x) {
  int count = 0;
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, x.get_device_index()));
  return count;
}

// The dynamic shared memory of the launch, aligned to 16 bytes.
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char memory[];
  return reinterpret_cast<T*>(memory);
}

}  // namespace memkern
#endif
