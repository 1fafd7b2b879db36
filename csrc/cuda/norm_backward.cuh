// LayerNorm and RMSNorm on CUDA, backward: x and dy are read once, for dx and for the sums over rows that
// are the gradients of weight and bias.
//
// A block takes a chunk of rows that depends on nothing but rows and columns, and leaves one partial sum a
// column; finalise() adds the partials in order. So the result is the same in every run and on every GPU.
#pragma once

#include "norm.cuh"

namespace memkern {
namespace {

// Rows whose gradients one partial sums: at least 8, and 32K elements, so that few rows make few partials;
// more where there would be over 256 partials, which is two blocks a multiprocessor on the larger GPUs.
inline int64_t rows_in_partial(int64_t rows, int64_t columns) {
  const auto divided_up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  return std::max({int64_t{8}, divided_up(32768, columns), divided_up(rows, 256)});
}

template <class T>
struct Backward {
  const T *dy, *dsummed, *x;  // dsummed may be null; x is y where from_y
  Parameters<T> parameters;
  const acc_t<T> *mean, *rstd;  // mean is null where it was not subtracted, and where from_y
  T* dx;                        // these three: null where not needed
  acc_t<T> *dweight, *dbias;    // partials, (partials, columns)
  int64_t rows, columns, rows_in_partial;
  bool centre, from_y;
  bool shared_parameters;  // there is shared memory for the parameters, not for the sums alone
  int threads;             // a row

  __device__ __forceinline__ acc_t<T> mean_of(int64_t row) const {
    return mean ? load<acc_t<T>, 1>(mean + row).value[0] : 0;
  }
  __device__ __forceinline__ acc_t<T> rstd_of(int64_t row) const { return load<acc_t<T>, 1>(rstd + row).value[0]; }
};

// The values of one pack in one row.
template <class T, int V>
struct Values {
  using A = acc_t<T>;
  A dy[V], x_hat[V];

  __device__ __forceinline__ Values(const Pack<T, V>& dy_pack, const Pack<T, V>& x_pack) {
    unpack(dy_pack, dy);
    unpack(x_pack, x_hat);
  }
  __device__ __forceinline__ void normalise(A mean, A rstd) {
#pragma unroll
    for (int i = 0; i < V; ++i) x_hat[i] = (x_hat[i] - mean) * rstd;
  }
  // x held y.
  __device__ __forceinline__ void undo(const A (&scale)[V], const A (&shift)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) x_hat[i] = (x_hat[i] - shift[i]) / scale[i];
  }
  __device__ __forceinline__ void add_to_sums(const A (&scale)[V], A (&sums)[2]) const {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const A g = dy[i] * scale[i];
      sums[0] += g;
      sums[1] += g * x_hat[i];
    }
  }
  // means: of g and of g x_hat over the row.
  __device__ __forceinline__ void dx(const A (&scale)[V], const A (&means)[2], A rstd, A (&out)[V]) const {
#pragma unroll
    for (int i = 0; i < V; ++i) out[i] = (dy[i] * scale[i] - means[0] - x_hat[i] * means[1]) * rstd;
  }
};

template <class T, class A>
__device__ __forceinline__ void sums_to_means(const Backward<T>& a, A (&sums)[2]) {
  const A inverse_columns = A(1) / A(a.columns);
  sums[0] = a.centre ? sums[0] * inverse_columns : 0;
  sums[1] *= inverse_columns;
}

template <int V, class T>
__device__ __forceinline__ void store_dx(const Backward<T>& a, int64_t at, acc_t<T> (&dx)[V]) {
  if (a.dsummed) {
    acc_t<T> more[V];
    load_values(a.dsummed + at, more);
#pragma unroll
    for (int i = 0; i < V; ++i) dx[i] += more[i];
  }
  store(a.dx + at, pack<T, V>(dx));
}

// 512 threads have 128 registers each. That is room for 32 columns where x and dy are packed two to a
// register: for their sums for the weight; those for a bias too where x and dy stay in shared memory (Staged).
template <class T, int V>
constexpr int kBackwardThreads = sizeof(T) == 2 && V > 1 ? 512 : 256;

