// Draws, and the acceptance rule for a draft's logits.
//
// A draw is the token with the largest weight / E, where E is exponential noise of the row's key and the token.  The noise is that of
// `decoding/noise.py`, to the bit, and so is the winner, but for ties within the last bit of a logarithm.  Noise is E = -log(u), and
// -log(u) is at least 1 - u: weight / (1 - u) bounds what a token reaches, so that a logarithm is taken only of the few tokens that may
// lead.
//
// `accept` is `decoding/accept.py` from logits: it reads only the rows that the walk comes to, and keeps one distribution of a slot.

#include <algorithm>
#include <cmath>
#include <type_traits>
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

enum Purpose : uint64_t { DRAFT = 1, ACCEPT = 2, TARGET = 3 };

struct Stream {  // the noise of a slot
  uint64_t seed, index;
  uint64_t key(int64_t depth, Purpose purpose) const {
    uint64_t counter = (index + static_cast<uint64_t>(depth)) * (3 * STEP) + purpose;
    if (purpose == DRAFT) counter += mixed(index + 1);
    return mixed(mixed(seed + STEP) ^ mixed(counter));
  }
  double coin(int64_t depth, int64_t node) const { return unit(mixed(key(depth, ACCEPT) + static_cast<uint64_t>(node) * STEP)); }
};

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

template <class Real>
double total(const Real* values, int64_t count) {
  double sum = 0;
  for (int64_t begin = 0; begin < count; begin += CHUNK) {
    const int64_t end = std::min(count, begin + CHUNK);
    int64_t at = begin;
    if constexpr (std::is_same_v<Real, float>) {
      Floats lanes = {};
      for (; at + LANES <= end; at += LANES) lanes += load(values + at);
      for (int n = 0; n < LANES; ++n) sum += lanes[n];
    }
    for (; at < end; ++at) sum += values[at];
  }
  return sum;
}

template <class Real>
void scaled(Real* values, int64_t count, Real factor) {
  for (int64_t at = 0; at < count; ++at) values[at] *= factor;
}

// The largest value; NaN where any is.
template <class Real>
Real largest(const Real* values, int64_t count) {
  Real most = values[0];
  bool is_number = true;
  int64_t at = 0;
  if constexpr (std::is_same_v<Real, float>)
    if (count >= LANES) {
      Floats lanes = load(values);
      Ints numbers = lanes == lanes;
      for (; at + LANES <= count; at += LANES) {
        const Floats own = load(values + at);
        numbers &= own == own;
        lanes = own > lanes ? own : lanes;
      }
      for (int n = 0; n < LANES; ++n) is_number &= numbers[n] != 0, most = std::max(most, lanes[n]);
    }
  for (; at < count; ++at) is_number &= values[at] == values[at], most = std::max(most, values[at]);
  return is_number ? most : NAN;
}

// softmax(logits / temperature), or all at the first largest at temperature 0.  False, and NaN everywhere, where the largest is not finite.
template <class Real>
bool distribution(const Real* logits, int64_t count, Real temperature, Real* p) {
  const Real most = largest(logits, count);
  int64_t at = 0;
  if (!std::isfinite(most)) {
    std::fill(p, p + count, Real(NAN));
    return false;
  }
  if (temperature == 0) {
    std::fill(p, p + count, Real(0));
    p[std::find(logits, logits + count, most) - logits] = 1;
    return true;
  }
  if constexpr (std::is_same_v<Real, float>) {
    for (; at + LANES <= count; at += LANES) store(p + at, exponential((load(logits + at) - most) / temperature));
    for (; at < count; ++at) p[at] = exponential(Floats{} + (logits[at] - most) / temperature)[0];
  }
  for (; at < count; ++at) p[at] = std::exp((logits[at] - most) / temperature);
  scaled(p, count, static_cast<Real>(1 / total(p, count)));
  return true;
}

