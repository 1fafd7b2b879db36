// How kernels over rows divide them over threads.
//
// Up to 16K columns a row lives in the registers of the threads that share it: each holds 8 elements up to
// 256 columns and 32 beyond (16 where each is an access of its own). A warp or less has a row of up to 1024
// columns to itself; a wider one is shared by several warps. Still wider rows, and fp64, are read again for
// each pass ("looped").
#pragma once

#include "launch.cuh"
#include "reduce.cuh"
#include "vec.cuh"

namespace memkern {

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

// Calls body(type tag, elements in an access, packs a thread holds) for the kernel that the plan asks for;
// 0 packs where it is looped.
template <class T, class Body>
void for_plan(const RowPlan& plan, Body body) {
  const auto with_access = [&](auto access) {
    if constexpr (sizeof(T) < 8) {
      constexpr int V = decltype(access)::value;
      if (!plan.looped && plan.elements == 8) return body(access, std::integral_constant<int, 8 / V>{});
      if (!plan.looped) return body(access, std::integral_constant<int, (V > 1 ? 32 : 16) / V>{});
    }
    body(access, std::integral_constant<int, 0>{});
  };
  if (sizeof(T) < 8 && plan.wide) return with_access(std::integral_constant<int, sizeof(T) < 8 ? kWidest<T> : 1>{});
  with_access(std::integral_constant<int, 1>{});
}

}  // namespace memkern
