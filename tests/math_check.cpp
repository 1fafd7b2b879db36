// Checks csrc/math.h against double references.
//
//   g++ -O3 -march=native -std=c++17 -fno-math-errno -fno-trapping-math
//       tests/math_check.cpp -o math_check && ./math_check [stride]
//
// The full functions are checked on every stride-th fp32 pattern (stride 1: all;
// the default takes about 20 s), the narrow ones on all fp16 and bf16 patterns. Prints the largest
// error of each in ulp of the result's type and exits with 1 beyond the bounds:
// 4 ulp for fp32, 1 ulp after rounding for the narrow types.
// Contraction changes results: run it with -ffp-contract=off too.
#include "../csrc/math.h"

#include <algorithm>
#include <cfloat>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

constexpr double kBoundFull = 4.0, kBoundNarrow = 1.0;
constexpr long double kC = 0.398942280401432677939946059934381868L;  // phi(0)
constexpr long double kSqrtHalf = 0.707106781186547524400844362104849039L;
constexpr long double kA = 4 * kC, kB = kA * 0.044715L;
constexpr double kT0 = 0.7517915246935645, kT1 = 0.7524614220710163;

bool failed = false;

// erf, erf grad, tanh, tanh grad; lower side -t: {gelu(-t), gelu'(-t)}.
struct Reference {
  double lower[4];
};

template <class T>
void reference_erf(T t, T& g, T& d) {
  const T q = std::erfc(t * T(kSqrtHalf)) / 2;
  g = -t * q;
  d = q - t * T(kC) * std::exp(-t * t / 2);
}

template <class T>
void reference_tanh(T t, T& g, T& d) {
  const T e = std::exp(-t * (T(kA) + T(kB) * t * t));
  g = -t * (e / (1 + e));
  d = e / ((1 + e) * (1 + e)) * (1 + e - t * (T(kA) + 3 * T(kB) * t * t));
}

// Long double beside a zero of the derivative, where double cancels.
Reference reference(double t) {
  Reference r;
  if (t > 30) return {{0, 0, 0, 0}};
  if (t < 0x1p-40)  // the next terms are below 2^-80
    return {{-t / 2, double(0.5 - 2 * kC * t), -t / 2, double(0.5 - kA / 2 * t)}};
  reference_erf<double>(t, r.lower[0], r.lower[1]);
  reference_tanh<double>(t, r.lower[2], r.lower[3]);
  long double g, d;
  if (std::fabs(t - kT0) < 0x1p-10) reference_erf<long double>(t, g, d), r.lower[1] = d;
  if (std::fabs(t - kT1) < 0x1p-10) reference_tanh<long double>(t, g, d), r.lower[3] = d;
  return r;
}

double exact(const Reference& r, int f, double x) {
  if (x <= 0) return r.lower[f];
  return f % 2 ? 1 - r.lower[f] : x + r.lower[f];
}

// Spacing of a type with p significant bits and least normal 2^emin at v.
double spacing(double v, int p, int emin) {
  if (p == 53) return std::ldexp(1.0, std::max(v == 0 ? emin : std::ilogb(v), emin) - 52);
  uint64_t u;
  std::memcpy(&u, &v, 8);
  int e = int((u >> 52) & 0x7ff) - 1023;
  e = (e < emin ? emin : e) - p + 1;
  u = uint64_t(e + 1023) << 52;
  std::memcpy(&v, &u, 8);
  return v;
}

const char* const kNames[4] = {"gelu_erf", "gelu_erf_grad", "gelu_tanh", "gelu_tanh_grad"};

template <bool Narrow>
void evaluate(int f, const float* x, float* y, int n) {
  using namespace memkern;
  switch (f) {
    case 0: for (int i = 0; i < n; ++i) y[i] = gelu_erf<Narrow>(x[i]); break;
    case 1: for (int i = 0; i < n; ++i) y[i] = gelu_erf_grad<Narrow>(x[i]); break;
    case 2: for (int i = 0; i < n; ++i) y[i] = gelu_tanh<Narrow>(x[i]); break;
    default: for (int i = 0; i < n; ++i) y[i] = gelu_tanh_grad<Narrow>(x[i]);
  }
}

