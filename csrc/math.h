// Scalar GELU and its derivative, for CUDA device code and for host loops the
// compiler vectorises: selects only, no tables, no libm in the float versions.
//
// With t = |x| the lower tail Q(t) (Phi(-t), or the sigmoid of the tanh form)
// gives   gelu(x) = max(x, 0) - t Q(t)
// without cancellation on either side. With d(t) the derivative at -t,
//         gelu'(-t) = d(t),  gelu'(t) = 1 - d(t).
// d has one zero. It is factored out, or d is summed in double, so that d stays
// relatively accurate beside it.
//
// Narrow = true: x is an fp16 or bf16 value and the result is rounded to it
// (relative error about 2^-17). Narrow = false: within 4 ulp of fp32.
//
// exp() results carry a factor 2^64 (2^32 if Narrow), so they are normal
// numbers and only the last operation of a function rounds to a subnormal.
//
// Every product that an error term relies on is exact, so contraction of
// a * b + c into an fma, or its absence, changes no bound.
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define MK_HD __host__ __device__ __forceinline__
#else
#define MK_HD inline __attribute__((always_inline))
#endif

namespace memkern {
namespace math {

// ---- primitives -----------------------------------------------------------

MK_HD uint32_t bits(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  return __builtin_bit_cast(uint32_t, x);
#endif
}

MK_HD float from_bits(uint32_t u) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(u);
#else
  return __builtin_bit_cast(float, u);
#endif
}

// min(|x|, top); NaN stays NaN.
MK_HD float clamped_abs(float x, float top) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(fabsf(x)), "f"(top));
  return r;
#else
  const float t = from_bits(bits(x) & 0x7fffffffu);
  return t > top ? top : t;
#endif
}

// max(x, 0) with -0 for x < 0, so that -0 - 0 keeps the sign of x = -0.
MK_HD float relu(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(-0.0f));
  return r;
#else
  return x < 0.0f ? -0.0f : x;
#endif
}

// 1 / x to 1 ulp; for normal x, 1 / x.
MK_HD float reciprocal_approx(float x) {
#ifdef __CUDA_ARCH__
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#else
  return 1.0f / x;
#endif
}

// (t - k) / (t + k), the argument of polynomials that hardly amplify its error.
MK_HD float centred(float t, float k) {
  return (t - k) * reciprocal_approx(t + k);
}

// Leading 12 significant bits; the remainder x - high12(x) is exact.
MK_HD float high12(float x) { return from_bits(bits(x) & 0xfffff000u); }

// ---- exponentials ---------------------------------------------------------

// 1.5 * 2^23 rounds what is added to it to an integer, which then is the low
// bits of the sum. The + 64 and + 32 put the bias of the result there.
constexpr float kRound64 = 12582912.0f + 64.0f;
constexpr float kRound32 = 12582912.0f;

constexpr float kLog2e = 0x1.715476p+0f;
constexpr double kLn2 = 0x1.62e42fefa39efp-1;
// ln 2 = kLn2Hi + kLn2Lo; 15 bits in kLn2Hi make n * kLn2Hi exact, |n| <= 256.
constexpr float kLn2Hi = 0x1.62e4p-1f;
constexpr float kLn2Lo = 0x1.7f7d1cp-20f;

// exp(r) - 1 for |r| <= 0.349, error below 2^-28; relatively accurate at 0.
MK_HD float expm1_reduced(float r) {
  float p = 0x1.6a4ab8p-10f;
  p = p * r + 0x1.123ccap-7f;
  p = p * r + 0x1.5558b8p-5f;
  p = p * r + 0x1.55548ep-3f;
  p = p * r + 0x1.fffffcp-2f;
  return (r * r) * p + r;
}

// scale * (1 + c), scale a power of two. Leaving the 1 + c to the user saves a
// rounding: times(x, e) = x scale + (x scale) c, where x scale is exact.
struct Exp {
  float scale, c;
};

MK_HD float times(float x, Exp e) {
  const float y = x * e.scale;
  return y + y * e.c;
}

