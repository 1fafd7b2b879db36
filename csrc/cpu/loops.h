// What the CPU loops share: 16-bit storage, clones for newer instruction sets, threads.
#pragma once

#include "../math.h"
#include "../tensor.h"

// One copy of a loop for each x86-64 level, the best one picked when the library is loaded. The clones
// call only inlined code, so each is compiled for its level as a whole.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MEMKERN_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MEMKERN_CLONES
#endif

// For the lambdas in such loops, which the compiler would at times leave out of line, and so for the oldest level.
#define MEMKERN_INLINED __attribute__((always_inline))

namespace memkern {

// Storage of the 16-bit dtypes. Conversions are integer arithmetic with selects, which every clone
// vectorises; <immintrin.h> would tie them to one level, and _Float16 is not vectorised by GCC 12.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

MK_HD uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
MK_HD float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

MK_HD double widen(double x) { return x; }
MK_HD float widen(float x) { return x; }
MK_HD float widen(BFloat16 x) { return float_of(uint32_t(x.bits) << 16); }
MK_HD float widen(Half x) {
  // Normal: exponent and mantissa shifted into fp32 place, and the exponent rebiased. Subnormal: its bits count
  // 2^-24; fp32 subnormals, which are slow, do not come up.
  const uint32_t magnitude = x.bits & 0x7fffu, shifted = magnitude << 13;
  const uint32_t normal = shifted + 0x38000000u, special = shifted | 0x7f800000u;  // infinity, NaN
  const uint32_t subnormal = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t finite = magnitude < 0x400u ? subnormal : normal;
  return float_of((uint32_t(x.bits & 0x8000u) << 16) | (magnitude >= 0x7c00u ? special : finite));
}

MK_HD void store(double* to, double x) { *to = x; }
MK_HD void store(float* to, float x) { *to = x; }
MK_HD void store(BFloat16* to, float x) {
  // Round to nearest even: add half an ulp (less one where the kept part is even) and truncate.
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  to->bits = uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}
MK_HD void store(Half* to, float x) {
  const uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  // Normal result: rebias the exponent and round as above. Subnormal result: adding 0.5 lines the
  // mantissa up with fp16's smallest step, and the addition itself rounds to nearest even.
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  // 65520 is the first magnitude that rounds to infinity.
  const uint32_t high = magnitude >= 0x477ff000u ? 0x7c00u : finite;
  to->bits = uint16_t(sign | (magnitude > 0x7f800000u ? 0x7e00u : high));
}

// Calls body(type tag) for the storage type of dtype.
template <class Body>
void for_dtype(ScalarType dtype, Body body) {
  switch (dtype) {
    case ScalarType::Half: return body(Half{});
    case ScalarType::BFloat16: return body(BFloat16{});
    case ScalarType::Float: return body(float{});
    case ScalarType::Double: return body(double{});
    default: STD_TORCH_CHECK(false, "x: needs float16, bfloat16, float32 or float64");
  }
}

}  // namespace memkern
