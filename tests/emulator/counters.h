// What the tests ask of the emulator (through bindings.cpp).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace memkern_emulated {

// Global memory traffic of one launch in one direction. A warp access is one execution of one load (or
// store) by the lanes of a warp; memory moves in sectors of 32 bytes.
struct Traffic {
  int64_t bytes = 0;           // asked for, summed over threads
  int64_t warp_accesses = 0;
  int64_t sectors = 0;         // touched, summed over warp accesses
  int64_t sectors_needed = 0;  // the fewest that could hold the bytes of each warp access
};

struct Launch {
  std::string kernel;
  int64_t grid;
  int block;
  size_t shared_bytes;
  Traffic loaded, stored;
};

// Starts counting afresh, or stops.
void count(bool on);
std::vector<Launch> launches();
// Blocks, warps and lanes run in an order shuffled by this seed; 0 for their natural order.
void set_order(uint64_t seed);
// Names by distance from the start of the library.
void name_kernels(std::map<uintptr_t, std::string> names);

}  // namespace memkern_emulated