// norm(max(left - q, 0)), or `left` itself where nothing remains.  q: null is one-hot at `token`, or nothing where that is -1.
template <class Real>
void residual(Real* left, const Real* q, int64_t token, int64_t count) {
  const auto rest = [&](int64_t at) { return std::max<Real>(left[at] - (q ? q[at] : Real(at == token)), 0); };
  double parts[16] = {}, mass = 0;  // side by side: one sum would wait for itself
  int64_t begin = 0;
  for (; begin + 16 <= count; begin += 16)
    for (int n = 0; n < 16; ++n) parts[n] += rest(begin + n);
  for (; begin < count; ++begin) parts[0] += rest(begin);
  for (const double part : parts) mass += part;
  if (!(mass > 1e-12)) return;
  const Real factor = static_cast<Real>(1 / mass);
  for (int64_t at = 0; at < count; ++at) left[at] = rest(at) * factor;
}

template <class Real>
bool is_distribution(const Real* q, int64_t count, int64_t token) {
  const double sum = total(q, count);
  return std::fabs(sum - 1) < 1e-3 && q[token] > 0 && *std::min_element(q, q + count) >= 0;
}

template <class Real>
struct Given {  // of one slot
  const Real *logits, *q;
  int64_t nodes, vocabulary;
  const int64_t *tokens, *parents;
  int64_t size;
  Real temperature;
  Stream stream;
  bool is_seeded;
};

// A slot's path and padding, its length, the next token, invalid nodes, and whether all logits that were read are finite.
template <class Real>
void walk(const Given<Real>& slot, int64_t* out) {
  thread_local std::vector<Real> left;
  left.resize(slot.vocabulary);
  std::fill(out, out + slot.nodes, -1);
  int64_t at = -1, depth = 0, invalid = 0;
  bool finite = true;
  const auto enter = [&](int64_t row) {
    finite &= distribution(slot.logits + row * slot.vocabulary, slot.vocabulary, slot.temperature, left.data());
  };
  const auto own = [&] { return leader(left.data(), slot.stream.key(depth, TARGET), 0, slot.vocabulary).token; };
  const bool by_match = !slot.q || slot.is_seeded;  // nodes are deterministic
  enter(0);
  int64_t wanted = by_match ? own() : -1;
  for (int64_t n = 0; n < slot.size; ++n) {
    const int64_t token = slot.tokens[n];
    const bool known = token >= 0 && token < slot.vocabulary;
    const Real* q = by_match ? nullptr : slot.q + n * slot.vocabulary;
    const bool valid = known && (by_match || is_distribution(q, slot.vocabulary, token));
    invalid += !valid;
    if (slot.parents[n] != at) continue;
    const double share = valid && q ? q[token] : 1;
    const bool passed = known && (by_match ? token == wanted : slot.stream.coin(depth, n) * share < left[token]);
    if (!passed) {
      if (!by_match) residual(left.data(), valid ? q : nullptr, known ? token : -1, slot.vocabulary);
      continue;
    }
    out[depth++] = at = n;
    enter(n + 1);
    if (by_match) wanted = own();
  }
  int64_t* end = out + slot.nodes;
  end[0] = depth, end[1] = by_match ? wanted : own(), end[2] = invalid, end[3] = finite;
}

}  // namespace

// weights [..., vocabulary], float32 or float64, and keys [...], both contiguous; result [...] int64.
extern "C" AOTITorchError aoti_torch_cpu_race(AtenTensorHandle weights, AtenTensorHandle keys, AtenTensorHandle* result) {
  int64_t dims = 0, *sizes = nullptr, *shape = nullptr, *strides = nullptr, rows = 1;
  int32_t type = 0;
  void *from = nullptr, *by = nullptr, *to = nullptr;
  sure(aoti_torch_get_dim(weights, &dims));
  sure(aoti_torch_get_sizes(weights, &sizes));
  sure(aoti_torch_get_dtype(weights, &type));
  sure(aoti_torch_get_sizes(keys, &shape));
  sure(aoti_torch_get_strides(keys, &strides));
  for (int64_t d = 0; d < dims - 1; ++d) rows *= sizes[d];
  sure(aoti_torch_empty_strided(dims - 1, shape, strides, aoti_torch_dtype_int64(), aoti_torch_device_type_cpu(), 0, result));
  sure(aoti_torch_get_data_ptr(weights, &from));
  sure(aoti_torch_get_data_ptr(keys, &by));
  sure(aoti_torch_get_data_ptr(*result, &to));
  const auto* hashes = static_cast<const uint64_t*>(by);
  if (type == aoti_torch_dtype_float64())
    race(static_cast<const double*>(from), rows, sizes[dims - 1], hashes, static_cast<int64_t*>(to));
  else
    race(static_cast<const float*>(from), rows, sizes[dims - 1], hashes, static_cast<int64_t*>(to));
  return AOTI_TORCH_SUCCESS;
}

