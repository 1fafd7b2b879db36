// Scalar GELU and its derivative, for CUDA device code and for host loops the
// compiler vectorises: selects only, no tables, no libm in the float versions.
//
// With t = |x| the lower tail Q(t) (Phi(-t), or the sigmoid of the tanh form)
// gives   gelu(x) = max(x, 0) - t Q(t)
// without cancellation on either side. With d(t) the derivative at -t,
//         gelu'(-t) = d(t),  gelu'(t) = 1 - d(t).
// d has one zero; it is factored out so d stays relatively accurate beside it.
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

#include <cstdint>
#include <cmath>
#include <cstring>

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

// 1 / x; 1 ulp on the device.
MK_HD float reciprocal_narrow(float x) {
#ifdef __CUDA_ARCH__
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#else
  return 1.0f / x;
#endif
}

// Leading 12 significant bits; the remainder x - high12(x) is exact.
MK_HD float high12(float x) { return from_bits(bits(x) & 0xfffff000u); }

// Nearest 8 significant bits (x >= 0).
MK_HD float round8(float x) {
  return from_bits((bits(x) + 0x8000u) & 0xffff0000u);
}

// ---- exponentials ---------------------------------------------------------

// 1.5 * 2^23 rounds what is added to it to an integer, which then is the low
// bits of the sum. The + 64 and + 32 put the bias of the result there.
constexpr float kRound64 = 12582912.0f + 64.0f;
constexpr float kRound32 = 12582912.0f;

constexpr float kLog2e = 0x1.715476p+0f;
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
// polynomials in q = (t - K)/(t + K), relative error 2^-26.5 and 2^-27. Both
// forms are exact at t = 0, and none of their terms cancel.
// Narrow: R and G are minimax polynomials in
// w = 1/(t + K), relative error 2^-20 up to t = 4 and 2^-14 beyond 6, where
// only bf16 has normal results.

// Beyond these, t Q and t phi are below half the least subnormal.
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

constexpr float kTopTanh = 11.0f;
constexpr float kTopTanhNarrow = 10.84375f;

constexpr float kA = 0x1.988454p+0f;
constexpr float kAHi = 0x1.988p+0f;  // 12 bits
constexpr float kALo = 0x1.14cf5p-14f;
constexpr float kB = 0x1.2444f2p-4f;
constexpr float kBHi = 0x1.244p-4f;  // 12 bits
constexpr float kBLo = 0x1.3ca936p-18f;
constexpr float k3B = 0x1.b6676cp-3f;

// Zero t1 of h, as for t0.
constexpr float kZeroTanhHi = 0x1.8142ap-1f;
constexpr float kZeroTanhLo = -0x1.85a06cp-27f;
constexpr float kZeroTanhA = 1.131591796875f;
constexpr float kZeroTanhB = 0x1.b3f514p-1f;

// v(t) = hi + lo. With h = round8(t): h^2, h^3 and AHi h are exact, and so is
// BHi c, c = high12(h^3). The other terms are small:
//   A t + B t^3 = AHi h + BHi c
//       + ALo h + BLo h^3 + BHi (h^3 - c)
//       + u (A + 3 B h^2 + u (3 B h + B u)),  u = t - h.
// AHi h is a multiple of an ulp of BHi c wherever it is the smaller one, so
// the sum of the two leaves its rounding error as in Fast2Sum.
MK_HD void tanh_exponent(float t, float& hi, float& lo) {
  const float h = round8(t);
  const float h2 = h * h;
  const float h3 = h2 * h;
  const float c = high12(h3);
  const float a = kAHi * h;
  const float b = kBHi * c;
  hi = a + b;
  const float u = t - h;
  const float slope = kA + k3B * h2 + u * (k3B * h + kB * u);
  lo = (b - (hi - a)) + (kALo * h + (kBLo * h3 + kBHi * (h3 - c))) +
       u * slope;
}

// 2^32 exp(-v)
MK_HD float sigmoid_tail_narrow(float t) {
  return exp2_narrow(
      32.0f - t * (kA * kLog2e + (kB * kLog2e) * (t * t)));
}

}  // namespace math

