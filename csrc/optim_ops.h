// The lists of tensors that the optimizer ops are given, and the ops themselves, as far as CPU and CUDA share
// them. The formulas are in optim.h.
#pragma once

#include <optional>

#include "optim.h"
#include "tensor.h"

namespace memkern {
namespace optim {

// ---- Lists of tensors

using Tensors = std::vector<Tensor>;
using Maybe = std::optional<Tensor>;

enum Type : uint8_t { kHalf, kBFloat16, kFloat, kDouble };

inline Type type_of(const Tensor& x, const char* name) {
  switch (x.scalar_type()) {
    case ScalarType::Half: return kHalf;
    case ScalarType::BFloat16: return kBFloat16;
    case ScalarType::Float: return kFloat;
    case ScalarType::Double: return kDouble;
    default: STD_TORCH_CHECK(false, name, ": needs float16, bfloat16, float32 or float64");
  }
}

// One parameter's tensors, which lie in memory in one order. The weight is the fp32 master where there is
// one, and the copy is then the 16-bit parameter.
enum List { kWeight, kGrad, kCopy, kState };
constexpr int kLists = kState + 3;
struct Row {
  void* data[kLists];
  const float* step;
  int64_t n;
  Type type[kLists];
  int8_t head;  // CUDA: elements before all of them are aligned to an access; -1: they never are
};

inline bool same_layout(const Tensor& x, const Tensor& y) {
  if (x.dim() != y.dim()) return false;
  for (int64_t d = 0; d < x.dim(); ++d)
    if (x.size(d) != y.size(d) || (x.stride(d) != y.stride(d) && x.size(d) != 1)) return false;
  return true;
}

inline void check_number(const Tensor& x, const char* name, ScalarType type, const Tensor& like) {
  STD_TORCH_CHECK(x.scalar_type() == type && x.numel() == 1 && on_one_device(x, like), name, ": needs one ",
                  type == ScalarType::Float ? "fp32" : "int64", " number on the device of the other tensors");
}

// nullptr where it is not given.
inline const float* fp32_number(const Maybe& x, const char* name, const Tensor& like) {
  if (x) check_number(*x, name, ScalarType::Float, like);
  return const_data<float>(x);
}

enum class Steps { kNeeded, kNotNeeded };

// The rows of tensors that have elements, in order.
inline std::vector<Row> rows_of(const Tensors& params, const Tensors& grads, const std::vector<const Tensors*>& states,
                                const Tensors& masters, const Tensors& steps, Steps need = Steps::kNeeded) {
  const auto check_length = [&](const Tensors& list, const char* name, bool may_be_empty) {
    STD_TORCH_CHECK(list.size() == params.size() || (may_be_empty && list.empty()), name, ": got ", list.size(),
                    " tensors, needs one for each of ", params.size(), " params");
  };
  check_length(grads, "grads", false);
  check_length(masters, "masters", true);
  check_length(steps, "steps", need == Steps::kNotNeeded);
  for (const Tensors* state : states) check_length(*state, "states", false);
  std::vector<Row> rows;
  for (size_t i = 0; i < params.size(); ++i) {
    const Tensor& p = params[i];
    Row row{};
    row.n = p.numel();
    const auto put = [&](int list, const Tensor& x, const char* name) {
      STD_TORCH_CHECK(same_layout(p, x) && x.get_device_index() == p.get_device_index(), name, "[", i,
                      "]: needs the shape, strides and device of params[", i, "]");
      row.data[list] = x.mutable_data_ptr();
      row.type[list] = type_of(x, name);
    };
    STD_TORCH_CHECK(is_dense(p), "params[", i, "]: needs elements that fill one stretch of memory");
    put(kWeight, masters.empty() ? p : masters[i], "masters");
    put(kGrad, grads[i], "grads");
    if (!masters.empty()) put(kCopy, p, "params");
    for (size_t k = 0; k < states.size(); ++k) put(kState + static_cast<int>(k), (*states[k])[i], "states");
    if (!steps.empty()) row.step = fp32_number(steps[i], "steps", p);
    if (row.n > 0) rows.push_back(row);
  }
  return rows;
}

inline OnDevice on_device(const Tensors& params, const Maybe& lr_tensor, const Maybe& grad_scale, const Maybe& clip,
                          const Maybe& found_inf, double lr, bool maximize, bool write_grads) {
  const Tensor& like = params[0];
  const float* scale = fp32_number(grad_scale, "grad_scale", like);
  return {fp32_number(lr_tensor, "lr_tensor", like),
          scale,
          fp32_number(clip, "clip", like),
          fp32_number(found_inf, "found_inf", like),
          lr,
          maximize,
          write_grads && scale != nullptr};
}

// What advance writes and reads, all of it checked.
struct Advance {
  std::vector<float*> steps;
  int64_t* skipped = nullptr;
  const float* found_inf = nullptr;
};

inline Advance advance_of(const Tensors& steps, const Maybe& skipped, const Maybe& found_inf) {
  Advance all;
  if (steps.empty() && !skipped) return all;
  const Tensor& like = steps.empty() ? *skipped : steps[0];
  for (const Tensor& step : steps) {
    check_number(step, "steps", ScalarType::Float, like);
    all.steps.push_back(static_cast<float*>(step.mutable_data_ptr()));
  }
  if (skipped) {
    check_number(*skipped, "skipped", ScalarType::Long, like);
    all.skipped = static_cast<int64_t*>(skipped->mutable_data_ptr());
  }
  all.found_inf = fp32_number(found_inf, "found_inf", like);
  return all;
}

// ---- The ops

// Runner::run(algorithm, numbers, rows, a tensor on their device) does the work.
template <class Runner>
void adamw_step(const Tensors& params, const Tensors& grads, const Tensors& exp_avgs, const Tensors& exp_avg_sqs,
                const Tensors& max_exp_avg_sqs, const Tensors& masters, const Tensors& steps, const Maybe& lr_tensor,
                const Maybe& grad_scale, const Maybe& clip, const Maybe& found_inf, double lr, double beta1,
                double beta2, double eps, double weight_decay, bool decoupled, bool maximize, bool write_grads) {
  const OnDevice numbers = on_device(params, lr_tensor, grad_scale, clip, found_inf, lr, maximize, write_grads);
  if (max_exp_avg_sqs.empty())
    Runner::run(Adam<false>{beta1, beta2, eps, weight_decay, decoupled}, numbers,
                rows_of(params, grads, {&exp_avgs, &exp_avg_sqs}, masters, steps), params[0]);
  else
    Runner::run(Adam<true>{beta1, beta2, eps, weight_decay, decoupled}, numbers,
                rows_of(params, grads, {&exp_avgs, &exp_avg_sqs, &max_exp_avg_sqs}, masters, steps), params[0]);
}

template <class Runner>
void sgd_step(const Tensors& params, const Tensors& grads, const Tensors& momentum_buffers, const Tensors& masters,
              const Tensors& steps, const Maybe& lr_tensor, const Maybe& grad_scale, const Maybe& clip,
              const Maybe& found_inf, double lr, double momentum, double dampening, double weight_decay, bool nesterov,
              bool maximize, bool write_grads) {
  const OnDevice numbers = on_device(params, lr_tensor, grad_scale, clip, found_inf, lr, maximize, write_grads);
  if (momentum_buffers.empty())
    Runner::run(Sgd<false>{momentum, dampening, weight_decay, nesterov}, numbers,
                rows_of(params, grads, {}, masters, steps, Steps::kNotNeeded), params[0]);
  else
    Runner::run(Sgd<true>{momentum, dampening, weight_decay, nesterov}, numbers,
                rows_of(params, grads, {&momentum_buffers}, masters, steps), params[0]);
}

template <class Runner>
void lamb_step(const Tensors& params, const Tensors& grads, const Tensors& exp_avgs, const Tensors& exp_avg_sqs,
               const Tensors& masters, const Tensors& steps, const Maybe& lr_tensor, const Maybe& grad_scale,
               const Maybe& clip, const Maybe& found_inf, double lr, double beta1, double beta2, double eps,
               double weight_decay, bool maximize, bool write_grads) {
  const OnDevice numbers = on_device(params, lr_tensor, grad_scale, clip, found_inf, lr, maximize, write_grads);
  Runner::run(Lamb{beta1, beta2, eps, weight_decay}, numbers,
              rows_of(params, grads, {&exp_avgs, &exp_avg_sqs}, masters, steps), params[0]);
}

template <class Runner>
void lion_step(const Tensors& params, const Tensors& grads, const Tensors& exp_avgs, const Tensors& masters,
               const Maybe& lr_tensor, const Maybe& grad_scale, const Maybe& clip, const Maybe& found_inf, double lr,
               double beta1, double beta2, double weight_decay, bool maximize, bool write_grads) {
  const OnDevice numbers = on_device(params, lr_tensor, grad_scale, clip, found_inf, lr, maximize, write_grads);
  Runner::run(Lion{beta1, beta2, weight_decay}, numbers,
              rows_of(params, grads, {&exp_avgs}, masters, {}, Steps::kNotNeeded), params[0]);
}

}  // namespace optim
}  // namespace memkern
