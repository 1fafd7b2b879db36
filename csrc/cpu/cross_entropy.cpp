// Cross-entropy and distillation on the CPU; checks and formulas are in ../cross_entropy.h. A row is widened into a
// buffer (and capped there), exponentials go to another one: loops that the compiler vectorises, sums apart from them.
#include "../cross_entropy.h"

#include <numeric>
#include <stdexcept>

#include "rows.h"

namespace memkern {
namespace {

constexpr int64_t kGrain = 16384;  // elements worth a thread of their own

template <class A>
struct Largest {
  A lanes[kLanes<A>], total = -A(INFINITY);

  // NaN is passed over: it shows in the sum of the exponentials.
  MK_HD explicit Largest(const A* from, int64_t n) {
    for (A& lane : lanes) lane = total;
    int64_t i = 0;
    for (; i + kLanes<A> <= n; i += kLanes<A>)
      for (int64_t j = 0; j < kLanes<A>; ++j) lanes[j] = larger(from[i + j], lanes[j]);
    for (; i < n; ++i) total = larger(from[i], total);
    for (A lane : lanes) total = larger(lane, total);
  }
};

template <class A>
MK_HD A sum_of(const A* from, int64_t n) {
  Sum<A> sum;
  for_lanes<A>(n, [&](int64_t i, auto value, int strand) MEMKERN_INLINED {
    load(from + i, &value);
    sum.add(strand, value);
  }, sum);
  return sum.total;
}

// Room for the rows that a thread works on.
template <class A>
struct Buffers {
  explicit Buffers(int64_t n) : s(n), a(n), b(n) {}
  std::vector<A> s, a, b;
};

template <class T, class Q>
struct CrossEntropy {
  using A = acc_t<T>;
  const T* logits;
  const int64_t* classes;   // null where there are
  const Q* probabilities;
  const float* weight;      // null: 1
  int64_t n, ignore_index;
  Shares<A> part;
  A weight_sum, z_loss, softcap;