float from_pattern(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

void check_full(uint64_t stride) {
  constexpr int kBlock = 1024;
  static float x[2 * kBlock], y[2 * kBlock];
  static Reference refs[kBlock];
  double worst[4] = {}, worst_tail[4] = {};
  float at[4] = {};
  uint64_t u = 0;
  while (u < 0x7f800000u) {
    int n = 0;
    for (; n < kBlock && u < 0x7f800000u; ++n, u += stride) {
      x[2 * n] = from_pattern(uint32_t(u));
      x[2 * n + 1] = -x[2 * n];
      refs[n] = reference(x[2 * n]);
    }
    for (int f = 0; f < 4; ++f) {
      evaluate<false>(f, x, y, 2 * n);
      for (int i = 0; i < 2 * n; ++i) {
        const double e = exact(refs[i / 2], f, x[i]);
        double err = std::fabs(y[i] - e) / spacing(e, 24, -126);
        if (!(err >= 0)) err = INFINITY;
        if (std::fabs(e) < FLT_MIN) {
          if (err > worst_tail[f]) worst_tail[f] = err;
        }
        if (err > worst[f]) worst[f] = err, at[f] = x[i];
      }
    }
  }
  for (int f = 0; f < 4; ++f) {
    const bool bad = worst[f] > kBoundFull;
    failed |= bad;
    std::printf("%-15s fp32  max %.3f ulp at %a (subnormal results %.3f)%s\n", kNames[f],
                worst[f], at[f], worst_tail[f], bad ? "  FAIL" : "");
  }
}

void check_narrow(const char* name, int mantissa, int exponent, int p, int emin) {
  std::vector<float> x, y;
  for (int s = 0; s < 2; ++s)
    for (int e = 0; e < (1 << exponent) - 1; ++e)
      for (int m = 0; m < (1 << mantissa); ++m) {
        const double a = e ? std::ldexp((1 << mantissa) + m, emin + e - 1 - mantissa)
                           : std::ldexp(m, emin - mantissa);
        x.push_back(float(s ? -a : a));
      }
  y.resize(x.size());
  for (int f = 0; f < 4; ++f) {
    evaluate<true>(f, x.data(), y.data(), int(x.size()));
    double worst = 0, relative = 0;
    float at = 0;
    int misrounded = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      const double e = exact(reference(std::fabs(double(x[i]))), f, x[i]);
      const double q = spacing(y[i], p, emin), rounded = std::rint(y[i] / q) * q;
      const double ulp = spacing(e, p, emin);
      double err = std::fabs(rounded - e) / ulp;
      if (!(err >= 0)) err = INFINITY;
      if (err > worst) worst = err, at = x[i];
      misrounded += rounded != std::rint(e / ulp) * ulp;
      if (std::fabs(e) >= std::ldexp(1.0, emin))
        relative = std::fmax(relative, std::fabs((y[i] - e) / e));
    }
    const bool bad = worst > kBoundNarrow;
    failed |= bad;
    std::printf("%-15s %s  max %.4f ulp at %a, %d of %zu not the nearest, relative error 2^%.1f before rounding%s\n",
                kNames[f], name, worst, at, misrounded, x.size(), std::log2(relative),
                bad ? "  FAIL" : "");
  }
}

template <class T, class F>
void check_special(const char* name, bool grad, F f) {
  const T inf = INFINITY;
  const T big[] = {T(1e20), T(3e38), T(FLT_MAX), T(100), T(1e4)};
  bool ok = std::isnan(f(T(NAN))) && std::isnan(f(T(-NAN)));
  if (grad) {
    ok &= std::fabs(f(T(0)) - T(0.5)) < 1e-6 && std::fabs(f(T(-0.0)) - T(0.5)) < 1e-6 && f(inf) == 1 && std::fabs(f(-inf)) < 1e-40;
    for (T b : big) ok &= f(b) == 1 && std::fabs(f(-b)) < 1e-40;
  } else {
    ok &= f(T(0)) == 0 && !std::signbit(f(T(0))) && f(T(-0.0)) == 0 && std::signbit(f(T(-0.0)));
    ok &= f(inf) == inf && std::fabs(f(-inf)) < 1e-40;
    for (T b : big) ok &= f(b) == b && std::fabs(f(-b)) < 1e-40;
  }
  if (!ok) std::printf("%s: special values  FAIL\n", name);
  failed |= !ok;
}

template <class T, class F>
void check_special_loop(const char* name, bool grad, F f) {
  // Through an array, so that the vectorised code is what is checked.
  check_special<T>(name, grad, [&](T v) {
    std::vector<T> x(64, v), y(64);
    f(x.data(), y.data(), 64);
    return y[37];
  });
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t stride = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 5;
  if (stride == 0) return 2;
  for (int f = 0; f < 4; ++f) {
    check_special_loop<float>(kNames[f], f % 2, [f](auto* x, auto* y, int n) { evaluate<false>(f, x, y, n); });
    check_special_loop<float>(kNames[f], f % 2, [f](auto* x, auto* y, int n) { evaluate<true>(f, x, y, n); });
  }
  check_special<double>(kNames[0], false, [](double x) { return memkern::gelu_erf(x); });
  check_special<double>(kNames[1], true, [](double x) { return memkern::gelu_erf_grad(x); });
  check_special<double>(kNames[2], false, [](double x) { return memkern::gelu_tanh(x); });
  check_special<double>(kNames[3], true, [](double x) { return memkern::gelu_tanh_grad(x); });
  check_narrow("fp16", 10, 5, 11, -14);
  check_narrow("bf16", 7, 8, 8, -126);
  check_full(stride);
  std::puts(failed ? "FAILED" : "ok");
  return failed;
}