// 2^64 exp(-(hi + lo)), -2 < hi + lo < 120. approx is near hi + lo and only
// picks n; hi and n * kLn2Hi are near multiples of one grid: hi + n * kLn2Hi
// is exact.
MK_HD Exp exp64(float approx, float hi, float lo) {
  const float z = approx * -kLog2e + kRound64;
  const float n = z - kRound64;
  const float r = (-hi - n * kLn2Hi) - (lo + n * kLn2Lo);
  return {from_bits((bits(z) << 23) + 0x3f800000u), expm1_reduced(r)};
}

// As above for an argument in double, |v| < 120: v needs more bits than a float
// has, and the cubic of the tanh form is cheaper in double than in two floats.
MK_HD Exp exp64(double v) {
  const float z = float(v) * -kLog2e + kRound64;
  const float n = z - kRound64;
  const float r = float(-v - double(n) * kLn2);
  return {from_bits((bits(z) << 23) + 0x3f800000u), expm1_reduced(r)};
}

// 2^y for -126 <= y <= 32.
MK_HD float exp2_narrow(float y) {
#ifdef __CUDA_ARCH__
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(y));
  return r;
#else
  const float z = y + kRound32;
  const float f = y - (z - kRound32);
  float p = 0x1.5bdcdep-10f;
  p = p * f + 0x1.3cea5ep-7f;
  p = p * f + 0x1.c6b6d8p-5f;
  p = p * f + 0x1.ebf9bep-3f;
  p = p * f + 0x1.62e42ap-1f;
  p = p * f + 1.0f;
  return from_bits(bits(p) + (bits(z) << 23));
#endif
}

// ---- erf form -------------------------------------------------------------
//
// Q(t) = erfc(t / sqrt 2) / 2 = exp(-t^2/2) R(t), R smooth and ~ 1/t.
// d(t) = Q(t) - t phi(t) = exp(-t^2/2) (t - t0) G(t), G smooth, negative.
// Full: 1 / R(t) = 2 + t M(q), M rising from 1.6 to 2.5, and G are minimax
// polynomials in q = (t - K)/(t + K), relative error 2^-26.5 and 2^-27. The
// first is exact at t = 0, and t M(q) + 2 does not cancel.
// Narrow: R and G are minimax polynomials in w = 1/(t + K), relative error 2^-20
// up to t = 4 and 2^-14 beyond 6, where only bf16 has normal results.

// Beyond these, t Q and t phi are below half the least subnormal (of bf16, if
// Narrow). Narrow: the argument of exp2_narrow stays above -126.
constexpr float kTopErf = 15.0f;
constexpr float kTopErfNarrow = 14.75f;

// Zero of d: t0 = kZeroErfHi + kZeroErfLo. Narrow: a t - b with b / a = t0 to
// 1e-12, where a has 13 bits and so a * t is exact.
constexpr float kZeroErfHi = 0x1.80ead2p-1f;
constexpr float kZeroErfLo = -0x1.a03fd4p-27f;
constexpr float kZeroErfA = 1.267333984375f;
constexpr float kZeroErfB = 0x1.e7d198p-1f;

// 2^64 exp(-t^2/2): with h = high12(t), t^2/2 = h^2/2 + (t - h)(t + h)/2 where
// h^2/2 is exact and the rest below 2^-4.
MK_HD Exp gauss64(float t) {
  const float h = high12(t);
  return exp64(0.5f * t * t, 0.5f * (h * h), (0.5f * (t - h)) * (t + h));
}

// 2^32 exp(-t^2/2)
MK_HD float gauss_narrow(float t) {
  return exp2_narrow(32.0f - (t * t) * (0.5f * kLog2e));
}

// ---- tanh form ------------------------------------------------------------
//
// (1 + tanh u)/2 = 1/(1 + exp(-2u)); v(t) = 2u = A t + B t^3,
// A = 2 sqrt(2/pi), B = 0.044715 A. With E = exp(-v):
// Q(t) = E / (1 + E),
// d(t) = E / (1 + E)^2 * h(t),  h(t) = 1 + E - A t - 3 B t^3.

// As kTopErf.
constexpr float kTopTanh = 11.0f;
constexpr float kTopTanhNarrow = 10.84375f;

constexpr double kA = 0x1.9884533d43651p+0;
constexpr double kB = 0x1.2444f2a4d8b4bp-4;

