// Cross-entropy and distillation on CUDA: arguments and results; the kernels are in the files included here.
#include "cross_entropy_backward.cuh"
#include "cross_entropy_distillation.cuh"
#include "cross_entropy_forward.cuh"

namespace memkern {
namespace {

bool has_rows(const Tensor& x) { return x.size(1) < 2 || x.stride(1) == 1; }

// x itself where the elements of a row lie side by side.
Tensor in_rows(const Tensor& x) { return has_rows(x) ? x : torch::stable::contiguous(x); }
MaybeTensor contiguous(const MaybeTensor& x) { return x ? MaybeTensor(torch::stable::contiguous(*x)) : x; }

// The kernels count the elements of a row in 32 bits.
int classes_of(const Tensor& logits) {
  STD_TORCH_CHECK(logits.size(1) < 1 << 30, "logits: got ", logits.size(1), " classes, needs fewer than 2^30");
  return static_cast<int>(logits.size(1));
}

struct Targets {
  Tensor target;
  MaybeTensor weight;
  int64_t ignore_index;
  double label_smoothing;

  Targets(const Tensor& target, const MaybeTensor& weight, int64_t ignore_index, double label_smoothing)
      : target(is_probabilities(target) ? in_rows(target) : torch::stable::contiguous(target)),
        weight(contiguous(weight)), ignore_index(ignore_index), label_smoothing(label_smoothing) {}