  MK_HD A weight_of(int64_t i) const { return weight ? A(weight[i]) : A(1); }
  MK_HD bool ignored(int64_t row) const { return classes && classes[row] == ignore_index; }
  // The row's logits after the cap.
  MK_HD void load_row(int64_t row, A* s) const {
    const A cap = softcap;  // not a member that a store may change
    for (int64_t i = 0; i < n; ++i) s[i] = widen(logits[row * n + i]);
    if (cap != 0)
      for (int64_t i = 0; i < n; ++i) s[i] = capped(s[i], cap).value;
  }
  // And factor times what the cap makes of a small change in each of them.
  MK_HD void load_row(int64_t row, A* s, A* slope, A factor) const {
    const A cap = softcap;
    for (int64_t i = 0; i < n; ++i) s[i] = widen(logits[row * n + i]);
    if (cap == 0) {
      for (int64_t i = 0; i < n; ++i) slope[i] = factor;
      return;
    }
    for (int64_t i = 0; i < n; ++i) {
      const Capped<A> c = capped(s[i], cap);
      s[i] = c.value;
      slope[i] = factor * c.slope;
    }
  }
  // The share of every class but that of an index, which has its `sharp` part still to come.
  MK_HD void load_shares(int64_t row, A* share) const {
    const Shares<A> of = part;
    if (classes)
      for (int64_t i = 0; i < n; ++i) share[i] = of.even;
    else
      for (int64_t i = 0; i < n; ++i) share[i] = of.of(A(1), A(widen(probabilities[row * n + i])));
    if (weight)
      for (int64_t i = 0; i < n; ++i) share[i] *= weight[i];
  }
  MK_HD A class_share(int64_t row) const { return weight_of(classes[row]) * part.sharp; }
};

template <class T, class Q>
MEMKERN_CLONES void losses(const CrossEntropy<T, Q>& a, acc_t<T>* loss, acc_t<T>* lse, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  const int64_t n = a.n;
  Buffers<A> room(n);
  A *s = room.s.data(), *e = room.a.data(), *share = room.b.data();
  for (int64_t row = begin; row < end; ++row) {
    a.load_row(row, s);
    CrossEntropySums<A> sums;
    sums.max = Largest<A>(s, n).total;
    const A shift = shift_of(sums.max);
    int64_t ones = 0;
    for (int64_t i = 0; i < n; ++i) {
      ones += s[i] == shift;
      e[i] = exp_minus(shift - s[i]).value - A(s[i] == shift);
    }
    sums.ones = A(ones);
    sums.rest = sum_of(e, n);
    if (!a.classes || a.part.even != 0) {
      a.load_shares(row, share);
      for (int64_t i = 0; i < n; ++i) e[i] = share[i] != 0 ? share[i] * (shift - s[i]) : A(0);
      sums.weight = sum_of(share, n);
      sums.distance = sum_of(e, n);
    }
    if (a.classes && !a.ignored(row)) sums.add_share(a.class_share(row), s[a.classes[row]]);
    lse[row] = sums.lse();
    loss[row] = a.ignored(row) || n == 0 ? A(0) : sums.loss(a.z_loss);
  }
}

// dlogits may be the logits.
template <class T, class Q>
MEMKERN_CLONES void gradients(const CrossEntropy<T, Q>& a, const acc_t<T>* dloss, const acc_t<T>* lses, T* dlogits,
                              int64_t begin, int64_t end) {
  using A = acc_t<T>;
  const int64_t n = a.n;
  Buffers<A> room(n);
  A *s = room.s.data(), *slope = room.a.data(), *share = room.b.data();
  for (int64_t row = begin; row < end; ++row) {
    T* to = dlogits + row * n;
    if (a.ignored(row)) {
      for (int64_t i = 0; i < n; ++i) store(to + i, A(0));
      continue;
    }
    a.load_row(row, s, slope, dloss[row]);
    const A lse = lses[row], z = 2 * a.z_loss * lse;
    if (!a.classes) {
      a.load_shares(row, share);
      const A total = sum_of(share, n) + z;
      for (int64_t i = 0; i < n; ++i) store(to + i, slope[i] * cross_entropy_grad<T>(s[i], lse, share[i], total));
      continue;
    }
    const int64_t c = a.classes[row];
    const A sharp = a.class_share(row), total = sharp + a.part.even * a.weight_sum + z;
    if (a.part.even != 0) {
      a.load_shares(row, share);
      for (int64_t i = 0; i < n; ++i) store(to + i, slope[i] * (probability<T>(s[i], lse) * total - share[i]));
    } else {
      for (int64_t i = 0; i < n; ++i) store(to + i, slope[i] * (probability<T>(s[i], lse) * total));
    }
    store(to + c, slope[c] * cross_entropy_grad<T>(s[c], lse, sharp + a.part.even * a.weight_of(c), total));
  }
}

void check_in_range(const Tensor& target, int64_t classes, int64_t ignore_index) {
  const int64_t* from = const_data<int64_t>(target);
  for (int64_t row = 0; row < target.numel(); ++row) {
    if (from[row] == ignore_index || (0 <= from[row] && from[row] < classes)) continue;
    throw std::out_of_range("target: got " + std::to_string(from[row]) + " at row " + std::to_string(row) +
                            ", needs 0 to " + std::to_string(classes - 1) + ", or " + std::to_string(ignore_index));
  }
}

// Calls body with what all rows share, once everything is checked.
template <class Body>
void with_cross_entropy(const Tensor& given, const Tensor& given_target, const MaybeTensor& given_weight,
                        int64_t ignore_index, double label_smoothing, double z_loss, double softcap, Body body) {
  check_cross_entropy(given, given_target, given_weight, label_smoothing, z_loss, softcap);
  const Tensor logits = torch::stable::contiguous(given), target = torch::stable::contiguous(given_target);
  const Tensor weight = given_weight ? torch::stable::contiguous(*given_weight) : Tensor();
  const int64_t n = logits.size(1);
  const bool indices = !is_probabilities(target);
  if (indices) check_in_range(target, n, ignore_index);
  for_dtype(logits.scalar_type(), [&](auto type) {
    using T = decltype(type);
    using A = acc_t<T>;
    const float* weights = given_weight ? const_data<float>(weight) : nullptr;
    A weight_sum = A(n);
    if (weights) weight_sum = A(std::accumulate(weights, weights + n, 0.0));
    const auto call = [&](auto probabilities) {
      using Q = decltype(probabilities);
      body(CrossEntropy<T, Q>{const_data<T>(logits), indices ? const_data<int64_t>(target) : nullptr,
                              indices ? nullptr : const_data<Q>(target), weights, n, ignore_index,
                              shares<A>(label_smoothing, n), weight_sum, A(z_loss), A(softcap)});
    };
    if (indices || target.scalar_type() == logits.scalar_type())
      call(T{});
    else
      call(float{});
  });
}

template <class Body>
void for_rows(const Tensor& logits, Body body) {
  torch::stable::parallel_for(0, logits.size(0), std::max<int64_t>(1, kGrain / std::max<int64_t>(1, logits.size(1))),
                              body);
}

Tensor fresh_rows(const Tensor& logits) { return fresh(logits, {logits.size(0)}, statistics_dtype(logits)); }

std::tuple<Tensor, Tensor> cross_entropy_forward(const Tensor& logits, const Tensor& target, const MaybeTensor& weight,
                                                 int64_t ignore_index, double label_smoothing, double z_loss,
                                                 double softcap) {
  Tensor loss, lse;
  with_cross_entropy(logits, target, weight, ignore_index, label_smoothing, z_loss, softcap, [&](const auto& a) {
    using A = typename std::decay_t<decltype(a)>::A;
    loss = fresh_rows(logits);
    lse = fresh_rows(logits);
    A *to_loss = mutable_data<A>(loss), *to_lse = mutable_data<A>(lse);
    for_rows(logits, [&](int64_t begin, int64_t end) { losses(a, to_loss, to_lse, begin, end); });
  });
  return {loss, lse};
}

// Into dlogits, contiguous, which may be the logits.
void write_gradients(const Tensor& given_dloss, const Tensor& logits, const Tensor& given_lse, const Tensor& target,
                     const MaybeTensor& weight, int64_t ignore_index, double label_smoothing, double z_loss,
                     double softcap, Tensor& dlogits) {
  with_cross_entropy(logits, target, weight, ignore_index, label_smoothing, z_loss, softcap, [&](const auto& a) {
    using A = typename std::decay_t<decltype(a)>::A;
    using T = std::decay_t<decltype(*a.logits)>;
    const Tensor dloss = row_values(logits, given_dloss, "dloss"), lse = row_values(logits, given_lse, "lse");
    const A *from_dloss = const_data<A>(dloss), *from_lse = const_data<A>(lse);
    T* to = mutable_data<T>(dlogits);
    for_rows(logits, [&](int64_t begin, int64_t end) { gradients(a, from_dloss, from_lse, to, begin, end); });
  });
}

Tensor cross_entropy_backward(const Tensor& dloss, const Tensor& logits, const Tensor& lse, const Tensor& target,
                              const MaybeTensor& weight, int64_t ignore_index, double label_smoothing, double z_loss,
                              double softcap) {
  check_logits(logits);
  Tensor dlogits = fresh(logits, logits.sizes(), logits.scalar_type());
  write_gradients(dloss, logits, lse, target, weight, ignore_index, label_smoothing, z_loss, softcap, dlogits);
  return dlogits;
}

void cross_entropy_backward_(const Tensor& dloss, Tensor logits, const Tensor& lse, const Tensor& target,
                             const MaybeTensor& weight, int64_t ignore_index, double label_smoothing, double z_loss,
                             double softcap) {
  check_logits(logits);
  Tensor dlogits = torch::stable::contiguous(logits);
  write_gradients(dloss, dlogits, lse, target, weight, ignore_index, label_smoothing, z_loss, softcap, dlogits);
  if (!logits.is_contiguous()) copied_into(logits, dlogits);
}

template <class T>
struct Distillation {
  using A = acc_t<T>;
  const T *logits, *teacher;
  int64_t n;
  A inverse_temperature;
};

template <class T>
MEMKERN_CLONES void divergences(const Distillation<T>& a, acc_t<T>* loss, acc_t<T>* lse, acc_t<T>* teacher_lse,
                                int64_t begin, int64_t end) {
  using A = acc_t<T>;
  const int64_t n = a.n;
  const A inverse = a.inverse_temperature;
  Buffers<A> room(n), teacher_room(n);
  A *x = room.s.data(), *e = room.a.data(), *y = teacher_room.s.data(), *teacher_e = teacher_room.a.data(),
    *cross = room.b.data();
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t i = 0; i < n; ++i) x[i] = widen(a.logits[row * n + i]);
    for (int64_t i = 0; i < n; ++i) y[i] = widen(a.teacher[row * n + i]);
    DistillationSums<A> sums;
    sums.max = Largest<A>(x, n).total;
    sums.teacher_max = Largest<A>(y, n).total;
    const A shift = shift_of(sums.max), teacher_shift = shift_of(sums.teacher_max);
    for (int64_t i = 0; i < n; ++i) {
      const A d = (x[i] - shift) * inverse, teacher_d = (y[i] - teacher_shift) * inverse;
      e[i] = exp_minus(-d).value;
      teacher_e[i] = exp_minus(-teacher_d).value;
      // A NaN stays; a teacher's probability of 0 adds nothing.
      cross[i] = teacher_e[i] == 0 ? A(0) : teacher_e[i] * (teacher_d - d);
    }
    sums.sum = sum_of(e, n);
    sums.teacher_sum = sum_of(teacher_e, n);
    sums.cross = sum_of(cross, n);
    loss[row] = sums.loss();
    if (loss[row] < kSmallDivergence) {
      const DistillationTerms<A> terms(sums, inverse);
      for (int64_t i = 0; i < n; ++i) cross[i] = terms.of(x[i], e[i], y[i], teacher_e[i]);
      loss[row] = sum_of(cross, n) / sums.teacher_sum;
    }
    lse[row] = sums.lse(inverse);
    teacher_lse[row] = sums.teacher_lse(inverse);
  }
}