template <bool Narrow>
MK_HD float gelu_erf(float x) {
  using namespace math;
  const float t = clamped_abs(x, Narrow ? kTopErfNarrow : kTopErf);
  if (Narrow) {
    const float w = reciprocal_narrow(t + 3.5f);
    float p = -0x1.6f324p-25f;  // 2^-32 R(t)
    p = p * w + 0x1.6a379cp-25f;
    p = p * w - 0x1.b21462p-28f;
    p = p * w + 0x1.4c8fd6p-29f;
    p = p * w + 0x1.cd7a74p-33f;
    p = p * w + 0x1.af0f18p-34f;
    p = p * w - 0x1.a3f596p-44f;
    return relu(x) - (p * gauss_narrow(t)) * t;
  }
  const float q = (t - 4.5f) / (t + 4.5f);
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
    const float w = reciprocal_narrow(t + 3.0f);
    float p = 0x1.721f22p-30f;  // 2^-32 G(t) / a
    p = p * w - 0x1.38b154p-30f;
    p = p * w - 0x1.7e0afcp-33f;
    p = p * w - 0x1.34fb36p-33f;
    p = p * w - 0x1.e45552p-35f;
    p = p * w - 0x1.424c8ep-34f;
    d = (p * (kZeroErfA * t - kZeroErfB)) * gauss_narrow(t);
  } else {
    const float q = (t - 2.5f) / (t + 2.5f);
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
    return relu(x) - (e * reciprocal_narrow(0x1p32f + e)) * t;
  }
  float hi, lo;
  tanh_exponent(t, hi, lo);
  const Exp e = exp64(hi + lo, hi, lo);
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
    const float u = e * reciprocal_narrow(0x1p32f + e);
    const float k = t * (kA + k3B * (t * t));
    const float far = 1.0f - (k - u * k);
    const float z = kZeroTanhA * t - kZeroTanhB;
    float p = -0x1.be5adcp-5f;
    p = p * t - 0x1.475d84p-1f;
    p = p * t - 0x1.2bd09cp+0f;
    const float near = z * p;
    const float az = from_bits(bits(z) & 0x7fffffffu);
    d = u * (az < 0x1.1p-4f ? near : far);
  } else {
    // With s = t - t1, k = t (t + t1), y = v(t) - v(t1), E1 = exp(-v(t1)):
    //   y = s (A + B t1^2 + B k),
    //   h(t) = h(t) - h(t1) = E1 expm1(-y) - s (A + 3 B t1^2 + 3 B k),
    // two terms of one sign, and E = E1 exp(-y). y is reduced as in exp64 with
    // kV1Hi on the grid of kLn2Hi, so hi - kV1Hi + n kLn2Hi is exact.
    constexpr float kV1Hi = 0x1.3b2cp+0f;  // v(t1)
    constexpr float kV1Lo = 0x1.ee71f4p-17f;
    constexpr float kE1 = 0x1.2af64ep-2f;
    constexpr float kInvE1 = 0x1.b66c64p+1f;
    constexpr float kY0 = 0x1.a2dc0cp+0f;  // A + B t1^2
    constexpr float kH0 = 0x1.b78b7ap+0f;  // A + 3 B t1^2
    float hi, lo;
    tanh_exponent(t, hi, lo);
    const float s = (t - kZeroTanhHi) - kZeroTanhLo;
    const float t_t1 = t + kZeroTanhHi;
    const float z = ((hi - kV1Hi) + lo) * -kLog2e + kRound64;
    const float n = z - kRound64;
    const float r0 = (-hi - (n * kLn2Hi - kV1Hi)) - ((lo - kV1Lo) + n * kLn2Lo);
    // Near t1 the product is relatively accurate, r0 only absolutely.
    const float r = n == 0.0f ? -s * (kY0 + (kB * t) * t_t1) : r0;
    const Exp e = {from_bits((bits(z) << 23) + 0x3f800000u), expm1_reduced(r)};
    const float pc = e.scale * e.c;
    const float e_e1 = (kE1 * 0x1p-64f) * (pc + (e.scale - 0x1p64f));  // E - E1
    const float h = e_e1 - s * (kH0 + (k3B * t) * t_t1);
    // d = 2^64 exp(-y) h / (2^64 / E1 * (1 + E)^2), and
    // (1 + E)^2 / E1 = 1 / E1 + 2 exp(-y) + E1 exp(-y)^2 rounds less than 1 + E.
    const float g = (e.scale + pc) * 0x1p-64f;  // exp(-y)
    d = times(h, e) / (0x1p64f * kInvE1 + (0x1p64f * g) * (2.0f + kE1 * g));
  }
  return x < 0.0f ? d : 1.0f - d;
}

// ---- double ---------------------------------------------------------------