// Zero t1 of h for Narrow, as for t0.
constexpr float kZeroTanhA = 1.131591796875f;
constexpr float kZeroTanhB = 0x1.b3f514p-1f;

// 2^32 exp(-v)
MK_HD float sigmoid_tail_narrow(float t) {
  return exp2_narrow(
      32.0f - t * (float(kA / kLn2) + float(kB / kLn2) * (t * t)));
}

}  // namespace math

template <bool Narrow>
MK_HD float gelu_erf(float x) {
  using namespace math;
  const float t = clamped_abs(x, Narrow ? kTopErfNarrow : kTopErf);
  if (Narrow) {
    const float w = reciprocal_approx(t + 3.5f);
    float p = -0x1.6f324p-25f;  // 2^-32 R(t)
    p = p * w + 0x1.6a379cp-25f;
    p = p * w - 0x1.b21462p-28f;
    p = p * w + 0x1.4c8fd6p-29f;
    p = p * w + 0x1.cd7a74p-33f;
    p = p * w + 0x1.af0f18p-34f;
    p = p * w - 0x1.a3f596p-44f;
    return relu(x) - (p * gauss_narrow(t)) * t;
  }
  const float q = centred(t, 4.5f);
  float p = -0x1.a0039cp+54f;  // 2^64 M(q)
  p = p * q - 0x1.fdecbap+53f;
  p = p * q + 0x1.9f30c4p+56f;
  p = p * q - 0x1.73f5a6p+55f;
  p = p * q - 0x1.065894p+58f;
  p = p * q + 0x1.18c7fp+59f;
  p = p * q - 0x1.87e65ap+51f;
  p = p * q - 0x1.3e62a2p+61f;
  p = p * q + 0x1.dde144p+62f;
  p = p * q + 0x1.168708p+65f;
  return relu(x) - times(t, gauss64(t)) / (t * p + 0x1p65f);
}

template <bool Narrow>
MK_HD float gelu_erf_grad(float x) {
  using namespace math;
  const float t = clamped_abs(x, Narrow ? kTopErfNarrow : kTopErf);
  float d;
  if (Narrow) {
    const float w = reciprocal_approx(t + 3.0f);
    float p = 0x1.721f22p-30f;  // 2^-32 G(t) / a
    p = p * w - 0x1.38b154p-30f;
    p = p * w - 0x1.7e0afcp-33f;
    p = p * w - 0x1.34fb36p-33f;
    p = p * w - 0x1.e45552p-35f;
    p = p * w - 0x1.424c8ep-34f;
    d = (p * (kZeroErfA * t - kZeroErfB)) * gauss_narrow(t);
  } else {
    const float q = centred(t, 2.5f);
    float p = -0x1.9adad4p-17f;  // -G(t)
    p = p * q - 0x1.b6aeeep-15f;
    p = p * q - 0x1.06288ap-17f;
    p = p * q + 0x1.7f6b96p-12f;
    p = p * q + 0x1.d9a3eep-12f;
    p = p * q - 0x1.656d36p-9f;
    p = p * q - 0x1.275688p-8f;
    p = p * q + 0x1.6eb56ap-5f;
    p = p * q - 0x1.082e3ap-3f;
    p = p * q + 0x1.f568ecp-2f;
    d = times(p * ((kZeroErfHi - t) + kZeroErfLo), gauss64(t)) * 0x1p-64f;
  }
  return x < 0.0f ? d : 1.0f - d;
}

template <bool Narrow>
MK_HD float gelu_tanh(float x) {
  using namespace math;
  const float t = clamped_abs(x, Narrow ? kTopTanhNarrow : kTopTanh);
  if (Narrow) {
    const float e = sigmoid_tail_narrow(t);
    return relu(x) - (e * reciprocal_approx(0x1p32f + e)) * t;
  }
  const double td = t;
  const Exp e = exp64(td * (kA + kB * (td * td)));
  return relu(x) - times(t, e) / (0x1p64f + (e.scale + e.scale * e.c));
}