template <class T>
MEMKERN_CLONES void distillation_gradients(const Distillation<T>& a, const acc_t<T>* dloss, const acc_t<T>* lse,
                                           const acc_t<T>* teacher_lse, T* dlogits, int64_t begin, int64_t end) {
  using A = acc_t<T>;
  for (int64_t row = begin; row < end; ++row) {
    const A factor = dloss[row] * a.inverse_temperature, own = lse[row], teachers = teacher_lse[row];
    const T *x = a.logits + row * a.n, *y = a.teacher + row * a.n;
    T* to = dlogits + row * a.n;
    for (int64_t i = 0; i < a.n; ++i)
      store(to + i, factor * distillation_grad<T>(A(widen(x[i])), own, A(widen(y[i])), teachers,
                                                  a.inverse_temperature));
  }
}

// Calls body with what all rows share.
template <class Body>
void with_distillation(const Tensor& given, const Tensor& given_teacher, double temperature, Body body) {
  check_distillation(given, given_teacher, temperature);
  const Tensor logits = torch::stable::contiguous(given), teacher = torch::stable::contiguous(given_teacher);
  for_dtype(logits.scalar_type(), [&](auto type) {
    using T = decltype(type);
    body(Distillation<T>{const_data<T>(logits), const_data<T>(teacher), logits.size(1), acc_t<T>(1 / temperature)});
  });
}

