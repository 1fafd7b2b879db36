// The optimizer steps, one element at a time, for the CPU loops and the CUDA kernels.
//
// A is what an element is computed in: float, or double where the parameter is one. The numbers that a
// whole tensor shares come from scalars(), in double: 1 - beta^t cancels where beta^t is near 1.
#pragma once

#include "math.h"

namespace memkern {
namespace optim {

// ---- Formulas

// The overload for float, which the global namespace of a host compiler may lack.
MK_HD float root(float x) { return sqrtf(x); }
MK_HD double root(double x) { return sqrt(x); }

// Adam (Kingma & Ba 2015) and, decoupled, AdamW (Loshchilov & Hutter 2019), rounded as torch.optim rounds.
template <bool Amsgrad>
struct Adam {
  static constexpr int kStates = Amsgrad ? 3 : 2;  // m, v, the largest v so far
  double beta1, beta2, eps, weight_decay;
  bool decoupled;

  template <class A>
  struct Scalars {
    A shrink, l2, m_rate, v_keep, v_rate, v_root, eps, size;
  };

  template <class A>
  MK_HD Scalars<A> scalars(double lr, double t) const {
    return {A(decoupled ? 1 - lr * weight_decay : 1.0),
            A(decoupled ? 0.0 : weight_decay),
            A(1 - beta1),
            A(beta2),
            A(1 - beta2),
            A(sqrt(1 - pow(beta2, t))),
            A(eps),
            A(lr / (1 - pow(beta1, t)))};
  }

  template <class A>
  static MK_HD void update(const Scalars<A>& s, A& w, A g, A* state) {
    g = s.l2 != 0 ? g + s.l2 * w : g;
    A& m = state[0];
    A& v = state[1];
    m += s.m_rate * (g - m);
    v = s.v_keep * v + s.v_rate * g * g;
    A used = v;
    if constexpr (Amsgrad) used = state[2] = state[2] > v ? state[2] : v;
    w = w * s.shrink - s.size * m / (root(used) / s.v_root + s.eps);
  }
};

template <bool Momentum>
struct Sgd {
  static constexpr int kStates = Momentum ? 1 : 0;
  double momentum, dampening, weight_decay;
  bool nesterov;

  template <class A>
  struct Scalars {
    A lr, decay, keep, rate, ahead, along;  // direction: ahead * g + along * buffer
  };

  // The first step fills the buffer with the gradient, undampened.
  template <class A>
  MK_HD Scalars<A> scalars(double lr, double t) const {
    return {A(lr),
            A(weight_decay),
            A(t == 1 ? 0.0 : momentum),
            A(t == 1 ? 1.0 : 1 - dampening),
            A(nesterov ? 1.0 : 0.0),
            A(nesterov ? momentum : 1.0)};
  }

  template <class A>
  static MK_HD void update(const Scalars<A>& s, A& w, A g, A* state) {
    g = s.decay != 0 ? g + s.decay * w : g;
    if constexpr (Momentum) {
      state[0] = s.keep != 0 ? s.keep * state[0] + s.rate * g : g;
      g = s.ahead * g + s.along * state[0];
    }
    w -= s.lr * g;
  }
};

// Lion (Chen et al. 2023, arXiv:2302.06675).
struct Lion {
  static constexpr int kStates = 1;
  double beta1, beta2, weight_decay;

  template <class A>
  struct Scalars {
    A lr, shrink, look, rate;
  };

  template <class A>
  MK_HD Scalars<A> scalars(double lr, double) const {
    return {A(lr), A(1 - lr * weight_decay), A(1 - beta1), A(1 - beta2)};
  }

  template <class A>
  static MK_HD void update(const Scalars<A>& s, A& w, A g, A* state) {
    const A m = state[0], direction = m + s.look * (g - m);
    state[0] = m + s.rate * (g - m);
    w = w * s.shrink - (direction > 0 ? s.lr : direction < 0 ? -s.lr : A(0));
  }
};

// LAMB (You et al. 2020, arXiv:1904.00962). lr is already times |w| / |direction|.
struct Lamb {
  static constexpr int kStates = 2;
  double beta1, beta2, eps, weight_decay;

  template <class A>
  struct Scalars {
    A lr, m_rate, m_unbias, v_keep, v_rate, v_root, eps, decay;
  };

  template <class A>
  MK_HD Scalars<A> scalars(double lr, double t) const {
    return {A(lr),        A(1 - beta1),   A(1 / (1 - pow(beta1, t))), A(beta2),
            A(1 - beta2), A(sqrt(1 - pow(beta2, t))), A(eps),     A(weight_decay)};
  }

  template <class A>
  static MK_HD A direction(const Scalars<A>& s, A w, A g, A* state) {
    state[0] += s.m_rate * (g - state[0]);
    state[1] = s.v_keep * state[1] + s.v_rate * g * g;
    return s.m_unbias * state[0] / (root(state[1]) / s.v_root + s.eps) + s.decay * w;
  }

  template <class A>
  static MK_HD void update(const Scalars<A>& s, A& w, A g, A* state) {
    w -= s.lr * direction(s, w, g, state);
  }

  // From the squares of both norms.
  static MK_HD double ratio(double weight, double direction) {
    return weight > 0 && direction > 0 ? sqrt(weight / direction) : 1.0;
  }
};

// ---- What an op reads on the device

// What gradients that carry the loss scale, where there is one, are to be multiplied by.
MK_HD float inverse(const float* grad_scale) { return grad_scale ? float(1.0 / double(*grad_scale)) : 1.0f; }
MK_HD bool usable(float unscale) { return unscale - unscale == 0 && unscale != 0; }

struct OnDevice {
  const float *lr, *grad_scale, *clip, *found_inf;  // null where not given
  double lr_number;
  bool maximize, write_grads;

  MK_HD bool skip() const { return found_inf != nullptr && !(*found_inf == 0); }
  MK_HD double learning_rate() const { return lr ? *lr : lr_number; }
  // The gradient is multiplied by the first, which is what write_grads writes back, and by the second.
  MK_HD float unscale() const { return inverse(grad_scale); }
  MK_HD float along() const { return (clip ? *clip : 1.0f) * (maximize ? -1.0f : 1.0f); }
};

// The factor that brings a norm down to max_norm, as torch.nn.utils.clip_grad_norm_ has it.
MK_HD float clip_factor(double max_norm, float norm) {
  const double factor = max_norm / (double(norm) + 1e-6);
  return factor < 1 ? float(factor) : 1.0f;
}

}  // namespace optim
}  // namespace memkern