template <bool Narrow>
MK_HD float gelu_tanh_grad(float x) {
  using namespace math;
  const float t = clamped_abs(x, Narrow ? kTopTanhNarrow : kTopTanh);
  float d;
  if (Narrow) {
    // With u = E / (1 + E): d = u g, g = h / (1 + E) = 1 - (1 - u) k,
    // k = A t + 3 B t^3; within 1/16 of t1, g = (a t - b) * polynomial.
    const float e = sigmoid_tail_narrow(t);
    const float u = e * reciprocal_approx(0x1p32f + e);
    const float k = t * (float(kA) + float(3 * kB) * (t * t));
    const float far = 1.0f - (k - u * k);
    const float z = kZeroTanhA * t - kZeroTanhB;
    float p = -0x1.be5adcp-5f;
    p = p * t - 0x1.475d84p-1f;
    p = p * t - 0x1.2bd09cp+0f;
    const float near = z * p;
    const float az = from_bits(bits(z) & 0x7fffffffu);
    d = u * (az < 0x1.1p-4f ? near : far);
  } else {
    // E = E1 exp(-y), y = v(t) - v(t1), E1 = exp(-v(t1)). Near t1, exp(-y) - 1
    // is relatively accurate, so in double h is too: nothing is factored out.
    constexpr double kV1 = 0x1.3b2cf738f9ffep+0;
    constexpr double kE1 = 0x1.2af64e9c485eep-2;
    const double td = t, t2 = td * td;
    const Exp y = exp64(td * (kA + kB * t2) - kV1);
    const double scale = y.scale * kE1;
    const double e = scale + scale * y.c;  // 2^64 E
    const double p = 1.0 + e * 0x1p-64;
    const double h = p - td * (kA + (3.0 * kB) * t2);
    d = float(e * h) / (float(p * p) * 0x1p64f);
  }
  return x < 0.0f ? d : 1.0f - d;
}

// ---- double ---------------------------------------------------------------
//
// The same forms through libm. t stops where the tail is 0, so that no infinity
// meets a 0.

namespace math {

MK_HD double clamped_abs(double x) {
  const double t = fabs(x);
  return t > 40.0 ? 40.0 : t;
}

}  // namespace math

MK_HD double gelu_erf(double x) {
  const double t = math::clamped_abs(x);
  return (x < 0.0 ? -0.0 : x) - t * (0.5 * erfc(t * 0.70710678118654752));
}

MK_HD double gelu_erf_grad(double x) {
  const double t = math::clamped_abs(x);
  const double density = 0.39894228040143268 * exp(-0.5 * t * t);
  const double d = 0.5 * erfc(t * 0.70710678118654752) - t * density;
  return x < 0.0 ? d : 1.0 - d;
}

MK_HD double gelu_tanh(double x) {
  const double t = math::clamped_abs(x);
  const double e = exp(-t * (math::kA + math::kB * t * t));
  return (x < 0.0 ? -0.0 : x) - t * e / (1.0 + e);
}

MK_HD double gelu_tanh_grad(double x) {
  const double t = math::clamped_abs(x);
  const double e = exp(-t * (math::kA + math::kB * t * t));
  const double d = e / (1.0 + e) * (1.0 - t * (math::kA + 3.0 * math::kB * t * t) / (1.0 + e));
  return x < 0.0 ? d : 1.0 - d;
}

// ---- by form and storage ----------------------------------------------------

// Storage is the type x was read from; A is what it is computed in.
template <bool Tanh, class Storage, class A>
MK_HD A gelu(A x) {
  if constexpr (sizeof(A) == 8) {
    return Tanh ? gelu_tanh(x) : gelu_erf(x);
  } else {
    constexpr bool narrow = sizeof(Storage) == 2;
    return Tanh ? gelu_tanh<narrow>(x) : gelu_erf<narrow>(x);
  }
}

template <bool Tanh, class Storage, class A>
MK_HD A gelu_grad(A x) {
  if constexpr (sizeof(A) == 8) {
    return Tanh ? gelu_tanh_grad(x) : gelu_erf_grad(x);
  } else {
    constexpr bool narrow = sizeof(Storage) == 2;
    return Tanh ? gelu_tanh_grad<narrow>(x) : gelu_erf_grad<narrow>(x);
  }
}

}  // namespace memkern
