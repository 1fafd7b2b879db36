// Cross-entropy on CUDA, forward: each row is read once.
#pragma once

#include "cross_entropy.cuh"

namespace memkern {
namespace {

template <class T>
struct Forward {
  Rows<const T> logits;
  Target<T> target;
  acc_t<T> *loss, *lse;
  int64_t rows;
  int classes;
  acc_t<T> z_loss, softcap;
  int threads;  // a row
};

template <class T, int V, bool By_class>
__global__ void __launch_bounds__(kRowThreads<T, By_class>, 2) forward_kernel(const Forward<T> a) {
  using A = acc_t<T>;
  __shared__ typename RowSum<A>::Slots slots;
  RowSum<A> row_sum(slots, a.threads);
  const int thread = threadIdx.x % a.threads;
  const int64_t row = int64_t(blockIdx.x) * (blockDim.x / a.threads) + threadIdx.x / a.threads;
  const int classes = row < a.rows ? a.classes : 0;
  const T* logits = a.logits[row];
  const bool finishes = row < a.rows && thread == 0;

  RowTarget<T> target{};
  if (By_class ? row < a.rows : finishes) target = a.target.of(row, classes);
  A index_logit[1] = {0};
  if (!By_class && finishes && !target.invalid) load_values(logits + target.index, index_logit);

  CrossEntropySums<A> sums;
  Walk<V>(logits, classes, thread, a.threads).template batches<By_class ? 1 : 4>([&](auto batch) {
    constexpr int N = batch.N, P = batch.P;
    Pack<T, N> packs[P];
    batch.load(logits, packs);
    A share[P][N];
    if (By_class)
#pragma unroll
      for (int p = 0; p < P; ++p)
        if (batch.has(p)) target.at(batch.at(p), share[p]);
    A most = -A(INFINITY);
#pragma unroll
    for (int p = 0; p < P; ++p) {
      if (!batch.has(p)) continue;
      A x[N];
      unpack(packs[p], x);
#pragma unroll
      for (int i = 0; i < N; ++i) most = larger(most, x[i]);
    }
    sums.raise(a.softcap != 0 ? capped(most, a.softcap).value : most);
    const A shift = shift_of(sums.max);
#pragma unroll
    for (int p = 0; p < P; ++p) {
      if (!batch.has(p)) continue;
      A s[N];
      forget_unpacked(packs[p]);
      unpack(packs[p], s);
      if (a.softcap != 0)
#pragma unroll
        for (int i = 0; i < N; ++i) s[i] = capped(s[i], a.softcap).value;
#pragma unroll
      for (int i = 0; i < N; ++i) sums.add_exp(exp_term<T>(s[i] - shift));
      if (By_class || a.target.shares.even != 0)
#pragma unroll
        for (int i = 0; i < N; ++i) sums.add_share(By_class ? share[p][i] : a.target.shares.even, s[i]);
    }
  });

  A max[1] = {sums.max};
  row_sum.max(max);
  sums.raise(max[0]);
  A totals[4] = {sums.ones, sums.rest, sums.weight, sums.distance};
  row_sum(totals);
  if (!finishes) return;
  sums.ones = totals[0];
  sums.rest = totals[1];
  sums.weight = totals[2];
  sums.distance = totals[3];
  if (!By_class) {
    if (a.softcap != 0) index_logit[0] = capped(index_logit[0], a.softcap).value;
    sums.add_share(target.index_weight() * a.target.shares.sharp, index_logit[0]);
  }
  A loss = a.classes > 0 ? sums.loss(a.z_loss) : 0;
  if (target.invalid) loss = NAN;
  if (target.ignored) loss = 0;
  store_one(a.loss + row, loss);
  store_one(a.lse + row, sums.lse());
}

template <class T>
void run_forward(Forward<T> a, cudaStream_t stream) {
  if (a.rows == 0) return;
  const bool by_class = a.target.is_by_class();
  const RowShare share = row_share(a.classes, a.target.is_alike(a.logits), kWidest<T>,
                                   by_class ? kRowThreads<T, true> : kRowThreads<T, false>);
  a.threads = share.threads;
  for_access<T>(share.wide, [&](auto access) {
    constexpr int V = decltype(access)::value;
    launch(by_class ? forward_kernel<T, V, true> : forward_kernel<T, V, false>, share.blocks(a.rows), share.block(), 0,
           stream, a);
  });
}

}  // namespace
}  // namespace memkern
