// Draws: for each row of weights the token with the largest weight / E, where E is exponential noise of the row's key and the token.
//
// The noise is that of `decoding/noise.py`, to the bit, and so is the winner, but for ties within the last bit of a logarithm.  Noise is
// E = -log(u), and -log(u) is at least 1 - u: weight / (1 - u) bounds what a token reaches, so that a logarithm is taken only of the
// few tokens that may lead.

#include <algorithm>
#include <cmath>
#include <vector>

#include "operators.h"

using namespace outrider;

namespace {

typedef uint64_t Hashes __attribute__((vector_size(BYTES), aligned(8)));
typedef double Doubles __attribute__((vector_size(BYTES), aligned(8)));
constexpr int WIDE = BYTES / 8, ABREAST = 4;  // vectors, so that multiplications overlap
constexpr int64_t CHUNK = 8192;               // tokens of one thread's task
constexpr uint64_t STEP = 0x9E3779B97F4A7C15ull;
constexpr double SLACK = 1 - 1e-12;  // more than roundings of the bound

template <class T>
inline T mixed(T x) {  // SplitMix64's finaliser
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

inline double unit(uint64_t hash) { return (static_cast<double>(hash >> 12) + .5) * 0x1p-52; }

struct Leader {
  double reached = 0;
  int64_t token = 0;
};

// A token's own value, once its bound has passed.
template <class Weight>
inline void tried(Leader& best, const Weight* weights, uint64_t key, int64_t token) {
  const double weight = weights[token];
  if (!(weight > 0)) return;
  const double reached = weight / -std::log(unit(mixed(key + static_cast<uint64_t>(token) * STEP)));
  if (reached > best.reached) best = {reached, token};
}

// Tokens [begin, end) of one row; of equals the first leads.
template <class Weight>
Leader leader(const Weight* weights, uint64_t key, int64_t begin, int64_t end) {
  Leader best;
  Hashes lanes;
  for (int n = 0; n < WIDE; ++n) lanes[n] = static_cast<uint64_t>(n) * STEP;
  int64_t at = begin;
  for (; at + ABREAST * WIDE <= end; at += ABREAST * WIDE) {
    Hashes may = {};
#pragma GCC unroll 4
    for (int v = 0; v < ABREAST; ++v) {
      const int64_t token = at + v * WIDE;
      // 52 bits as the mantissa of a double of 2^52 and more, which is exact
      const Hashes bits = (mixed(lanes + (key + static_cast<uint64_t>(token) * STEP)) >> 12) | 0x4330000000000000ull;
      const Doubles u = (reinterpret_cast<const Doubles&>(bits) - 0x1p52 + .5) * 0x1p-52;
      Doubles weight;
      for (int n = 0; n < WIDE; ++n) weight[n] = weights[token + n];
      may |= reinterpret_cast<Hashes>(weight > (1 - u) * (best.reached * SLACK));
    }
    uint64_t any = 0;
    for (int n = 0; n < WIDE; ++n) any |= may[n];
    if (any)
      for (int n = 0; n < ABREAST * WIDE; ++n) tried(best, weights, key, at + n);
  }
  for (; at < end; ++at) tried(best, weights, key, at);
  return best;
}

template <class Weight>
void race(const Weight* weights, int64_t rows, int64_t vocabulary, const uint64_t* keys, int64_t* winners) {
  const int64_t chunks = (vocabulary + CHUNK - 1) / CHUNK;
  std::vector<Leader> leaders(rows * chunks);
#pragma omp parallel for schedule(static) if (rows * chunks > 1)
  for (int64_t task = 0; task < rows * chunks; ++task) {
    const int64_t row = task / chunks, begin = task % chunks * CHUNK;
    leaders[task] = leader(weights + row * vocabulary, keys[row], begin, std::min(vocabulary, begin + CHUNK));
  }
  for (int64_t row = 0; row < rows; ++row) {
    Leader best;
    for (int64_t n = row * chunks; n < (row + 1) * chunks; ++n)
      if (leaders[n].reached > best.reached) best = leaders[n];
    winners[row] = best.token;
  }
}

}  // namespace

// weights [rows, vocabulary], float32 or float64; keys [rows]; winners [rows].
extern "C" void outrider_race(const void* weights, bool is_double, int64_t rows, int64_t vocabulary, const uint64_t* keys, int64_t* winners) {
  if (is_double)
    race(static_cast<const double*>(weights), rows, vocabulary, keys, winners);
  else
    race(static_cast<const float*>(weights), rows, vocabulary, keys, winners);
}
