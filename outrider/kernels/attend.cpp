// Attention of a few queries over a text that is cached: every key and value is read once for all queries that share its head.
//
// out[r, i, h] = sum over j of softmax over j (scale * q[r, h, i] . k[r, g, j] + mask[r, i, j]) * v[r, g, j], in float32, where g is
// the head of keys that h shares.  Keys come in blocks, counted from the text's beginning, and each query is summed over them in
// that order, whatever else is computed with it: a row's result does not depend on how many rows there are.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "operators.h"
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

using namespace outrider;

namespace {

constexpr int BLOCK = 16 * LANES;  // keys
constexpr int TOGETHER = 4;        // queries that pass over a key while it is in a register
constexpr int WIDE = LANES == 16 ? 4 : 2;  // vectors of a value that are summed in registers, for as many queries
constexpr int MOST_QUERIES = 32;   // of one head of keys; more are a prompt's, for which torch's products of matrices are faster

struct Strided {  // [R, heads, n, d], the last dimension without holes
  const float* data;
  int64_t rows, heads, count, size, row, head, step;
  explicit Strided(AtenTensorHandle tensor) {
    int64_t *sizes = nullptr, *strides = nullptr;
    void* at = nullptr;
    sure(aoti_torch_get_sizes(tensor, &sizes));
    sure(aoti_torch_get_strides(tensor, &strides));
    sure(aoti_torch_get_data_ptr(tensor, &at));
    data = static_cast<const float*>(at);
    rows = sizes[0], heads = sizes[1], count = sizes[2], size = sizes[3];
    row = sizes[0] > 1 ? strides[0] : 0, head = sizes[1] > 1 ? strides[1] : 0, step = sizes[2] > 1 ? strides[2] : 0;
    if (strides[3] != 1 && sizes[3] > 1) throw std::runtime_error("outrider::attend: the last dimension of an argument has holes");
  }
  const float* at(int64_t r, int64_t h, int64_t i) const { return data + r * row + h * head + i * step; }
};

inline Floats load(const float* at) { return *reinterpret_cast<const Floats*>(at); }
inline void store(float* at, Floats value) { *reinterpret_cast<Floats*>(at) = value; }

// Sums of neighbours: of a the first half of the result, of b the second.
template <int... N>
inline Floats pairs(Floats a, Floats b, std::integer_sequence<int, N...>) {
  return __builtin_shufflevector(a, b, (2 * N)...) + __builtin_shufflevector(a, b, (2 * N + 1)...);
}

// One vector of the sums over the lanes of each of COUNT vectors.
template <int COUNT>
inline Floats sums(Floats* of) {
  if constexpr (COUNT == 1) return of[0];
#pragma GCC unroll 16
  for (int n = 0; n < COUNT / 2; ++n) of[n] = pairs(of[2 * n], of[2 * n + 1], std::make_integer_sequence<int, LANES>{});
  return sums<std::max(1, COUNT / 2)>(of);
}

inline float highest_of(Floats of) {
  float most = of[0];
  for (int n = 1; n < LANES; ++n) most = std::max(most, of[n]);
  return most;
}

// e^x for x of 0 or less; 0 below -87.
inline Floats exponential(Floats x) {
  const Floats low = Floats{} - 87.f, held = x < low ? low : x, shift = Floats{} + 12582912.f;  // 1.5 * 2^23: rounds what is added
  const Floats whole = held * 1.44269504f + shift, n = whole - shift;
  const Floats left = (held - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats sum = Floats{} + 1.f / 5040;
  for (const float term : {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, .5f, 1.f, 1.f}) sum = sum * left + term;
  const Words power = reinterpret_cast<Words>(whole) << 23;
  return x < low ? Floats{} : reinterpret_cast<Floats>(reinterpret_cast<Words>(sum) + power);
}

struct Pass {
  Strided q, k, v, mask;
  float scale;
  float* out;  // [R, n, heads, d]
  int64_t shared = q.heads / k.heads, queries = shared * q.count;

  // The queries of one head of keys, one after the other: those of its first head first.
  const float* query(int64_t r, int64_t g, int64_t i) const { return q.at(r, g * shared + i / q.count, i % q.count); }
  float* result(int64_t r, int64_t g, int64_t i) const {
    return out + ((r * q.count + i % q.count) * q.heads + g * shared + i / q.count) * q.size;
  }

  // scores[i, j] of Q queries over keys [first, first + count), and the highest of each; -inf up to whole vectors.
  template <int Q>
  void score(int64_t r, int64_t g, int64_t from, int64_t first, int64_t count, float* scores, float* highest) const {
    const float *asked[Q], *hidden[Q];
    Floats most[Q];
    for (int i = 0; i < Q; ++i) {
      asked[i] = query(r, g, from + i), hidden[i] = mask.at(r, 0, (from + i) % q.count) + first;
      most[i] = Floats{} - INFINITY;
    }
    for (int64_t j = 0; j < count; j += LANES) {
      Floats parts[Q][LANES];
      const int many = static_cast<int>(std::min<int64_t>(LANES, count - j));
      for (int n = 0; n < LANES; ++n) {
        const float* key = k.at(r, g, first + (n < many ? j + n : 0));  // after the last key: any, to be masked
        Floats sum[Q] = {};
        for (int64_t d = 0; d < k.size; d += LANES) {
          const Floats own = load(key + d);
          for (int i = 0; i < Q; ++i) sum[i] += own * load(asked[i] + d);
        }
        for (int i = 0; i < Q; ++i) parts[i][n] = sum[i];
      }
      for (int i = 0; i < Q; ++i) {
        Floats own = Floats{} - INFINITY;
        if (many == LANES)
          own = load(hidden[i] + j);
        else
          for (int n = 0; n < many; ++n) own[n] = hidden[i][j + n];
        own += sums<LANES>(parts[i]) * scale;
        store(scores + i * BLOCK + j, own);
        most[i] = own > most[i] ? own : most[i];
      }
    }
    for (int i = 0; i < Q; ++i) highest[i] = highest_of(most[i]);
  }

  // Scores to weights e^(score - highest); returns their sum.
  static float weigh(float* scores, int64_t count, float highest) {
    Floats sum = {};
    for (int64_t j = 0; j < count; j += LANES) {
      const Floats weight = exponential(load(scores + j) - highest);
      store(scores + j, weight);
      sum += weight;
    }
    float total = 0;
    for (int n = 0; n < LANES; ++n) total += sum[n];
    return total;
  }

  // Add the values of keys [first, first + count) to what Q queries have: held[i, d] = held * factor + sum of weight * value.
  template <int Q, int V>
  void gather(int64_t r, int64_t g, int64_t first, int64_t count, const float* weights, const float* factors, float* held, int64_t d) const {
    Floats sum[Q][V];
    for (int i = 0; i < Q; ++i)
      for (int n = 0; n < V; ++n) sum[i][n] = load(held + i * v.size + d + n * LANES) * factors[i];
    for (int64_t j = 0; j < count; ++j) {
      const float* value = v.at(r, g, first + j) + d;
      for (int n = 0; n < V; ++n) {
        const Floats own = load(value + n * LANES);
        for (int i = 0; i < Q; ++i) sum[i][n] += own * weights[i * BLOCK + j];
      }
    }
    for (int i = 0; i < Q; ++i)
      for (int n = 0; n < V; ++n) store(held + i * v.size + d + n * LANES, sum[i][n]);
  }

  // Q queries, from number `from`, over one block of keys.
  template <int Q>
  void block(int64_t r, int64_t g, int64_t from, int64_t first, int64_t count, float* highest, float* total, float* held) const {
    float scores[Q * BLOCK], found[Q], factors[Q];
    score<Q>(r, g, from, first, count, scores, found);
    bool is_any = false;
    for (int i = 0; i < Q; ++i) {
      const float most = std::max(found[i], highest[i]);
      factors[i] = highest[i] == most ? 1.f : std::exp(highest[i] - most);
      is_any |= found[i] > -INFINITY;
      total[i] = total[i] * factors[i] + (most > -INFINITY ? weigh(scores + i * BLOCK, count, most) : 0.f);
      highest[i] = most;
    }
    if (!is_any) return;
    int64_t d = 0;
    for (; d + WIDE * LANES <= v.size; d += WIDE * LANES) gather<Q, WIDE>(r, g, first, count, scores, factors, held, d);
    for (; d < v.size; d += LANES) gather<Q, 1>(r, g, first, count, scores, factors, held, d);
  }

  // As `block`, for a number of queries that is known only now.
  template <int Q = TOGETHER>
  void blocks(int64_t many, int64_t r, int64_t g, int64_t from, int64_t first, int64_t count, float* highest, float* total, float* held) const {
    if constexpr (Q > 0) {
      if (many == Q) return block<Q>(r, g, from, first, count, highest, total, held);
      blocks<Q - 1>(many, r, g, from, first, count, highest, total, held);
    }
  }

  // All queries of one head of keys.
  void head(int64_t r, int64_t g) const {
    std::vector<float> highest(queries, -INFINITY), total(queries, 0.f), held(queries * v.size, 0.f);
    for (int64_t first = 0; first < k.count; first += BLOCK) {
      const int64_t count = std::min<int64_t>(BLOCK, k.count - first);
      for (int64_t i = 0; i < queries; i += TOGETHER)
        blocks(std::min<int64_t>(TOGETHER, queries - i), r, g, i, first, count, &highest[i], &total[i], &held[i * v.size]);
    }
    for (int64_t i = 0; i < queries; ++i) {
      float* to = result(r, g, i);
      const float factor = total[i] > 0 ? 1 / total[i] : 0;
      for (int64_t d = 0; d < v.size; d += LANES) store(to + d, load(&held[i * v.size + d]) * factor);
    }
  }

  void run() const {
    const int64_t tasks = q.rows * k.heads;
    const bool alone = q.rows * q.heads * q.count * k.count * q.size < SMALL;
#pragma omp parallel for schedule(static) if (!alone)
    for (int64_t task = 0; task < tasks; ++task) head(task / k.heads, task % k.heads);
  }
};

}  // namespace

// q [R, heads, n, d], k and v [R, kv heads, m, d], mask [R or 1, 1, n, m], float32; result [R, heads, n, d], laid out as [R, n, heads, d].
extern "C" AOTITorchError aoti_torch_cpu_attend(
    AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, AtenTensorHandle mask, double scale, AtenTensorHandle* result) {
  Pass pass{Strided(q), Strided(k), Strided(v), Strided(mask), static_cast<float>(scale), nullptr};
  const int64_t n = pass.q.count, heads = pass.q.heads, size = pass.q.size;
  const int64_t shape[] = {pass.q.rows, heads, n, size}, strides[] = {n * heads * size, size, heads * size, 1};
  sure(aoti_torch_empty_strided(4, shape, strides, aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, result));
  if (pass.queries > MOST_QUERIES || size % LANES || pass.v.size != size) {
    AtenTensorHandle found = nullptr, sums = nullptr;
    sure(aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, 0, &mask, &scale, &found, &sums));
    sure(aoti_torch_copy_(*result, found, 0));  // it lies as q does
    sure(aoti_torch_delete_tensor_object(found));
    sure(aoti_torch_delete_tensor_object(sums));
    return AOTI_TORCH_SUCCESS;
  }
  void* to = nullptr;
  sure(aoti_torch_get_data_ptr(*result, &to));
  pass.out = static_cast<float*>(to);
  pass.run();
  return AOTI_TORCH_SUCCESS;
}

namespace {

void boxed(uint64_t* stack, uint64_t, uint64_t) {
  AtenTensorHandle given[4], result;
  double scale;
  for (int n = 0; n < 4; ++n) given[n] = reinterpret_cast<AtenTensorHandle>(stack[n]);
  std::memcpy(&scale, stack + 4, sizeof scale);
  aoti_torch_cpu_attend(given[0], given[1], given[2], given[3], scale, &result);
  for (AtenTensorHandle each : given) sure(aoti_torch_delete_tensor_object(each));
  stack[0] = reinterpret_cast<uint64_t>(result);
}

const Operator attends("attend", "attend(Tensor q, Tensor k, Tensor v, Tensor mask, float scale) -> Tensor", boxed);

}  // namespace
