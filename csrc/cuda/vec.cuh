// Packs of elements moved by one memory access, and their values in fp32 (fp64 for fp64).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../tensor.h"

// The emulator counts memory accesses here.
#ifndef MEMKERN_LOADED
#define MEMKERN_LOADED(pointer, bytes)
#define MEMKERN_STORED(pointer, bytes)
#endif

namespace memkern {

template <class T>
struct AccOf {
  using type = float;
};
template <>
struct AccOf<double> {
  using type = double;
};
// The type that T is computed in.
template <class T>
using acc_t = typename AccOf<T>::type;

// N neighbouring elements; 16 bytes is the widest access there is.
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T value[N];
};
template <class T>
constexpr int kWidest = 16 / sizeof(T);

template <class T, int N>
__device__ __forceinline__ Pack<T, N> load(const T* from) {
  MEMKERN_LOADED(from, sizeof(Pack<T, N>));
  return *reinterpret_cast<const Pack<T, N>*>(from);
}

template <class T, int N>
__device__ __forceinline__ void store(T* to, const Pack<T, N>& pack) {
  MEMKERN_STORED(to, sizeof(Pack<T, N>));
  if constexpr (sizeof(pack) == 16) {
    // Index 0, but not to the compiler: nvcc 13 splits up the store at a pointer that other stores are relative to.
    int zero = 0;
    asm("" : "+r"(zero));
    uint4 words;
    memcpy(&words, &pack, 16);
    reinterpret_cast<uint4*>(to)[zero] = words;
  } else {
    *reinterpret_cast<Pack<T, N>*>(to) = pack;
  }
}

__device__ __forceinline__ float2 widen(const __half* pair) { return __half22float2(*reinterpret_cast<const __half2*>(pair)); }
// A bf16 is the upper half of its fp32.
__device__ __forceinline__ float2 widen(const __nv_bfloat16* pair) {
  uint32_t bits[2];
  memcpy(bits, pair, 4);
  bits[1] = bits[0] & 0xffff0000u;
  bits[0] <<= 16;
  float2 values;
  memcpy(&values, bits, 8);
  return values;
}
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }

__device__ __forceinline__ void narrow(__half* pair, float2 x) { *reinterpret_cast<__half2*>(pair) = __float22half2_rn(x); }
__device__ __forceinline__ void narrow(__nv_bfloat16* pair, float2 x) {
  *reinterpret_cast<__nv_bfloat162*>(pair) = __float22bfloat162_rn(x);
}
__device__ __forceinline__ void narrow(__half* to, float x) { *to = __float2half_rn(x); }
__device__ __forceinline__ void narrow(__nv_bfloat16* to, float x) { *to = __float2bfloat16_rn(x); }
__device__ __forceinline__ void narrow(float* to, float x) { *to = x; }
__device__ __forceinline__ void narrow(double* to, double x) { *to = x; }

// 16-bit values are converted in pairs: one instruction for two, where the pack has two.
template <class T, int N>
__device__ __forceinline__ void unpack(const Pack<T, N>& pack, acc_t<T> (&out)[N]) {
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const float2 pair = widen(pack.value + i);
      out[i] = pair.x;
      out[i + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = widen(pack.value[i]);
  }
}

// One rounding, to nearest even.
template <class T, int N>
__device__ __forceinline__ Pack<T, N> pack(const acc_t<T> (&in)[N]) {
  Pack<T, N> packed;
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 2) narrow(packed.value + i, make_float2(in[i], in[i + 1]));
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) narrow(packed.value + i, in[i]);
  }
  return packed;
}

// Makes the compiler take pack for a new value, which it must unpack again: keeping the unpacked one would
// take twice the registers.
template <class T, int V>
__device__ __forceinline__ void forget_unpacked(Pack<T, V>& pack) {
  if constexpr (sizeof(T) == 2 && sizeof(pack) == 16) {
    uint32_t words[4];
    memcpy(words, &pack, 16);
    asm volatile("" : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3]));
    memcpy(&pack, words, 16);
  }
}

// V values are moved this many at a time.
template <class T, int V>
constexpr int kAccess = V * sizeof(T) > 16 ? int(16 / sizeof(T)) : V;

// V neighbouring values, in as few accesses as there can be.
template <int V, class T>
__device__ __forceinline__ void load_values(const T* from, acc_t<T> (&out)[V]) {
  constexpr int N = kAccess<T, V>;
#pragma unroll
  for (int i = 0; i < V; i += N) {
    acc_t<T> part[N];
    unpack(load<T, N>(from + i), part);
#pragma unroll
    for (int j = 0; j < N; ++j) out[i + j] = part[j];
  }
}

template <int V, class A>
__device__ __forceinline__ void store_values(A* to, const A (&values)[V]) {
  constexpr int N = kAccess<A, V>;
#pragma unroll
  for (int i = 0; i < V; i += N) {
    Pack<A, N> part;
#pragma unroll
    for (int j = 0; j < N; ++j) part.value[j] = values[i + j];
    store(to + i, part);
  }
}

template <class A>
__device__ __forceinline__ void store_one(A* to, A value) {
  store(to, Pack<A, 1>{{value}});
}

// Calls body(type tag) for the CUDA storage type of dtype.
template <class Body>
void for_dtype(ScalarType dtype, Body body) {
  switch (dtype) {
    case ScalarType::Half: return body(__half{});
    case ScalarType::BFloat16: return body(__nv_bfloat16{});
    case ScalarType::Float: return body(float{});
    case ScalarType::Double: return body(double{});
    default: STD_TORCH_CHECK(false, "x: needs float16, bfloat16, float32 or float64");
  }
}

}  // namespace memkern
