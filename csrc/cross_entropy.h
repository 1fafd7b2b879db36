// What cross-entropy and distillation check, and their formulas, on the CPU and on CUDA. Schemas: memkern/ops.py.
//
// s: the logits of a row, after the soft-cap. share_c: class c's weight times its part of the target, label smoothing
// included; W = sum_c share_c.
//   loss = sum_c share_c (lse - s_c) + z_loss lse^2
//        = sum_c share_c (max - s_c) + W log sum_c exp(s_c - max) + z_loss lse^2
// where the second form has no term below 0, so that nothing cancels. With p_c = exp(s_c - lse),
//   d loss / d s_c = p_c (W + 2 z_loss lse) - share_c = share_c (p_c - 1) + p_c (W + 2 z_loss lse - share_c)
// where the second form, with p_c - 1 from expm1, keeps its precision at p_c near 1.
#pragma once

#include "softmax.h"

namespace memkern {

// ---- arguments ------------------------------------------------------------

inline bool is_floating(const Tensor& x) {
  const ScalarType dtype = x.scalar_type();
  return dtype == ScalarType::Half || dtype == ScalarType::BFloat16 || dtype == ScalarType::Float ||
         dtype == ScalarType::Double;
}

inline void check_logits(const Tensor& logits) {
  STD_TORCH_CHECK(logits.dim() == 2, "logits: got ", logits.dim(), " dimensions, needs (rows, classes)");
  STD_TORCH_CHECK(is_floating(logits), "logits: needs float16, bfloat16, float32 or float64");
}

// value: the shape of logits, on their device.
inline void check_classes(const Tensor& logits, const Tensor& value, const char* name) {
  STD_TORCH_CHECK(same_shape(value, logits) && on_one_device(value, logits), name,
                  ": needs the shape and device of logits, (", logits.size(0), ", ", logits.size(1), ")");
}

// Whether target holds probabilities, not the index of a class.
inline bool is_probabilities(const Tensor& target) { return target.scalar_type() != ScalarType::Long; }

inline void check_cross_entropy(const Tensor& logits, const Tensor& target, const MaybeTensor& weight,
                                double label_smoothing, double z_loss, double softcap) {
  check_logits(logits);
  if (is_probabilities(target)) {
    check_classes(logits, target, "target");
    STD_TORCH_CHECK(target.scalar_type() == logits.scalar_type() || target.scalar_type() == ScalarType::Float,
                    "target: needs int64 indices, or probabilities in float32 or the dtype of logits");
  } else {
    STD_TORCH_CHECK(target.dim() == 1 && target.size(0) == logits.size(0) && on_one_device(target, logits),
                    "target: needs ", logits.size(0), " indices on the device of logits, one a row");
  }
  STD_TORCH_CHECK(!weight || (weight->numel() == logits.size(1) && weight->scalar_type() == ScalarType::Float &&
                              on_one_device(*weight, logits)),
                  "weight: needs ", logits.size(1), " elements in float32 on the device of logits");
  STD_TORCH_CHECK(label_smoothing >= 0 && label_smoothing <= 1, "label_smoothing: got ", label_smoothing,
                  ", needs 0 to 1");
  STD_TORCH_CHECK(z_loss >= 0, "z_loss: got ", z_loss, ", needs at least 0");
  STD_TORCH_CHECK(softcap >= 0, "softcap: got ", softcap, ", needs at least 0 (0 is none)");
}

inline void check_distillation(const Tensor& logits, const Tensor& teacher, double temperature) {
  check_logits(logits);
  check_classes(logits, teacher, "teacher");
  STD_TORCH_CHECK(teacher.scalar_type() == logits.scalar_type(), "teacher: needs the dtype of logits");
  STD_TORCH_CHECK(temperature > 0, "temperature: got ", temperature, ", needs more than 0");
}

// A number a row, in the dtype that logits are computed in.
inline Tensor row_values(const Tensor& logits, const Tensor& value, const char* name) {
  STD_TORCH_CHECK(value.dim() == 1 && value.size(0) == logits.size(0) &&
                      value.scalar_type() == statistics_dtype(logits) && on_one_device(value, logits),
                  name, ": needs ", logits.size(0), " elements of the dtype that logits are computed in, one a row");
  return torch::stable::contiguous(value);
}

// ---- exponentials ---------------------------------------------------------

template <class A>
struct Exponential {
  A value, less_one;
};

// exp(-(v + rest)), v > -2; rest is what v lacks by its rounding. Both results within 2 ulp.
MK_HD Exponential<float> exp_minus(float v, float rest = 0) {
  const bool past = v > 119.0f;  // exp(-119) is 0 in fp32
  const float near = past ? 119.0f : v;
  const math::Exp e = math::exp64(near, near, past ? 0.0f : rest);
  const float scale = e.scale * 0x1p-64f;
  return {scale + scale * e.c, (scale - 1.0f) + scale * e.c};
}
MK_HD Exponential<double> exp_minus(double v) { return {std::exp(-v), std::expm1(-v)}; }

// exp(s - lse). For T of 16 bit the rounding of lse - s does no harm; else it is made up for, by TwoSum.
template <class T>
MK_HD Exponential<float> exp_of_difference(float s, float lse) {
  const float v = lse - s;
  if (sizeof(T) == 2) return exp_minus(v);
  const float minus_s = v - lse;
  return exp_minus(v, (lse - (v - minus_s)) + (-s - minus_s));
}
template <class T>
MK_HD Exponential<double> exp_of_difference(double s, double lse) {
  return exp_minus(lse - s);
}

// exp(s - lse) for results of type T; quicker for 16 bit, relative error below 2^-17 there.
template <class T>
MK_HD float probability(float s, float lse) {
  if (sizeof(T) != 2) return exp_of_difference<T>(s, lse).value;
  const float y = (s - lse) * math::kLog2e + 32.0f;
  return math::exp2_narrow(y < -126.0f ? -126.0f : y) * 0x1p-32f;
}
template <class T>
MK_HD double probability(double s, double lse) {
  return std::exp(s - lse);
}

// exp(d) of a d at most 0, as a term of a sum: those below fp32's normal numbers may be 0.
template <class T, class A>
MK_HD A exp_term(A d) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) == 2) return math::exp2_narrow(d * math::kLog2e);
#endif
  return exponential<T>(d);
}

