// Attention over a text that is cached: every key and value is read once for the queries of a step that share its head.
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

constexpr int BLOCK = 128;          // keys
constexpr int TOGETHER = 6;         // queries that pass over a key while it is in a register
constexpr int WIDE = LANES == 16 ? 4 : 2;  // vectors of a value that are summed in registers, for as many queries
constexpr int MOST_QUERIES = 36;    // of one head of keys that pass together: what they have so far stays in the cache

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

// A load that stays in a register: GCC reads memory again for each use otherwise.
inline Floats held_in_register(const float* at) {
  Floats value = load(at);
#if defined(__x86_64__)
  asm("" : "+x"(value));
#elif defined(__aarch64__)
  asm("" : "+w"(value));
#endif
  return value;
}

// Asks for `count` floats that are read soon.
inline void fetch(const float* at, int64_t count) {
  for (int64_t n = 0; n < count; n += 16) __builtin_prefetch(at + n);
}

// Sums of neighbours, those of a before those of b; with AVX2, which shuffles within 16 bytes, the halves of both stay apart up to
// the last level.
template <int COUNT, int... N>
inline Floats neighbours(Floats a, Floats b, std::integer_sequence<int, N...>) {
  if constexpr (LANES != 8)
    return __builtin_shufflevector(a, b, (2 * N)...) + __builtin_shufflevector(a, b, (2 * N + 1)...);
  else if constexpr (COUNT > 2)
    return __builtin_shufflevector(a, b, (N % 2 * 2 + N / 2 % 2 * 8 + N / 4 * 4)...) +
           __builtin_shufflevector(a, b, (N % 2 * 2 + N / 2 % 2 * 8 + N / 4 * 4 + 1)...);
  else
    return __builtin_shufflevector(a, b, (N + N / 4 * 4)...) + __builtin_shufflevector(a, b, (N + N / 4 * 4 + 4)...);
}

// One vector of the sums over the lanes of each of COUNT vectors: of neighbours, then of neighbouring sums.
template <int COUNT>
inline Floats sums(Floats* of) {
  if constexpr (COUNT == 1) return of[0];
#pragma GCC unroll 16
  for (int n = 0; n < COUNT / 2; ++n) of[n] = neighbours<COUNT>(of[2 * n], of[2 * n + 1], std::make_integer_sequence<int, LANES>{});
  return sums<std::max(1, COUNT / 2)>(of);
}

inline float highest_of(Floats of) {
  float most = of[0];
  for (int n = 1; n < LANES; ++n) most = std::max(most, of[n]);
  return most;
}

struct Pass {
  Strided q, k, v, mask;
  float scale;
  float* out;  // [R, n, heads, d]
  int64_t shared = q.heads / k.heads, queries = shared * q.count;  // of one head of keys

  void run() const;
};

// One head of keys of one row, queries [begin, end) of those that share it, those of its first head first, and what they have so far.
class Share {
 public:
  Share(const Pass& pass, int64_t r, int64_t g, int64_t begin, int64_t end)
      : pass(pass), k(pass.k), v(pass.v), r(r), g(g), begin(begin), queries(end - begin), scores(queries * BLOCK), found(queries),
        factors(queries), highest(queries, -INFINITY), total(queries, 0.f), held(queries * v.size, 0.f), seen(queries) {}

  // Over a block of keys, then over its values, so that either stays in the cache; meanwhile what comes next is fetched.
  void run() {
    for (int64_t first = 0; first < k.count; first += BLOCK) {
      const int64_t count = std::min<int64_t>(BLOCK, k.count - first);
      each([&](auto some, int64_t from) { weigh<some>(from, first, count); });
      each([&](auto some, int64_t from) { gather<some>(from, first); });
    }
    for (int64_t i = 0; i < queries; ++i) {
      float* to = pass.out + ((r * pass.q.count + query(i)) * pass.q.heads + head(i)) * v.size;
      const float factor = total[i] > 0 ? 1 / total[i] : 0;
      for (int64_t d = 0; d < v.size; d += LANES) store(to + d, load(&held[i * v.size + d]) * factor);
    }
  }

 private:
  const Pass& pass;
  const Strided &k, &v;
  const int64_t r, g, begin, queries;
  std::vector<float> scores;  // [queries, BLOCK], of this block
  std::vector<float> found;   // the highest of them
  std::vector<float> factors; // by which sums so far shrink
  std::vector<float> highest, total, held;
  std::vector<int64_t> seen;  // keys of this block up to the last one that is not hidden, for queries that pass together

  int64_t head(int64_t i) const { return g * pass.shared + (begin + i) / pass.q.count; }
  int64_t query(int64_t i) const { return (begin + i) % pass.q.count; }