namespace {

void boxed(uint64_t* stack, uint64_t, uint64_t) {
  AtenTensorHandle weights = reinterpret_cast<AtenTensorHandle>(stack[0]), keys = reinterpret_cast<AtenTensorHandle>(stack[1]), result;
  aoti_torch_cpu_race(weights, keys, &result);
  sure(aoti_torch_delete_tensor_object(weights));
  sure(aoti_torch_delete_tensor_object(keys));
  stack[0] = reinterpret_cast<uint64_t>(result);
}

const Operator races("race", "race(Tensor weights, Tensor keys) -> Tensor", boxed);

template <class Real>
void accept(const void* logits, const void* q, int64_t slots, int64_t nodes, int64_t vocabulary, const int64_t* tokens, const int64_t* parents,
            const int64_t* sizes, const void* temperature, const uint64_t* seeds, const uint64_t* index, const bool* seeded, int64_t* out) {
  const auto* rows = static_cast<const Real*>(logits);
  const auto* own = static_cast<const Real*>(q);
#pragma omp parallel for schedule(dynamic) if (slots > 1)
  for (int64_t b = 0; b < slots; ++b) {
    const Given<Real> slot = {rows + b * (nodes + 1) * vocabulary, own ? own + b * nodes * vocabulary : nullptr, nodes, vocabulary,
                              tokens + b * nodes, parents + b * nodes, sizes[b], static_cast<const Real*>(temperature)[b],
                              {seeds[b], index[b]}, seeded && seeded[b]};
    walk(slot, out + b * (nodes + 4));
  }
}

template <class Real>
void sample(const void* logits, int64_t rows, int64_t vocabulary, const void* temperature, const uint64_t* keys, void* p, int64_t* tokens) {
#pragma omp parallel for schedule(dynamic) if (rows > 1)
  for (int64_t row = 0; row < rows; ++row) {
    Real* to = static_cast<Real*>(p) + row * vocabulary;
    distribution(static_cast<const Real*>(logits) + row * vocabulary, vocabulary, static_cast<const Real*>(temperature)[row], to);
    tokens[row] = leader(to, keys[row], 0, vocabulary).token;
  }
}

}  // namespace

// logits [slots, nodes + 1, vocabulary]; q [slots, nodes, vocabulary] or null; tokens, parents [slots, nodes]; sizes, temperature, seeds,
// index [slots]; seeded [slots] or null; out [slots, nodes + 4].  Logits, q and temperature are of one type.
extern "C" void outrider_accept(bool is_double, const void* logits, const void* q, int64_t slots, int64_t nodes, int64_t vocabulary,
                                const int64_t* tokens, const int64_t* parents, const int64_t* sizes, const void* temperature,
                                const uint64_t* seeds, const uint64_t* index, const bool* seeded, int64_t* out) {
  (is_double ? accept<double> : accept<float>)(logits, q, slots, nodes, vocabulary, tokens, parents, sizes, temperature, seeds, index, seeded,
                                               out);
}

// logits [rows, vocabulary]; temperature, keys [rows]; p [rows, vocabulary]; tokens [rows].
extern "C" void outrider_sample(bool is_double, const void* logits, int64_t rows, int64_t vocabulary, const void* temperature,
                                const uint64_t* keys, void* p, int64_t* tokens) {
  (is_double ? sample<double> : sample<float>)(logits, rows, vocabulary, temperature, keys, p, tokens);
}