// ---- elements -------------------------------------------------------------

MK_HD float reciprocal(float x) { return math::reciprocal_approx(x); }
MK_HD double reciprocal(double x) { return 1 / x; }

template <class A>
struct Capped {
  A value, slope;
};

// softcap tanh(x / softcap) and its derivative. With e = exp(-2 |x / softcap|), tanh = (1 - e) / (1 + e), and
// 1 - tanh^2 = 4 e / (1 + e)^2, which keeps its precision where tanh is near 1.
template <class A>
MK_HD Capped<A> capped(A x, A softcap) {
  const Exponential<A> e = exp_minus(std::fabs(x * (2 / softcap)));
  const A inverse = reciprocal(1 + e.value), value = softcap * -e.less_one * inverse;
  return {x < 0 ? -value : value, 4 * e.value * inverse * inverse};
}

// The part of the target that a class gets from its probability q (1 or 0 with a class index), times its weight.
template <class A>
struct Shares {
  A sharp, even;  // 1 - label_smoothing, label_smoothing / classes
  MK_HD A of(A weight, A q) const { return weight * (q * sharp + even); }
};
template <class A>
Shares<A> shares(double label_smoothing, int64_t classes) {
  return {A(1 - label_smoothing), A(label_smoothing / std::max<int64_t>(classes, 1))};
}

// d loss / d s of a class, total = W + 2 z_loss lse. Where share is far below 1, or p far from it,
// probability<T>(s, lse) * total - share is as good and quicker.
template <class T, class A>
MK_HD A cross_entropy_grad(A s, A lse, A share, A total) {
  const Exponential<A> p = exp_of_difference<T>(s, lse);
  return share * p.less_one + p.value * (total - share);
}

// p - q with p = exp(s - lse) and q = exp(t - teacher_lse), where s = x / temperature, t = teacher / temperature: the
// larger of the two times (1 - the smaller / the larger), which keeps its precision where they are close.
template <class T, class A>
MK_HD A distillation_grad(A x, A lse, A teacher, A teacher_lse, A inverse_temperature) {
  const A d = x == teacher ? teacher_lse - lse : (x - teacher) * inverse_temperature - (lse - teacher_lse);
  const bool more = d > 0;
  const A larger = exp_of_difference<T>((more ? x : teacher) * inverse_temperature, more ? lse : teacher_lse).value;
  const A difference = larger * exp_minus(std::fabs(d)).less_one;
  return more ? -difference : difference;
}

// ---- rows -----------------------------------------------------------------

// Sums over some classes of a row, or all. max must be at least every s that is added.
template <class A>
struct CrossEntropySums {
  A max = -A(INFINITY);
  A ones = 0, rest = 0;        // of exp(s - max): those that are 1, and the others
  A weight = 0, distance = 0;  // of share, of share (max - s)

