// Distillation on CUDA: forward reads both rows once, and again, mostly from the cache, where they are nearly alike;
// backward reads them once and writes the gradient once.
#pragma once

#include "cross_entropy.cuh"

namespace memkern {
namespace {

template <class T>
struct Distillation {
  Rows<const T> logits, teacher;
  acc_t<T> *loss, *lse, *teacher_lse;                 // written by forward
  const acc_t<T> *dloss, *saved_lse, *saved_teacher;  // read by backward
  Rows<T> dlogits;
  int64_t rows;
  int classes;
  acc_t<T> inverse_temperature;
  int threads;  // a row
};

template <class T, int V>
__global__ void __launch_bounds__(kRowThreads<T>, 2) distillation_forward_kernel(const Distillation<T> a) {
  using A = acc_t<T>;
  __shared__ typename RowSum<A>::Slots slots;
  RowSum<A> row_sum(slots, a.threads);
  const int thread = threadIdx.x % a.threads;
  const int64_t row = int64_t(blockIdx.x) * (blockDim.x / a.threads) + threadIdx.x / a.threads;
  const int classes = row < a.rows ? a.classes : 0;
  const T *logits = a.logits[row], *teacher = a.teacher[row];
  const A inverse = a.inverse_temperature;

  DistillationSums<A> sums;
  Walk<V>(logits, classes, thread, a.threads).template batches<2>([&](auto batch) {
    constexpr int N = batch.N, P = batch.P;
    Pack<T, N> student_packs[P], teacher_packs[P];
    batch.load(logits, student_packs);
    batch.load(teacher, teacher_packs);
    A most = -A(INFINITY), teacher_most = -A(INFINITY);
#pragma unroll
    for (int p = 0; p < P; ++p) {
      if (!batch.has(p)) continue;
      A x[N], y[N];
      unpack(student_packs[p], x);
      unpack(teacher_packs[p], y);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        most = larger(most, x[i]);
        teacher_most = larger(teacher_most, y[i]);
      }
    }
    sums.raise(most, teacher_most, inverse);
    const A shift = shift_of(sums.max), teacher_shift = shift_of(sums.teacher_max);
#pragma unroll
    for (int p = 0; p < P; ++p) {
      if (!batch.has(p)) continue;
      A x[N], y[N];
      forget_unpacked(student_packs[p]);
      forget_unpacked(teacher_packs[p]);
      unpack(student_packs[p], x);
      unpack(teacher_packs[p], y);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const A d = (x[i] - shift) * inverse, teacher_d = (y[i] - teacher_shift) * inverse;
        sums.add(d, exp_term<T>(d), teacher_d, exp_term<T>(teacher_d));
      }
    }
  });

  A max[2] = {sums.max, sums.teacher_max};
  row_sum.max(max);
  sums.raise(max[0], max[1], inverse);
  A totals[3] = {sums.sum, sums.teacher_sum, sums.cross};
  row_sum(totals);
  sums.sum = totals[0];
  sums.teacher_sum = totals[1];
  sums.cross = totals[2];
  A loss = sums.loss();
  const bool small = row < a.rows && loss < kSmallDivergence;  // NaN is not
  if (__syncthreads_or(small)) {
    const DistillationTerms<A> terms(sums, inverse);
    A terms_sum[1] = {0};
    Walk<V>(logits, small ? classes : 0, thread, a.threads).template batches<1>([&](auto batch) {
      constexpr int N = batch.N, P = batch.P;
      Pack<T, N> student_packs[P], teacher_packs[P];
      batch.load(logits, student_packs);
      batch.load(teacher, teacher_packs);
#pragma unroll
      for (int p = 0; p < P; ++p) {
        if (!batch.has(p)) continue;
        A x[N], y[N];
        unpack(student_packs[p], x);
        unpack(teacher_packs[p], y);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const A e = exp_term<T>((x[i] - sums.max) * inverse);
          const A teacher_e = exp_term<T>((y[i] - sums.teacher_max) * inverse);
          terms_sum[0] += terms.of(x[i], e, y[i], teacher_e);
        }
      }
    });
    row_sum(terms_sum);
    if (small) loss = terms_sum[0] / sums.teacher_sum;
  }
  if (row >= a.rows || thread != 0) return;
  store_one(a.loss + row, loss);
  store_one(a.lse + row, sums.lse(inverse));
  store_one(a.teacher_lse + row, sums.teacher_lse(inverse));
}

template <class T, int V>
__global__ void __launch_bounds__(kRowThreads<T>, 2) distillation_backward_kernel(const Distillation<T> a) {
  using A = acc_t<T>;
  const int64_t row = int64_t(blockIdx.x) * (blockDim.x / a.threads) + threadIdx.x / a.threads;
  if (row >= a.rows) return;
  const T *logits = a.logits[row], *teacher = a.teacher[row];
  T* dlogits = a.dlogits[row];
  A dloss[1], lse[1], teacher_lse[1];
  load_values(a.dloss + row, dloss);
  load_values(a.saved_lse + row, lse);
  load_values(a.saved_teacher + row, teacher_lse);
  const A factor = dloss[0] * a.inverse_temperature;
  Walk<V>(logits, a.classes, threadIdx.x % a.threads, a.threads).template batches<1>([&](auto batch) {
    constexpr int N = batch.N, P = batch.P;
    Pack<T, N> student_packs[P], teacher_packs[P];
    batch.load(logits, student_packs);
    batch.load(teacher, teacher_packs);
#pragma unroll
    for (int p = 0; p < P; ++p) {
      if (!batch.has(p)) continue;
      A x[N], y[N];
      unpack(student_packs[p], x);
      unpack(teacher_packs[p], y);
#pragma unroll
      for (int i = 0; i < N; ++i)
        x[i] = factor * distillation_grad<T>(x[i], lse[0], y[i], teacher_lse[0], a.inverse_temperature);
      store(dlogits + batch.at(p), pack<T, N>(x));
    }
  });
}

template <class T>
void run_distillation(Distillation<T> a, bool forward, cudaStream_t stream) {
  if (a.rows == 0) return;
  const bool wide = alike(a.logits, a.teacher, kWidest<T>) && alike(a.logits, a.dlogits, kWidest<T>);
  const RowShare share = row_share(a.classes, wide, kWidest<T>, kRowThreads<T>);
  a.threads = share.threads;
  for_access<T>(share.wide, [&](auto access) {
    constexpr int V = decltype(access)::value;
    launch(forward ? distillation_forward_kernel<T, V> : distillation_backward_kernel<T, V>, share.blocks(a.rows),
           share.block(), 0, stream, a);
  });
}

}  // namespace
}  // namespace memkern