  // act(Q, from) for shares of the queries, Q of them from number `from` on.
  template <class Act>
  void each(const Act& act) const {
    const int64_t parts = (queries + TOGETHER - 1) / TOGETHER;
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t from = queries * part / parts;
      with(queries * (part + 1) / parts - from, from, act);
    }
  }

  template <class Act, int Q = TOGETHER>
  static void with(int64_t many, int64_t from, const Act& act) {
    if constexpr (Q > 0) {
      if (many == Q) return act(std::integral_constant<int, Q>{}, from);
      with<Act, Q - 1>(many, from, act);
    }
  }

  // Scores of Q queries over keys [first, first + count) as far as any is seen, and the highest of each; -inf up to whole vectors.
  template <int Q>
  void score(int64_t from, int64_t first, int64_t count) {
    const float *asked[Q], *hidden[Q];
    Floats most[Q];
    for (int i = 0; i < Q; ++i) {
      asked[i] = pass.q.at(r, head(from + i), query(from + i)), hidden[i] = pass.mask.at(r, 0, query(from + i)) + first;
      most[i] = Floats{} - INFINITY;
    }
    const auto sees = [&](int64_t j) { return std::any_of(hidden, hidden + Q, [&](const float* own) { return own[j] > -INFINITY; }); };
    while (count > 0 && !sees(count - 1)) --count;
    seen[from] = count;
    for (int64_t j = 0; j < count; j += LANES) {
      Floats parts[Q][LANES];
      const int many = static_cast<int>(std::min<int64_t>(LANES, count - j));
#pragma GCC unroll 8
      for (int n = 0; n < LANES; n += 2) {
        // after the last key: any, to be masked
        const float* key = k.at(r, g, first + (n < many ? j + n : 0));
        const float* next = k.at(r, g, first + (n + 1 < many ? j + n + 1 : 0));
        if (!from) fetch(v.at(r, g, first + j + n), v.size), fetch(v.at(r, g, first + j + n + 1), v.size);
        Floats sum[2][Q] = {};
        for (int64_t d = 0; d < k.size; d += LANES) {
          const Floats own = held_in_register(key + d), other = held_in_register(next + d);
#pragma GCC unroll 8
          for (int i = 0; i < Q; ++i) {
            const Floats by = held_in_register(asked[i] + d);
            sum[0][i] += own * by;
            sum[1][i] += other * by;
          }
        }
        for (int i = 0; i < Q; ++i) parts[i][n] = sum[0][i], parts[i][n + 1] = sum[1][i];
      }
      for (int i = 0; i < Q; ++i) {
        Floats own = Floats{} - INFINITY;
        if (many == LANES)
          own = load(hidden[i] + j);
        else
          for (int n = 0; n < many; ++n) own[n] = hidden[i][j + n];
        own += sums<LANES>(parts[i]) * pass.scale;
        store(&scores[(from + i) * BLOCK + j], own);
        most[i] = own > most[i] ? own : most[i];
      }
    }
    for (int i = 0; i < Q; ++i) found[from + i] = highest_of(most[i]);
  }

  // Scores, then the weights of the block's values, e^(score - highest so far), in their place.
  template <int Q>
  void weigh(int64_t from, int64_t first, int64_t count) {
    score<Q>(from, first, count);
    count = seen[from];
    for (int64_t i = from; i < from + Q; ++i) {
      const float most = std::max(found[i], highest[i]);
      factors[i] = highest[i] == most ? 1.f : std::exp(highest[i] - most);
      total[i] = total[i] * factors[i] + (most > -INFINITY ? powers(&scores[i * BLOCK], count, most) : 0.f);
      highest[i] = most;
    }
  }

  // Scores to e^(score - highest); returns their sum.
  static float powers(float* scores, int64_t count, float highest) {
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

  // Adds the values of the keys from `first` on that are seen to what Q queries have.
  template <int Q>
  void gather(int64_t from, int64_t first) {
    if (*std::max_element(&found[from], &found[from] + Q) == -INFINITY) return;
    const int64_t count = seen[from];
    int64_t d = 0;
    for (; d + WIDE * LANES <= v.size; d += WIDE * LANES) add<Q, WIDE>(from, first, count, d);
    for (; d < v.size; d += LANES) add<Q, 1>(from, first, count, d);
  }

  // held[i, d] = held * factor + sum of weight * value, for V vectors from d on.  The block is summed on its own: added one by one
  // to a long text's sum, its values would be rounded to that sum's size.
  template <int Q, int V>
  void add(int64_t from, int64_t first, int64_t count, int64_t d) {
    Floats sum[Q][V] = {};
    const float* weights = &scores[from * BLOCK];
    const bool fetches = !from && !d;
    for (int64_t j = 0; j < count; ++j) {
      if (fetches) fetch(k.at(r, g, first + BLOCK + j), k.size);
      const float* value = v.at(r, g, first + j) + d;
      Floats own[V];
#pragma GCC unroll 4
      for (int n = 0; n < V; ++n) own[n] = held_in_register(value + n * LANES);
#pragma GCC unroll 8
      for (int i = 0; i < Q; ++i) {
        const Floats weight = weights[i * BLOCK + j] - Floats{};
#pragma GCC unroll 4
        for (int n = 0; n < V; ++n) sum[i][n] += own[n] * weight;
      }
    }
    for (int i = 0; i < Q; ++i)
      for (int n = 0; n < V; ++n) {
        float* at = &held[(from + i) * v.size + d + n * LANES];
        store(at, load(at) * factors[from + i] + sum[i][n]);
      }
  }
};

void Pass::run() const {
  const int64_t shares = (queries + MOST_QUERIES - 1) / MOST_QUERIES, tasks = q.rows * k.heads * shares;
  const bool alone = q.rows * q.heads * q.count * k.count * q.size < SMALL;
#pragma omp parallel for schedule(static, 1) if (!alone)
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t head = task / shares, share = task % shares;
    Share(*this, head / k.heads, head % k.heads, queries * share / shares, queries * (share + 1) / shares).run();
  }
}

}  // namespace

// q [R, heads, n, d], k and v [R, kv heads, m, d], mask [R or 1, 1, n, m], float32; result [R, heads, n, d], laid out as [R, n, heads, d].
extern "C" AOTITorchError aoti_torch_cpu_attend(
    AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, AtenTensorHandle mask, double scale, AtenTensorHandle* result) {
  Pass pass{Strided(q), Strided(k), Strided(v), Strided(mask), static_cast<float>(scale), nullptr};
  const int64_t n = pass.q.count, heads = pass.q.heads, size = pass.q.size;
  const int64_t shape[] = {pass.q.rows, heads, n, size}, strides[] = {n * heads * size, size, heads * size, 1};
  sure(aoti_torch_empty_strided(4, shape, strides, aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, result));
  if (size % LANES || pass.v.size != size) {
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
