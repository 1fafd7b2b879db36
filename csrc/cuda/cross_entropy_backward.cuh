// Cross-entropy on CUDA, backward: logits are read once and their gradient written once, over them where asked.
#pragma once

#include "cross_entropy.cuh"

namespace memkern {
namespace {

template <class T>
struct Backward {
  Rows<const T> logits;
  Target<T> target;
  const acc_t<T> *dloss, *lse;
  Rows<T> dlogits;  // may be the logits
  int64_t rows;
  int classes;
  acc_t<T> z_loss, softcap;
  int threads;  // a row
  int room;     // for the shares of a row in shared memory; 0: they are looked up twice
};

// Shares before and after the first pack of a row have their places around those of packs, which are aligned.
constexpr int kShareEdge = 16;

// values[at]: a register, which cannot be indexed.
template <int N, class A>
__device__ __forceinline__ A one_of(const A (&values)[N], int at) {
  A value = values[0];
#pragma unroll
  for (int i = 1; i < N; ++i) value = i == at ? values[i] : value;
  return value;
}

template <class T, int V, bool By_class>
__global__ void __launch_bounds__(kRowThreads<T, By_class>, 2) backward_kernel(const Backward<T> a) {
  using A = acc_t<T>;
  __shared__ typename RowSum<A>::Slots slots;
  RowSum<A> row_sum(slots, a.threads);
  const int thread = threadIdx.x % a.threads, group = threadIdx.x / a.threads;
  const int64_t row = int64_t(blockIdx.x) * (blockDim.x / a.threads) + group;
  const int classes = row < a.rows ? a.classes : 0;
  const T* logits = a.logits[row];
  T* dlogits = a.dlogits[row];
  const Walk<V> walk(logits, classes, thread, a.threads);

  RowTarget<T> target{};
  A dloss[1] = {0}, lse[1] = {0};
  if (row < a.rows) {
    target = a.target.of(row, classes);
    load_values(a.dloss + row, dloss);
    load_values(a.lse + row, lse);
  }
  const Shares<A>& shares = a.target.shares;
  const A factor = target.invalid ? A(NAN) : dloss[0];

  A* held = By_class && a.room > 0 ? dynamic_shared<A>() + group * a.room + kShareEdge - walk.head : nullptr;
  A weight[1] = {0}, index_share = 0;
  if (By_class) {
    walk.template batches<1>([&](auto batch) {
#pragma unroll
      for (int p = 0; p < batch.P; ++p) {
        if (!batch.has(p)) continue;
        A share[batch.N];
        target.at(batch.at(p), share);
#pragma unroll
        for (const A one : share) weight[0] += one;
        if (held) store_values(held + batch.at(p), share);
      }
    });
    row_sum(weight);
  } else {
    index_share = target.index_weight() * shares.sharp;
    weight[0] = index_share + shares.even * A(a.classes);
    index_share += shares.even;
  }
  const A total = weight[0] + 2 * a.z_loss * lse[0];

  // values: logits, of which grad(i, s) is d loss / d s, and then their gradients.
  const auto to_gradients = [&](auto& values, auto grad) {
    constexpr int N = std::extent_v<std::remove_reference_t<decltype(values)>>;
    if (a.softcap == 0) {
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] = factor * grad(i, values[i]);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const Capped<A> s = capped(values[i], a.softcap);
        values[i] = factor * s.slope * grad(i, s.value);
      }
    }
  };
  walk.template batches<By_class ? 1 : 2>([&](auto batch) {
    constexpr int N = batch.N, P = batch.P;
    Pack<T, N> packs[P];
    if (!target.ignored) batch.load(logits, packs);
#pragma unroll
    for (int p = 0; p < P; ++p) {
      if (!batch.has(p)) continue;
      A g[N] = {};
      if (!target.ignored) {
        unpack(packs[p], g);
        if (By_class) {
          A share[N];
          if (held)
            load_values(held + batch.at(p), share);
          else
            target.at(batch.at(p), share);
          to_gradients(g, [&](int i, A s) { return cross_entropy_grad<T>(s, lse[0], share[i], total); });
        } else {
          const int64_t at = target.index - batch.at(p);
          const bool has_index = at >= 0 && at < N;
          A of_index[1] = {0};
          if (has_index) {
            of_index[0] = one_of(g, static_cast<int>(at));
            to_gradients(of_index, [&](int, A s) { return cross_entropy_grad<T>(s, lse[0], index_share, total); });
          }
          to_gradients(g, [&](int, A s) { return probability<T>(s, lse[0]) * total - shares.even; });
          if (has_index)
#pragma unroll
            for (int i = 0; i < N; ++i) g[i] = i == static_cast<int>(at) ? of_index[0] : g[i];
        }
      }
      store(dlogits + batch.at(p), pack<T, N>(g));
    }
  });
}

template <class T>
void run_backward(Backward<T> a, cudaStream_t stream) {
  if (a.rows == 0 || a.classes == 0) return;
  const bool wide = a.target.is_alike(a.logits) && alike(a.logits, a.dlogits, kWidest<T>);
  const bool by_class = a.target.is_by_class();
  const RowShare share = row_share(a.classes, wide, kWidest<T>,
                                   by_class ? kRowThreads<T, true> : kRowThreads<T, false>);
  a.threads = share.threads;
  a.room = (a.classes + kShareEdge + 3) / 4 * 4;
  int64_t bytes = by_class ? int64_t{share.groups} * a.room * int64_t{sizeof(acc_t<T>)} : 0;
  if (bytes > kSharedBytes) a.room = bytes = 0;
  for_access<T>(share.wide, [&](auto access) {
    constexpr int V = decltype(access)::value;
    launch(by_class ? backward_kernel<T, V, true> : backward_kernel<T, V, false>, share.blocks(a.rows), share.block(),
           bytes, stream, a);
  });
}

}  // namespace
}  // namespace memkern
