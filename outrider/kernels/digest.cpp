// A hash of what memory holds, at the speed at which it is read.
//
// Each lane folds its words in, one after the other, by a step that can be undone: two buffers that differ in one word always have
// different hashes, and others but by a chance of 2^-32.  Chunks are hashed on their own, so the result does not depend on threads.

#include <algorithm>
#include <cstring>
#include <vector>

#include "operators.h"

using namespace outrider;

namespace {

constexpr int64_t CHUNK = 1 << 18;  // bytes
constexpr int ABREAST = 8;          // vectors, so that multiplications overlap

inline uint64_t folded(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15ull;
  return hash ^ (hash >> 32);
}

uint64_t of_chunk(const uint8_t* data, int64_t bytes) {
  Words lanes[ABREAST] = {};
  int64_t at = 0;
  for (; at + ABREAST * BYTES <= bytes; at += ABREAST * BYTES)
#pragma GCC unroll 8
    for (int v = 0; v < ABREAST; ++v) {
      const Words mixed = (lanes[v] ^ *reinterpret_cast<const Words*>(data + at + v * BYTES)) * 0x85EBCA6Bu;
      lanes[v] = (mixed << 13) | (mixed >> 19);  // or a flipped sign would reach no lower bit, and two of them cancel
    }
  uint64_t hash = static_cast<uint64_t>(bytes);
  for (const Words& vector : lanes)
    for (int n = 0; n < LANES; ++n) hash = folded(hash, vector[n]);
  for (; at < bytes; ++at) hash = folded(hash, data[at]);
  return hash;
}

}  // namespace

extern "C" uint64_t outrider_digest(const void* data, int64_t bytes) {
  const auto* from = static_cast<const uint8_t*>(data);
  const int64_t count = (bytes + CHUNK - 1) / CHUNK;
  std::vector<uint64_t> hashes(count);
#pragma omp parallel for schedule(static) if (count > 1)
  for (int64_t n = 0; n < count; ++n) hashes[n] = of_chunk(from + n * CHUNK, std::min(CHUNK, bytes - n * CHUNK));
  uint64_t hash = 0;
  for (const uint64_t each : hashes) hash = folded(hash, each);
  return hash;
}
