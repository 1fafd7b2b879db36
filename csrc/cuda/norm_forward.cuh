// LayerNorm and RMSNorm on CUDA, forward: x (and residual) are read once, y (and their sum) written once.
#pragma once

#include "norm.cuh"

namespace memkern {
namespace {

// Threads of a block that has several rows, and about how many a multiprocessor holds.
constexpr int kForwardBlock = 256, kResident = 1024;

template <class T>
struct Forward {
  const T *x, *residual;  // residual may be null
  Parameters<T> parameters;
  T *y, *summed;
  acc_t<T> *mean, *rstd;  // mean may be null
  int64_t rows, columns;
  acc_t<T> eps;
  bool centre;
  bool shared_parameters;
  int threads;  // a row
};

// Mean and 1 / sqrt(variance + eps) of a row by the corrected two-pass algorithm (Chan, Golub & LeVeque
// 1983): the second pass sums the deviations from the first mean as well as their squares, and so finds
// what rounding left wrong with that mean.
template <class A>
struct Statistics {
  A mean = 0, correction = 0, rstd = 0;

  // `each(f)` calls f for the values of every pack that the thread holds. They are summed pack by pack: sums
  // of sums round less, and wait less for one another.
  template <class T, class Each>
  __device__ __forceinline__ void compute(const Forward<T>& a, RowSum<A>& row_sum, Each each) {
    const A inverse_columns = A(1) / A(a.columns);
    if (a.centre) {
      A total[1] = {0};
      each([&](const auto& z) {
        A sum = 0;
        for (const A value : z) sum += value;
        total[0] += sum;
      });
      row_sum(total);
      mean = total[0] * inverse_columns;
    }
    A moments[2] = {0, 0};
    each([&](const auto& z) {
      A sum = 0, squares = 0;
      for (const A value : z) {
        const A deviation = value - mean;
        sum += deviation;
        squares += deviation * deviation;
      }
      moments[0] += sum;
      moments[1] += squares;
    });
    row_sum(moments);
    if (a.centre) correction = moments[0] * inverse_columns;
    const A variance = moments[1] * inverse_columns - correction * correction;
    rstd = A(1) / sqrt((variance < 0 ? A(0) : variance) + a.eps);
  }

  template <class T>
  __device__ __forceinline__ void save(const Forward<T>& a, int64_t row) const {
    if (a.mean) store_one(a.mean + row, mean + correction);
    store_one(a.rstd + row, rstd);
  }