  template <class T>
  Target<T> of(int classes, ScalarType dtype) const {
    Target<T> result{};
    result.weight = const_data<float>(weight);
    result.ignore_index = ignore_index;
    result.shares = shares<acc_t<T>>(label_smoothing, classes);
    if (!is_probabilities(target))
      result.index = const_data<int64_t>(target);
    else if (target.scalar_type() == dtype)
      result.probabilities = const_rows<T>(target);
    else
      result.fp32_probabilities = const_rows<float>(target);
    return result;
  }
};

std::tuple<Tensor, Tensor> cross_entropy_forward(const Tensor& input, const Tensor& target, const MaybeTensor& weight,
                                                 int64_t ignore_index, double label_smoothing, double z_loss,
                                                 double softcap) {
  check_cross_entropy(input, target, weight, label_smoothing, z_loss, softcap);
  const OnDeviceOf device(input);
  const Tensor logits = in_rows(input);
  const Targets targets(target, weight, ignore_index, label_smoothing);
  const int64_t rows = logits.size(0);
  const int classes = classes_of(logits);
  const ScalarType dtype = statistics_dtype(logits);
  Tensor loss = fresh(logits, {rows}, dtype), lse = fresh(logits, {rows}, dtype);
  for_dtype(logits.scalar_type(), [&](auto type) {
    using T = decltype(type);
    using A = acc_t<T>;
    run_forward<T>({const_rows<T>(logits), targets.of<T>(classes, logits.scalar_type()), mutable_data<A>(loss),
                    mutable_data<A>(lse), rows, classes, A(z_loss), A(softcap)},
                   device.stream);
  });
  return {loss, lse};
}

// dlogits may be the logits.
void backward(const Tensor& dloss_input, const Tensor& logits, const Tensor& lse_input, const Targets& targets,
              double z_loss, double softcap, Tensor& dlogits, cudaStream_t stream) {
  const Tensor dloss = row_values(logits, dloss_input, "dloss"), lse = row_values(logits, lse_input, "lse");
  const int64_t rows = logits.size(0);
  const int classes = classes_of(logits);
  for_dtype(logits.scalar_type(), [&](auto type) {
    using T = decltype(type);
    using A = acc_t<T>;
    run_backward<T>({const_rows<T>(logits), targets.of<T>(classes, logits.scalar_type()), const_data<A>(dloss),
                     const_data<A>(lse), {mutable_data<T>(dlogits), dlogits.stride(0)}, rows, classes, A(z_loss),
                     A(softcap)},
                    stream);
  });
}

Tensor cross_entropy_backward(const Tensor& dloss, const Tensor& input, const Tensor& lse, const Tensor& target,
                              const MaybeTensor& weight, int64_t ignore_index, double label_smoothing, double z_loss,
                              double softcap) {
  check_cross_entropy(input, target, weight, label_smoothing, z_loss, softcap);
  const OnDeviceOf device(input);
  Tensor dlogits = fresh(input, input.sizes(), input.scalar_type());
  backward(dloss, in_rows(input), lse, {target, weight, ignore_index, label_smoothing}, z_loss, softcap, dlogits,
           device.stream);
  return dlogits;
}

void cross_entropy_backward_in_place(const Tensor& dloss, const Tensor& input, const Tensor& lse, const Tensor& target,
                                     const MaybeTensor& weight, int64_t ignore_index, double label_smoothing,
                                     double z_loss, double softcap) {
  check_cross_entropy(input, target, weight, label_smoothing, z_loss, softcap);
  const OnDeviceOf device(input);
  Tensor logits = in_rows(input);
  backward(dloss, logits, lse, {target, weight, ignore_index, label_smoothing}, z_loss, softcap, logits,
           device.stream);
  if (!has_rows(input)) copied_into(input, logits);
}

// What both directions take.
template <class T>
Distillation<T> distillation_of(const Tensor& logits, const Tensor& teacher, double temperature) {
  Distillation<T> a{};
  a.logits = const_rows<T>(logits);
  a.teacher = const_rows<T>(teacher);
  a.rows = logits.size(0);
  a.classes = classes_of(logits);
  a.inverse_temperature = static_cast<acc_t<T>>(1 / temperature);
  return a;
}

std::tuple<Tensor, Tensor, Tensor> distillation_forward(const Tensor& input, const Tensor& teacher_input,
                                                        double temperature) {
  check_distillation(input, teacher_input, temperature);
  const OnDeviceOf device(input);
  const Tensor logits = in_rows(input), teacher = in_rows(teacher_input);
  const int64_t rows = logits.size(0);
  const ScalarType dtype = statistics_dtype(logits);
  Tensor loss = fresh(logits, {rows}, dtype), lse = fresh(logits, {rows}, dtype);
  Tensor teacher_lse = fresh(logits, {rows}, dtype);
  for_dtype(logits.scalar_type(), [&](auto type) {
    using T = decltype(type);
    using A = acc_t<T>;
    Distillation<T> a = distillation_of<T>(logits, teacher, temperature);
    a.loss = mutable_data<A>(loss);
    a.lse = mutable_data<A>(lse);
    a.teacher_lse = mutable_data<A>(teacher_lse);
    run_distillation(a, true, device.stream);
  });
  return {loss, lse, teacher_lse};
}

Tensor distillation_backward(const Tensor& dloss_input, const Tensor& input, const Tensor& lse_input,
                             const Tensor& teacher_input, const Tensor& teacher_lse_input, double temperature) {
  check_distillation(input, teacher_input, temperature);
  const OnDeviceOf device(input);
  const Tensor logits = in_rows(input), teacher = in_rows(teacher_input);
  const Tensor dloss = row_values(logits, dloss_input, "dloss"), lse = row_values(logits, lse_input, "lse");
  const Tensor teacher_lse = row_values(logits, teacher_lse_input, "teacher_lse");
  Tensor dlogits = fresh(logits, logits.sizes(), logits.scalar_type());
  for_dtype(logits.scalar_type(), [&](auto type) {
    using T = decltype(type);
    using A = acc_t<T>;
    Distillation<T> a = distillation_of<T>(logits, teacher, temperature);
    a.dloss = const_data<A>(dloss);
    a.saved_lse = const_data<A>(lse);
    a.saved_teacher = const_data<A>(teacher_lse);
    a.dlogits = {mutable_data<T>(dlogits), dlogits.stride(0)};
    run_distillation(a, false, device.stream);
  });
  return dlogits;
}

}  // namespace
}  // namespace memkern

STABLE_TORCH_LIBRARY_IMPL(MEMKERN_CUDA_NAMESPACE, MEMKERN_CUDA_KEY, m) {
  m.impl("cross_entropy_forward", TORCH_BOX(&memkern::cross_entropy_forward));
  m.impl("cross_entropy_backward", TORCH_BOX(&memkern::cross_entropy_backward));
  m.impl("cross_entropy_backward_", TORCH_BOX(&memkern::cross_entropy_backward_in_place));
  m.impl("distillation_forward", TORCH_BOX(&memkern::distillation_forward));
  m.impl("distillation_backward", TORCH_BOX(&memkern::distillation_backward));
}
