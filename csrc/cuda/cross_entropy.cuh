// How the kernels of cross-entropy and distillation walk over rows of logits.
//
// A row of a vocabulary of, say, 50,257 classes begins at another distance from a 16-byte boundary than the one
// before. So each row has a head and a tail of single elements; the part between, 16 bytes an access, begins at a
// multiple of 32 bytes, which is what memory moves.
#pragma once

#include "../cross_entropy.h"
#include "launch.cuh"
#include "reduce.cuh"
#include "vec.cuh"

namespace memkern {

// A matrix whose columns lie side by side.
template <class T>
struct Rows {
  T* data = nullptr;
  int64_t stride = 0;
  __device__ __forceinline__ T* operator[](int64_t row) const { return data + row * stride; }
};

template <class T>
Rows<const T> const_rows(const Tensor& x) {
  return {const_data<T>(x), x.stride(0)};
}

// Where a thread has packs of N elements, at most P: 32 packs, those of a warp, apart.
template <int kN, int kP>
struct Batch {
  static constexpr int N = kN, P = kP;
  int first;
  int left;  // elements from there on, all of the row's packs
  __device__ __forceinline__ bool has(int p) const { return p * 32 * N < left; }
  __device__ __forceinline__ int at(int p) const { return first + p * 32 * N; }

  // The packs, in flight all at once.
  template <class T>
  __device__ __forceinline__ void load(const T* row, Pack<T, N> (&packs)[P]) const {
#pragma unroll
    for (int p = 0; p < P; ++p)
      if (has(p)) packs[p] = memkern::load<T, N>(row + first + p * 32 * N);
  }
};

// The part of a row that falls to one of the threads that share it.
template <int V>
struct Walk {
  int head = 0, packed, columns;  // elements before the first pack, in packs, in all
  int thread, threads;

  template <class T>
  __device__ __forceinline__ Walk(const T* row, int columns, int thread, int threads)
      : packed(columns), columns(columns), thread(thread), threads(threads) {
    if constexpr (V > 1) {
      constexpr unsigned aligned = 32 / sizeof(T);
      head = min(columns, int(-unsigned(reinterpret_cast<uintptr_t>(row) / sizeof(T)) % aligned));
      packed = (columns - head) / V * V;
    }
  }

  // Calls body(Batch) for batches of P packs, then for single elements.
  template <int P, class Body>
  __device__ __forceinline__ void batches(Body body) const {
    for (int c = (thread / 32 * 32 * P + thread % 32) * V; c < packed; c += threads * P * V)
      body(Batch<V, P>{head + c, packed - c});
    if constexpr (V > 1)
      for (int e = thread; e < columns - packed; e += threads) body(Batch<1, 1>{e < head ? e : e + packed, 1});
  }
};

constexpr int kRowBlock = 256;  // threads of a block that has several rows
// Most threads that share a row. A multiprocessor is to hold two such blocks: a thread then has 64 registers, or 128
// where the formulas need them.
template <class T, bool By_class = false>
constexpr int kRowThreads = sizeof(T) == 8 || By_class ? 256 : 512;

struct RowShare {
  bool wide;             // 16-byte accesses
  int threads, groups;  // that share a row; rows of a block
  int block() const { return threads * groups; }
  int64_t blocks(int64_t rows) const { return (rows + groups - 1) / groups; }
};

// A warp or less has a row of up to 256 packs to itself; 4 packs a thread beyond. Single elements where there are
// too few for packs to pay.
inline RowShare row_share(int columns, bool wide, int widest, int most_threads) {
  wide = wide && columns > 64;
  const int packs = wide ? columns / widest : columns;
  int threads = 1;
  while (threads < columns && threads < 32) threads *= 2;
  if (packs > 256) threads = std::min((packs + 127) / 128 * 32, most_threads);
  return {wide, threads, std::max(kRowBlock / threads, 1)};
}

// Whether packs of `widest` elements lie alike in the rows of both.
template <class T, class U>
bool alike(const Rows<T>& x, const Rows<U>& y, int64_t widest) {
  const auto place = [](auto* data) { return static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) / sizeof(*data)); };
  return !y.data || ((x.stride - y.stride) % widest == 0 && (place(x.data) - place(y.data)) % widest == 0);
}

// Calls body(elements in an access) for the kernel to launch.
template <class T, class Body>
void for_access(bool wide, Body body) {
  if constexpr (sizeof(T) < 8)
    if (wide) return body(std::integral_constant<int, kWidest<T>>{});
  body(std::integral_constant<int, 1>{});
}

// Of one row.
template <class T>
struct RowTarget {
  using A = acc_t<T>;
  const T* probabilities = nullptr;
  const float *fp32_probabilities = nullptr, *weight = nullptr;
  Shares<A> shares;
  int64_t index = -1;
  bool ignored = false, invalid = false;  // invalid: no class has that index

  // The weight of the class with the index.
  __device__ __forceinline__ A index_weight() const {
    return weight && !invalid ? load<float, 1>(weight + index).value[0] : 1;
  }

  // Shares of the classes from c on.
  template <int N>
  __device__ __forceinline__ void at(int c, A (&out)[N]) const {
    A q[N];
    if (probabilities) {
      load_values(probabilities + c, q);
    } else if (fp32_probabilities) {
      load_fp32(fp32_probabilities + c, q);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) q[i] = c + i == index;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = 1;
    if (weight) load_fp32(weight + c, out);
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = shares.of(out[i], q[i]);
  }

 private:
  // The packs of weight, which is one for all rows, lie as those of the logits in some rows only.
  template <int N>
  static __device__ __forceinline__ void load_fp32(const float* from, A (&out)[N]) {
    float values[N];
    if (reinterpret_cast<uintptr_t>(from) % (sizeof(float) * kAccess<float, N>) == 0) {
      load_values(from, values);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] = load<float, 1>(from + i).value[0];
    }
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = values[i];
  }
};

// Of all rows: indices, or probabilities, in T or fp32.
template <class T>
struct Target {
  const int64_t* index;
  Rows<const T> probabilities;
  Rows<const float> fp32_probabilities;
  const float* weight;  // may be null
  int64_t ignore_index;
  Shares<acc_t<T>> shares;

  __device__ __forceinline__ RowTarget<T> of(int64_t row, int classes) const {
    RowTarget<T> target{probabilities.data ? probabilities[row] : nullptr,
                        fp32_probabilities.data ? fp32_probabilities[row] : nullptr, weight, shares};
    if (index) {
      target.index = load<int64_t, 1>(index + row).value[0];
      target.ignored = target.index == ignore_index;
      target.invalid = target.index < 0 || target.index >= classes;
    }
    return target;
  }
  // Whether target and weight have to be looked up for every class. Else all classes but the one with the index
  // have the same share.
  bool is_by_class() const { return !index || (weight && shares.even != 0); }

  bool is_alike(const Rows<const T>& logits) const {
    return alike(logits, probabilities, kWidest<T>) && alike(logits, fp32_probabilities, kWidest<T>);
  }
};

}  // namespace memkern