  // Lets max grow to `next`, where that is more.
  MK_HD void raise(A next) {
    next = larger(next, max);
    const A shift = shift_of(next), factor = exp_minus(shift - max).value;
    rest = factor == 1 ? rest : (rest + ones) * factor;
    ones = factor == 1 ? ones : A(0);
    distance += weight != 0 ? weight * (shift - shift_of(max)) : A(0);  // that may be too large for fp32
    max = next;
  }
  MK_HD void add_exp(A e) {
    if (e == 1)
      ones += 1;
    else
      rest += e;
  }
  // A share of 0 adds nothing, even where s is -inf.
  MK_HD void add_share(A share, A s) {
    weight += share;
    distance += share != 0 ? share * (shift_of(max) - s) : A(0);
  }
  // log sum exp(s - max), precise also where one class has nearly all.
  MK_HD A log_sum() const { return std::log1p(rest + (ones - 1)); }
  MK_HD A lse() const { return max + log_sum(); }
  MK_HD A loss(A z_loss) const {
    return distance + weight * log_sum() + (z_loss != 0 ? z_loss * lse() * lse() : A(0));
  }
};

// Of logits x and teacher y, both before the division by temperature:
//   KL = sum_c q_c (log q_c - log p_c) = cross / teacher_sum - log teacher_sum + log sum
// where the second form cancels once KL is small: see DistillationTerms.
template <class A>
struct DistillationSums {
  A max = -A(INFINITY), teacher_max = -A(INFINITY);
  A sum = 0, teacher_sum = 0;  // of exp((x - max) / temperature), of exp((y - teacher_max) / temperature)
  A cross = 0;                 // of that second term, times ((y - teacher_max) - (x - max)) / temperature

  MK_HD void raise(A next, A teacher_next, A inverse_temperature) {
    next = larger(next, max);
    teacher_next = larger(teacher_next, teacher_max);
    const A shift = shift_of(next), teacher_shift = shift_of(teacher_next);
    const A moved = ((shift - shift_of(max)) - (teacher_shift - shift_of(teacher_max))) * inverse_temperature;
    const A factor = exp_minus((teacher_shift - teacher_max) * inverse_temperature).value;
    cross = factor > 0 ? (cross + teacher_sum * moved) * factor : A(0);  // cross may be infinite
    teacher_sum *= factor;
    sum *= exp_minus((shift - max) * inverse_temperature).value;
    max = next;
    teacher_max = teacher_next;
  }
  // d = (x - max) / temperature and exp(d), and the same of the teacher. A teacher's probability of 0 adds nothing.
  MK_HD void add(A d, A e, A teacher_d, A teacher_e) {
    sum += e;
    teacher_sum += teacher_e;
    cross += teacher_e > 0 ? teacher_e * (teacher_d - d) : A(0);
  }
  MK_HD A lse(A inverse_temperature) const { return max * inverse_temperature + std::log(sum); }
  MK_HD A teacher_lse(A inverse_temperature) const { return teacher_max * inverse_temperature + std::log(teacher_sum); }
  MK_HD A loss() const { return cross / teacher_sum - std::log(teacher_sum) + std::log(sum); }
};

// Rows whose KL, by the form above, is below this are summed up again, by terms.
constexpr float kSmallDivergence = 0.25f;

// exp(-u) - (1 - u), which is at least 0, for |u| < 1/2: its series.
template <class A>
MK_HD A above_tangent(A u) {
  constexpr int most = sizeof(A) == 8 ? 16 : 8;
  A sum = 1;
#pragma unroll
  for (int k = most; k > 2; --k) sum = 1 - u * (1 / A(k)) * sum;
  return u * u * A(0.5) * sum;
}

// KL once both sums are known: with u_c = log q_c - log p_c,
//   KL = sum_c q_c u_c + (p_c - q_c) = sum_c q_c (exp(-u_c) - 1 + u_c)
// where no term is below 0. All u_c have the error of `balance`, which so counts by its square.
template <class A>
struct DistillationTerms {
  A inverse_temperature, balance, ratio;

  MK_HD DistillationTerms(const DistillationSums<A>& sums, A inverse_temperature)
      : inverse_temperature(inverse_temperature), ratio(sums.teacher_sum / sums.sum) {
    balance = (sums.teacher_max - sums.max) * inverse_temperature + std::log(ratio);
  }
  // teacher_sum times the term of a class, from what DistillationSums adds. KL is finite, and so is y - x, or e is 0.
  MK_HD A of(A x, A e, A teacher, A teacher_e) const {
    const A u = (teacher - x) * inverse_temperature - balance, e_q = e * ratio;
    const A term = std::fabs(u) < A(0.5) ? teacher_e * above_tangent(u) : (e_q - teacher_e) + teacher_e * u;
    return teacher_e > 0 ? term : e_q;
  }
};

}  // namespace memkern
