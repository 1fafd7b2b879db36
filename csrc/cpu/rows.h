// What CPU loops over rows share: vectors of what a row is computed in, and sums of them.
#pragma once

#include <type_traits>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#endif

#include "loops.h"

namespace memkern {

template <class T>
using acc_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Sums are kept in 64-byte vectors, of which the compiler makes what registers there are: the order of
// additions is the same on every machine.
template <class A>
struct VectorOf {
  typedef A type __attribute__((vector_size(64)));
};
template <class A>
using Vector = typename VectorOf<A>::type;
template <class A>
constexpr int64_t kLanes = 64 / sizeof(A);

template <class A>
MK_HD void load(const A* from, Vector<A>* to) {
  memcpy(to, from, sizeof *to);
}
template <class A>
MK_HD void load(const A* from, A* to) {
  *to = *from;
}
template <class A, class V>
MK_HD void put(A* to, const V& value) {
  memcpy(to, &value, sizeof value);
}

// In strands, so that one addition need not wait for the one before.
template <class A>
struct Sum {
  Vector<A> strands[4] = {};
  A rest = 0, total = 0;

  MK_HD void add(int strand, const Vector<A>& value) { strands[strand] += value; }
  MK_HD void add(int, const A& value) { rest += value; }
  // Adds to total what came since the last time.
  MK_HD void settle() {
    const Vector<A> lanes = (strands[0] + strands[1]) + (strands[2] + strands[3]);
    for (int64_t i = 0; i < kLanes<A>; ++i) rest += lanes[i];
    total += rest;
    *this = {{}, 0, total};
  }
};

// Calls body(i, tag, strand) so that all of n is covered: for the vector at i where tag is one, else for one
// element. The sums are settled every 4096 elements, which keeps the rounding error that of short sums.
template <class A, class Body, class... Sums>
MK_HD void for_lanes(int64_t n, Body body, Sums&... sums) {
  constexpr int64_t lanes = kLanes<A>;
  int64_t i = 0;
  while (i < n) {
    const int64_t end = std::min(n, i + 4096);
    for (; i + 4 * lanes <= end; i += 4 * lanes) {
      body(i, Vector<A>{}, 0);
      body(i + lanes, Vector<A>{}, 1);
      body(i + 2 * lanes, Vector<A>{}, 2);
      body(i + 3 * lanes, Vector<A>{}, 3);
    }
    for (; i + lanes <= end; i += lanes) body(i, Vector<A>{}, 0);
    for (; i < end; ++i) body(i, A{}, 0);
    (sums.settle(), ...);
  }
}

// ---- Rows of 16-bit values --------------------------------------------------
//
// fp16 by the instructions that most processors have for it, in a third of the time of the arithmetic in loops.h.

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target("arch=x86-64-v3"))) inline void widen_halves(const Half* from, int64_t n, float* to) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  for (; i < n; ++i) to[i] = _cvtsh_ss(from[i].bits);
}
__attribute__((target("arch=x86-64-v3"))) inline void narrow_to_halves(const float* from, int64_t n, Half* to) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
  for (; i < n; ++i) to[i].bits = _cvtss_sh(from[i], 0);
}
#define MEMKERN_OLDEST __attribute__((target("default")))
#else
#define MEMKERN_OLDEST
#endif
MEMKERN_OLDEST inline void widen_halves(const Half* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = widen(from[i]);
}
MEMKERN_OLDEST inline void narrow_to_halves(const float* from, int64_t n, Half* to) {
  for (int64_t i = 0; i < n; ++i) store(to + i, from[i]);
}

// Row values in the type they are computed in: where they lie, or widened into buffer.
template <class T>
MK_HD const acc_t<T>* widened(const T* row, int64_t n, acc_t<T>* buffer) {
  if constexpr (std::is_same_v<T, acc_t<T>>) {
    return row;
  } else if constexpr (std::is_same_v<T, Half>) {
    widen_halves(row, n, buffer);
    return buffer;
  } else {
    for (int64_t i = 0; i < n; ++i) buffer[i] = widen(row[i]);
    return buffer;
  }
}

// Stores value(i) for all of n. The buffer may hold what value(i) reads of element i.
template <class T, class A, class Value>
MK_HD void store_row(T* to, int64_t n, A* buffer, Value value) {
  if constexpr (std::is_same_v<T, Half>) {
    for (int64_t i = 0; i < n; ++i) buffer[i] = value(i);
    narrow_to_halves(buffer, n, to);
  } else {
    for (int64_t i = 0; i < n; ++i) store(to + i, value(i));
  }
}

}  // namespace memkern