std::tuple<Tensor, Tensor, Tensor> distillation_forward(const Tensor& logits, const Tensor& teacher,
                                                        double temperature) {
  Tensor loss, lse, teacher_lse;
  with_distillation(logits, teacher, temperature, [&](const auto& a) {
    using A = typename std::decay_t<decltype(a)>::A;
    loss = fresh_rows(logits);
    lse = fresh_rows(logits);
    teacher_lse = fresh_rows(logits);
    A *to_loss = mutable_data<A>(loss), *to_lse = mutable_data<A>(lse), *to_teacher = mutable_data<A>(teacher_lse);
    for_rows(logits,
             [&](int64_t begin, int64_t end) { divergences(a, to_loss, to_lse, to_teacher, begin, end); });
  });
  return {loss, lse, teacher_lse};
}

Tensor distillation_backward(const Tensor& given_dloss, const Tensor& logits, const Tensor& given_lse,
                             const Tensor& teacher, const Tensor& given_teacher_lse, double temperature) {
  Tensor dlogits;
  with_distillation(logits, teacher, temperature, [&](const auto& a) {
    using A = typename std::decay_t<decltype(a)>::A;
    using T = std::decay_t<decltype(*a.logits)>;
    const Tensor dloss = row_values(logits, given_dloss, "dloss"), lse = row_values(logits, given_lse, "lse"),
                 teacher_lse = row_values(logits, given_teacher_lse, "teacher_lse");
    dlogits = fresh(logits, logits.sizes(), logits.scalar_type());
    const A *from_dloss = const_data<A>(dloss), *from_lse = const_data<A>(lse),
            *from_teacher_lse = const_data<A>(teacher_lse);
    T* to = mutable_data<T>(dlogits);
    for_rows(logits, [&](int64_t begin, int64_t end) {
      distillation_gradients(a, from_dloss, from_lse, from_teacher_lse, to, begin, end);
    });
  });
  return dlogits;
}

}  // namespace
}  // namespace memkern

STABLE_TORCH_LIBRARY_IMPL(memkern_cpu, CPU, m) {
  m.impl("cross_entropy_forward", TORCH_BOX(&memkern::cross_entropy_forward));
  m.impl("cross_entropy_backward", TORCH_BOX(&memkern::cross_entropy_backward));
  m.impl("cross_entropy_backward_", TORCH_BOX(&memkern::cross_entropy_backward_));
  m.impl("distillation_forward", TORCH_BOX(&memkern::distillation_forward));
  m.impl("distillation_backward", TORCH_BOX(&memkern::distillation_backward));
}