namespace math {

// a * b = hi + lo
MK_HD double mul_error(double a, double b, double hi) { return fma(a, b, -hi); }

// min(|x|, top); NaN stays NaN.
MK_HD double clamped_abs(double x, double top) {
  const double t = fabs(x);
  return t > top ? top : t;
}

constexpr double kTopErfDouble = 39.5;
constexpr double kTopTanhDouble = 22.0;

// phi(t), the exponent's rounding error put back.
MK_HD double phi(double t) {
  const double s = t * t;
  return 0x1.9884533d43651p-2 * exp(-0.5 * s) * (1.0 - 0.5 * mul_error(t, t, s));
}

// Q(t): erfc at the rounded t / sqrt 2, plus its slope times the rounding.
MK_HD double erf_tail(double t, double phi_t) {
  const double c = 0x1.6a09e667f3bcdp-1, c_lo = -0x1.bdd3413b26456p-55;
  const double a = t * c;
  const double a_lo = mul_error(t, c, a) + t * c_lo;
  return 0.5 * erfc(a) - phi_t * (a_lo * 1.4142135623730951);
}

// exp(-v(t)), v = t c, c = A + B t^2, both in two doubles. a has 37 bits, so
// a - c is exact and the fma leaves the rounding error of c.
MK_HD double tanh_exp(double t) {
  const double a = 0x1.9884533d4p+0, a_lo = 0x1.b284687e59e28p-39;
  const double b = 0x1.2444f2a4d8b4bp-4, b_lo = -0x1.6c843a29d1c70p-61;
  const double s = t * t, s_lo = mul_error(t, t, s);
  const double c = a + b * s;
  const double c_lo = fma(b, s, a - c) + (b * s_lo + (b_lo * s + a_lo));
  const double v = t * c, v_lo = mul_error(t, c, v) + t * c_lo;
  return exp(-v) * (1.0 - v_lo);
}

// Taylor series about a zero: s (c0 + c1 s + ...), |s| <= 1/4.
MK_HD double around_zero(const double (&c)[21], double s) {
  double p = c[20];
  for (int i = 19; i >= 0; --i) p = p * s + c[i];
  return p * s;
}

}  // namespace math

MK_HD double gelu_erf(double x) {
  using namespace math;
  const double t = clamped_abs(x, kTopErfDouble);
  return (x < 0.0 ? -0.0 : x) - t * erf_tail(t, phi(t));
}

MK_HD double gelu_erf_grad(double x) {
  using namespace math;
  // Coefficients of the series of phi(t) (t^2 - 2) = d'(t) at t0, integrated.
  constexpr double series[21] = {
      -0x1.b9d98fa5a3215p-2, 0x1.8d9a941de3ac5p-2, 0x1.2a2ef9bb865aep-6,
      -0x1.d2fa4c17c7e84p-4, 0x1.e4088244f901dp-7, 0x1.3e346def42057p-6,
      -0x1.297b9d6ffaacdp-8, -0x1.258a6d85633afp-9, 0x1.8680f74e6b6bap-11,
      0x1.86c863b66083cp-13, -0x1.69610924deba8p-14, -0x1.784acad4b941ep-17,
      0x1.03fec69bdd554p-17, 0x1.d0c38b7a117ccp-22, -0x1.322a347f1968bp-21,
      -0x1.b9057b3d93486p-30, 0x1.3099122c48e32p-25, -0x1.7ffd0f708645ap-30,
      -0x1.0592d74158a0ap-29, 0x1.3effe0efcb25fp-33, 0x1.89a0774eb6048p-34};
  const double t = clamped_abs(x, kTopErfDouble);
  const double s = (t - 0x1.80ead197f00b4p-1) - -0x1.13e74c58cada8p-56;
  const double f = phi(t);
  const double d = fabs(s) <= 0.25 ? around_zero(series, s) : erf_tail(t, f) - t * f;
  return x < 0.0 ? d : 1.0 - d;
}

MK_HD double gelu_tanh(double x) {
  using namespace math;
  const double t = clamped_abs(x, kTopTanhDouble);
  const double e = tanh_exp(t);
  return (x < 0.0 ? -0.0 : x) - t * e / (1.0 + e);
}

MK_HD double gelu_tanh_grad(double x) {
  using namespace math;
  // Series of d at t1.
  constexpr double series[21] = {
      -0x1.b8bacd2c96b91p-2, 0x1.8cd1a2b2fff33p-2, 0x1.029615edb077ap-6,
      -0x1.d2b77346470abp-4, 0x1.104a83edc0ddcp-6, 0x1.427996dc249cep-6,
      -0x1.58c9ed713486cp-8, -0x1.3d8d64170bb72p-9, 0x1.e63f294331885p-11,
      0x1.14bf895a69517p-12, -0x1.04936f0ef73dbp-13, -0x1.253bce9ecae48p-15,
      0x1.0b9c949575db9p-16, 0x1.8d30f995eee7cp-18, -0x1.46a0328d00b7ap-19,
      -0x1.09b6fd46ae70ap-20, 0x1.cecf33fcf1fa4p-22, 0x1.3007fe1df4050p-23,
      -0x1.43036bb90f7d1p-24, -0x1.23aefd74d1787p-26, 0x1.9b012e1b21a3bp-27};
  const double t = clamped_abs(x, kTopTanhDouble);
  const double s = (t - 0x1.81429f9e97e4dp-1) - -0x1.4f523ed77dbdcp-55;
  const double e = tanh_exp(t);
  const double h = 1.0 + e - t * (0x1.9884533d43651p+0 + 0x1.b6676bf7450f0p-3 * (t * t));
  const double d =
      fabs(s) <= 0.25 ? around_zero(series, s) : e / ((1.0 + e) * (1.0 + e)) * h;
  return x < 0.0 ? d : 1.0 - d;
}

}  // namespace memkern