  template <class T, int V>
  __device__ __forceinline__ Pack<T, V> apply(const A (&z)[V], const A (&scale)[V], const A (&shift)[V]) const {
    A value[V];
#pragma unroll
    for (int i = 0; i < V; ++i) value[i] = ((z[i] - mean) - correction) * rstd * scale[i] + shift[i];
    return pack<T, V>(value);
  }
};

// The values of x + residual, rounded to T; stored in summed.
template <class T, int V>
__device__ __forceinline__ void add(const Pack<T, V>& residual, acc_t<T> (&x)[V], T* summed) {
  acc_t<T> more[V];
  unpack(residual, more);
#pragma unroll
  for (int i = 0; i < V; ++i) x[i] += more[i];
  const Pack<T, V> rounded = pack<T, V>(x);
  store(summed, rounded);
  unpack(rounded, x);
}

template <class T, int V, int P>
__global__ void __launch_bounds__(P * V == 8 ? kForwardBlock : kMaxRowThreads, P * V == 8 ? 2 : 1)
    forward_in_registers(const Forward<T> a) {
  using A = acc_t<T>;
  __shared__ typename RowSum<A>::Slots slots;
  RowSum<A> row_sum(slots, a.threads);
  const int thread = threadIdx.x % a.threads, group = threadIdx.x / a.threads, groups = blockDim.x / a.threads;
  const Columns<V, P> mine(thread, a.threads);

  const BlockParameters<T> parameters{a.parameters, a.shared_parameters ? dynamic_shared<A>() : nullptr,
                                      int(a.columns)};
  parameters.template fill<V>(true);

  for (int64_t first = int64_t(blockIdx.x) * groups; first < a.rows; first += int64_t(gridDim.x) * groups) {
    const int64_t row = first + group, start = row * a.columns + mine.first;
    const int left = row < a.rows ? int(a.columns) - mine.first : 0;  // columns; none past the last row
    A z[P][V];
#pragma unroll
    for (int p = 0; p < P; ++p)
      if (mine.at(p) < left) load_values(a.x + start + mine.at(p), z[p]);
    if (a.residual) {
      Pack<T, V> residual[P];
#pragma unroll
      for (int p = 0; p < P; ++p)
        if (mine.at(p) < left) residual[p] = load<T, V>(a.residual + start + mine.at(p));
#pragma unroll
      for (int p = 0; p < P; ++p)
        if (mine.at(p) < left) add(residual[p], z[p], a.summed + start + mine.at(p));
    }

    Statistics<A> statistics;
    statistics.compute(a, row_sum, [&](auto f) {
#pragma unroll
      for (int p = 0; p < P; ++p)
        if (mine.at(p) < left) f(z[p]);
    });
    if (row < a.rows && thread == 0) statistics.save(a, row);
#pragma unroll
    for (int p = 0; p < P; ++p)
      if (mine.at(p) < left) {
        A scale[V], shift[V];
        parameters.scale(mine.first, mine.at(p), scale);
        parameters.shift(mine.first, mine.at(p), shift);
        store(a.y + start + mine.at(p), statistics.template apply<T>(z[p], scale, shift));
      }
  }
}

// A block a row. The sum with the residual is read back as this same thread wrote it.
template <class T, int V>
__global__ void __launch_bounds__(kMaxRowThreads) forward_looped(const Forward<T> a) {
  using A = acc_t<T>;
  __shared__ typename RowSum<A>::Slots slots;
  RowSum<A> row_sum(slots, a.threads);
  const int64_t row = blockIdx.x, start = row * a.columns, step = int64_t(a.threads) * V;
  const T* from = a.x + start;
  if (a.residual) {
    for (int64_t c = threadIdx.x * V; c < a.columns; c += step) {
      A z[V];
      load_values(from + c, z);
      add(load<T, V>(a.residual + start + c), z, a.summed + start + c);
    }
    from = a.summed + start;
  }
  Statistics<A> statistics;
  statistics.compute(a, row_sum, [&](auto f) {

    for (int64_t c = threadIdx.x * V; c < a.columns; c += step) {
      A z[V];
      load_values(from + c, z);
      f(z);
    }
  });
  if (threadIdx.x == 0) statistics.save(a, row);
  for (int64_t c = threadIdx.x * V; c < a.columns; c += step) {
    A z[V], scale[V], shift[V];
    load_values(from + c, z);
    a.parameters.scale(c, 0, scale);
    a.parameters.shift(c, 0, shift);
    store(a.y + start + c, statistics.template apply<T>(z, scale, shift));
  }
}

template <class T>
void run_forward(Forward<T> a, const Tensor& x, cudaStream_t stream) {
  if (a.rows == 0) return;
  const bool wide = rows_are_aligned(a.columns, sizeof(T), {a.x, a.residual, a.parameters.weight, a.parameters.bias});
  const RowPlan plan = row_plan(a.columns, wide, kWidest<T>, sizeof(T) == 8, kMaxRowThreads);
  a.threads = plan.threads;
  for_plan<T>(plan, [&](auto access, auto packs) {
    constexpr int V = decltype(access)::value, P = decltype(packs)::value;
    if constexpr (P == 0) {
      launch(forward_looped<T, V>, a.rows, a.threads, 0, stream, a);
    } else {
      const int groups = std::max(kForwardBlock / a.threads, 1), block = groups * a.threads;
      const int64_t blocks = (a.rows + groups - 1) / groups, most = int64_t(multiprocessors(x)) * (kResident / block);
      const int64_t bytes = 2 * a.columns * sizeof(acc_t<T>);
      a.shared_parameters = blocks > most && bytes <= kSharedBytes;
      launch(forward_in_registers<T, V, P>, std::min(blocks, most), block, a.shared_parameters ? bytes : 0, stream, a);
    }
  });
}

}  // namespace
}  // namespace memkern