template <class T, int V, int P, bool Bias, bool Staged>
__global__ void __launch_bounds__(P * V == 8 || (Bias && !Staged) ? 256 : kBackwardThreads<T, V>, P * V == 8 ? 2 : 1)
    backward_in_registers(const Backward<T> a) {
  using A = acc_t<T>;
  __shared__ typename RowSum<A>::Slots slots;
  RowSum<A> row_sum(slots, a.threads);
  A* shared = dynamic_shared<A>();
  const int group = Staged ? 0 : threadIdx.x / a.threads, groups = Staged ? 1 : blockDim.x / a.threads;
  const Columns<V, P> mine(threadIdx.x - group * a.threads, a.threads);

  const BlockParameters<T> parameters{a.parameters, !Staged && a.shared_parameters ? shared : nullptr,
                                      int(a.columns)};
  parameters.template fill<V>(a.from_y);
  const auto values_at = [&](const Pack<T, V>& dy, const Pack<T, V>& x, A mean, A rstd, int at, const A(&scale)[V]) {
    Values<T, V> values(dy, x);
    if (a.from_y) {
      A shift[V];
      parameters.shift(mine.first, at, shift);
      values.undo(scale, shift);
    } else {
      values.normalise(mean, rstd);
    }
    return values;
  };

  A dweight[P][V] = {}, dbias[P][V] = {};
  const int64_t begin = blockIdx.x * a.rows_in_partial, end = min(begin + a.rows_in_partial, a.rows);
  for (int64_t first = begin; first < end; first += groups) {
    const int64_t row = first + group, start = row * a.columns + mine.first;
    const int left = row < end ? int(a.columns) - mine.first : 0;  // columns; none past the last row
    Pack<T, V> registers[Staged ? 1 : 2 * P];  // each thread has its own part of shared memory, too
    const auto kept = [&](int i) -> Pack<T, V>& {
      if constexpr (Staged) return reinterpret_cast<Pack<T, V>*>(shared)[i * blockDim.x + threadIdx.x];
      return registers[Staged ? 0 : i];
    };
#pragma unroll
    for (int p = 0; p < P; ++p)
      if (mine.at(p) < left) {
        kept(p) = load<T, V>(a.dy + start + mine.at(p));
        kept(P + p) = load<T, V>(a.x + start + mine.at(p));
      }
    const A mean = row < end ? a.mean_of(row) : 0, rstd = row < end ? a.rstd_of(row) : 0;
    A sums[2] = {0, 0};
#pragma unroll
    for (int p = 0; p < P; ++p)
      if (mine.at(p) < left) {
        A scale[V];
        parameters.scale(mine.first, mine.at(p), scale);
        const Values<T, V> values = values_at(kept(p), kept(P + p), mean, rstd, mine.at(p), scale);
        values.add_to_sums(scale, sums);
#pragma unroll
        for (int i = 0; i < V; ++i) {
          dweight[p][i] += values.dy[i] * values.x_hat[i];
          if (Bias) dbias[p][i] += values.dy[i];
        }
      }
    if (!a.dx) continue;
    row_sum(sums);
    sums_to_means(a, sums);
#pragma unroll
    for (int p = 0; p < P; ++p)
      if (mine.at(p) < left) {
        A scale[V], dx[V];
        if (!Staged) forget_unpacked(kept(p)), forget_unpacked(kept(P + p));
        parameters.scale(mine.first, mine.at(p), scale);
        values_at(kept(p), kept(P + p), mean, rstd, mine.at(p), scale).dx(scale, sums, rstd, dx);
        store_dx(a, start + mine.at(p), dx);
      }
  }

  // The groups add up their sums one after the other in shared memory, from where neighbouring threads write
  // neighbouring columns.
  const auto combine = [&](A(&sums)[P][V], A* partials) {
    if (!partials) return;
    for (int g = 0; g < groups; ++g) {
      __syncthreads();
      if (g != group) continue;
#pragma unroll
      for (int p = 0; p < P; ++p)
        if (mine.at(p) < int(a.columns) - mine.first) {
          if (g > 0) {
            A before[V];
            load_values(shared + mine.first + mine.at(p), before);
#pragma unroll
            for (int i = 0; i < V; ++i) sums[p][i] += before[i];
          }
          store_values(shared + mine.first + mine.at(p), sums[p]);
        }
    }
    __syncthreads();
    partials += blockIdx.x * a.columns;
    constexpr int N = kAccess<A, V>;
    for (int c = threadIdx.x * N; c < a.columns; c += blockDim.x * N) store(partials + c, load<A, N>(shared + c));
  };
  combine(dweight, a.dweight);
  if (Bias) combine(dbias, a.dbias);
}

// A block a row.
template <class T, int V>
__global__ void __launch_bounds__(kMaxRowThreads) dx_looped(const Backward<T> a) {
  using A = acc_t<T>;
  __shared__ typename RowSum<A>::Slots slots;
  RowSum<A> row_sum(slots, a.threads);
  const int64_t row = blockIdx.x, start = row * a.columns, step = int64_t(a.threads) * V;
  const A mean = a.mean_of(row), rstd = a.rstd_of(row);
  const auto for_each_pack = [&](auto body) {
    for (int64_t c = threadIdx.x * V; c < a.columns; c += step) {
      A scale[V], shift[V];
      a.parameters.scale(c, 0, scale);
      Values<T, V> values(load<T, V>(a.dy + start + c), load<T, V>(a.x + start + c));
      if (a.from_y) {
        a.parameters.shift(c, 0, shift);
        values.undo(scale, shift);
      } else {
        values.normalise(mean, rstd);
      }
      body(c, values, scale);
    }
  };
  A sums[2] = {0, 0};
  for_each_pack([&](int64_t, const auto& values, const auto& scale) { values.add_to_sums(scale, sums); });
  row_sum(sums);
  sums_to_means(a, sums);
  for_each_pack([&](int64_t c, const auto& values, const auto& scale) {
    A dx[V];
    values.dx(scale, sums, rstd, dx);
    store_dx(a, start + c, dx);
  });
}

