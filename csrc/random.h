// Random numbers that are a function of a seed and a position, so that backward draws forward's again.
#pragma once

#include <cstdint>

#include "math.h"

namespace memkern {

struct Numbers {
  uint32_t value[4];
};

// Philox-4x32-10 (Salmon, Moraes, Dror & Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3") of key
// `seed` and counter `block`: the numbers of elements 4 block ... 4 block + 3.
MK_HD Numbers philox(uint64_t seed, uint64_t block) {
  uint32_t a = uint32_t(block), b = uint32_t(block >> 32), c = 0, d = 0;
  uint32_t key = uint32_t(seed), other_key = uint32_t(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t of_a = uint64_t(a) * 0xD2511F53u, of_c = uint64_t(c) * 0xCD9E8D57u;
    a = uint32_t(of_c >> 32) ^ b ^ key;
    b = uint32_t(of_c);
    c = uint32_t(of_a >> 32) ^ d ^ other_key;
    d = uint32_t(of_a);
    key += 0x9E3779B9u;
    other_key += 0xBB67AE85u;
  }
  return {{a, b, c, d}};
}

// Which elements are dropped: those whose number is below floor(rate 2^32). The others are divided by 1 - rate.
template <class A>
struct Dropout {
  const int64_t* seed;  // null where there is no dropout
  uint32_t threshold;
  A factor;

  MK_HD uint64_t read_seed() const { return seed ? uint64_t(*seed) : 0; }
  MK_HD A operator()(A value, uint32_t number) const { return number >= threshold ? value * factor : A(0); }
};

}  // namespace memkern