// A block a tile of columns, blockDim.x packs wide, in the rows of one partial.
template <class T, int V>
__global__ void __launch_bounds__(kMaxRowThreads) partials_looped(const Backward<T> a, int64_t tiles) {
  using A = acc_t<T>;
  const int64_t partial = blockIdx.x / tiles, c = (blockIdx.x % tiles * blockDim.x + threadIdx.x) * V;
  if (c >= a.columns) return;
  A scale[V], shift[V], dweight[V] = {}, dbias[V] = {};
  a.parameters.scale(c, 0, scale);
  a.parameters.shift(c, 0, shift);
  const int64_t begin = partial * a.rows_in_partial, end = min(begin + a.rows_in_partial, a.rows);
#pragma unroll 2
  for (int64_t row = begin; row < end; ++row) {
    Values<T, V> values(load<T, V>(a.dy + row * a.columns + c), load<T, V>(a.x + row * a.columns + c));
    if (a.from_y)
      values.undo(scale, shift);
    else
      values.normalise(a.mean_of(row), a.rstd_of(row));
#pragma unroll
    for (int i = 0; i < V; ++i) {
      dweight[i] += values.dy[i] * values.x_hat[i];
      dbias[i] += values.dy[i];
    }
  }
  if (a.dweight) store_values(a.dweight + partial * a.columns + c, dweight);
  if (a.dbias) store_values(a.dbias + partial * a.columns + c, dbias);
}

constexpr int kFinaliseRows = 16;

// out[column] = the sum of its partials; a block does 32 columns, in kFinaliseRows strands.
template <class A, class W>
__global__ void __launch_bounds__(32 * kFinaliseRows)
    finalise(const A* partials, W* out, int64_t count, int64_t columns) {
  __shared__ A sums[kFinaliseRows][32];
  const int lane = threadIdx.x % 32, strand = threadIdx.x / 32;
  const int64_t column = int64_t(blockIdx.x) * 32 + lane;
  A sum = 0;
  if (column < columns)
    for (int64_t p = strand; p < count; p += kFinaliseRows)
      sum += load<A, 1>(partials + p * columns + column).value[0];
  sums[strand][lane] = sum;
  __syncthreads();
  if (strand > 0 || column >= columns) return;
#pragma unroll
  for (int s = 1; s < kFinaliseRows; ++s) sum += sums[s][lane];
  const A total[1] = {sum};
  store(out + column, pack<W, 1>(total));
}

template <class T, bool Bias>
void run_backward(Backward<T> a, cudaStream_t stream) {
  const bool wide = rows_are_aligned(a.columns, sizeof(T),
                                     {a.dy, a.dsummed, a.x, a.parameters.weight, a.parameters.bias});
  const RowPlan plan = row_plan(a.columns, wide, kWidest<T>, sizeof(T) == 8,
                                wide ? kBackwardThreads<T, kWidest<T>> : kBackwardThreads<T, 1>);
  a.threads = plan.threads;
  const int64_t partials = (a.rows + a.rows_in_partial - 1) / a.rows_in_partial;
  for_plan<T>(plan, [&](auto access, auto packs) {
    constexpr int V = decltype(access)::value, P = decltype(packs)::value;
    if constexpr (P == 0) {
      const int64_t tiles = (a.columns + a.threads * V - 1) / (a.threads * V);
      if (a.dx) launch(dx_looped<T, V>, a.rows, a.threads, 0, stream, a);
      if (a.dweight || a.dbias) launch(partials_looped<T, V>, partials * tiles, a.threads, 0, stream, a, tiles);
    } else {
      if constexpr (Bias && sizeof(T) == 2 && V > 1 && P * V == 32) {
        if (a.threads > 256)
          return launch(backward_in_registers<T, V, P, Bias, true>, partials, a.threads,
                        2 * P * a.threads * sizeof(Pack<T, V>), stream, a);
      }
      const int groups = std::max(256 / a.threads, 1);
      const int64_t sums = a.columns * sizeof(acc_t<T>), bytes = sums * (a.from_y ? 2 : 1);
      a.shared_parameters = bytes <= kSharedBytes;
      launch(backward_in_registers<T, V, P, Bias, false>, partials, groups * a.threads,
             a.shared_parameters ? bytes : sums, stream, a);
    }
  });
}

}  // namespace
}  // namespace memkern
