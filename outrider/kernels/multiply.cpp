// Products of a few rows with weights that lie in the order in which they are read.
//
// y[r, n] = sum over k of x[r, k] * w[n, k], in float32.  A panel holds 2 * LANES outputs; for each k it has their weights side by
// side, in float32, or as bfloat16 in pairs of lanes that one shift and one mask widen exactly.  Every output is summed in the order
// of k by fused multiply-adds, whatever else is computed with it: a row's result does not depend on how many rows there are.  Spans
// of k are summed on their own and then added up: one long sum loses three times the accuracy on a real model's states.
//
// A gated product is silu(x G) * (x U), the panels of U behind those of G: an MLP's first half in one pass over x.

#include <algorithm>
#include <vector>

#include "operators.h"

using namespace outrider;

namespace {

#if defined(__AVX512F__)
constexpr int MOST_ROWS = 12, MOST_SUMS = 24, NEAR = 8;
#elif defined(__AVX2__)
constexpr int MOST_ROWS = 6, MOST_SUMS = 12, NEAR = 0;
#else
constexpr int MOST_ROWS = 8, MOST_SUMS = 16, NEAR = 8;
#endif
constexpr int PANEL = 2 * LANES;
constexpr int64_t FAR = 128;  // of k, by which reading a panel runs ahead into L2; NEAR: from there into L1, 0: left to the processor
constexpr int64_t SPAN = 128;  // of k
constexpr int FEW_ROWS = 6;    // are read where they are; of more, the parts of a span are copied side by side
constexpr int64_t LINE = 16;  // words
constexpr int64_t BUSY = 32;  // rows whose arithmetic takes longer than reading weights in bfloat16

struct Single {  // weights in float32
  static constexpr int WORDS = 2;
  static void load(const uint32_t* at, Floats& low, Floats& high) {
    low = *reinterpret_cast<const Floats*>(at);
    high = *reinterpret_cast<const Floats*>(at + LANES);
  }
};

struct Half {  // in bfloat16: the lower half of each word is a weight of the first vector, the upper one of the second
  static constexpr int WORDS = 1;
  static void load(const uint32_t* at, Floats& low, Floats& high) {
    const Words both = *reinterpret_cast<const Words*>(at);
    low = reinterpret_cast<Floats>(both << 16);
    high = reinterpret_cast<Floats>(both & 0xffff0000u);
  }
};

struct Fetched {  // while a tile is multiplied
  int64_t from, step;  // words from a panel's first, and from each k to the next; from 0: the tile itself, FAR of k on
};

// Adds rows [0, R) of x times G panels over [begin, end) of k to `sums`.
template <class Kind, int R, int G>
inline void add_span(const float* x, int64_t inner, const uint32_t* weights, int64_t begin, int64_t end, Fetched fetched,
                     Floats (&sums)[G][R][2]) {
  constexpr int64_t STEP = LANES * Kind::WORDS, AHEAD = FAR / G;
  const int64_t panel = inner * STEP, stride = R > FEW_ROWS ? SPAN : inner;
  if (R > FEW_ROWS) x += begin * (R - 1);  // spans before, each of R rows
  Floats span[G][R][2] = {};
  for (int64_t k = begin; k < end; ++k) {
    Floats low[G], high[G];
    // behind a panel lies the one beside it, so what is read next is G panels on
    const int64_t far = fetched.from ? fetched.from + k * fetched.step : (k + AHEAD) * STEP + (k + AHEAD < inner ? 0 : (G - 1) * panel);
    const int64_t near = NEAR * STEP + (k + NEAR < inner ? 0 : (G - 1) * panel);
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) {
      const uint32_t* at = weights + g * panel + k * STEP;
      for (int64_t w = 0; w < STEP; w += LINE) {
        __builtin_prefetch(weights + g * panel + far + w, 0, 2);
        if (NEAR) __builtin_prefetch(at + near + w);
      }
      Kind::load(at, low[g], high[g]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Floats value = x[r * stride + k] - Floats{};
#pragma GCC unroll 8
      for (int g = 0; g < G; ++g) {
        span[g][r][0] += value * low[g];
        span[g][r][1] += value * high[g];
      }
    }
  }
  __asm__ volatile("" : "+m"(sums));  // not read before this: the span's own sums want the registers
#pragma GCC unroll 8
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < 2; ++n) sums[g][r][n] += span[g][r][n];
}

// Rows [0, R) of x times G panels.
template <class Kind, int R, int G>
void tile(const float* x, int64_t inner, const uint32_t* weights, float* y, int64_t outputs, int64_t left, Fetched fetched) {
  Floats sums[G][R][2] = {};
  for (int64_t k = 0; k < inner; k += SPAN) add_span<Kind, R, G>(x, inner, weights, k, std::min(inner, k + SPAN), fetched, sums);
  for (int g = 0; g < G; ++g)
    for (int r = 0; r < R; ++r) {
      float* at = y + r * outputs + g * PANEL;
      if (left - g * PANEL >= PANEL) {
        reinterpret_cast<Floats*>(at)[0] = sums[g][r][0];
        *reinterpret_cast<Floats*>(at + LANES) = sums[g][r][1];
      } else
        for (int n = 0; n < left - g * PANEL; ++n) at[n] = sums[g][r][n / LANES][n % LANES];
    }
}

// Panels [first, last) for R rows, as many side by side as registers hold.
template <class Kind, int R>
void panels(const float* x, int64_t inner, const uint32_t* weights, float* y, int64_t outputs, int64_t first, int64_t last,
            Fetched fetched) {
  constexpr int G = std::max(1, std::min(4, MOST_SUMS / (2 * R)));
  const int64_t panel = inner * LANES * Kind::WORDS;
  int64_t p = first;
  for (; p + G <= last; p += G) tile<Kind, R, G>(x, inner, weights + p * panel, y + p * PANEL, outputs, outputs - p * PANEL, fetched);
  for (; p < last; ++p) tile<Kind, R, 1>(x, inner, weights + p * panel, y + p * PANEL, outputs, outputs - p * PANEL, fetched);
}

template <class Kind, int R = MOST_ROWS>
void block(int64_t rows, const float* x, int64_t inner, const uint32_t* weights, float* y, int64_t outputs, int64_t first,
           int64_t last, Fetched fetched) {
  if constexpr (R > 0) {
    if (rows == R) return panels<Kind, R>(x, inner, weights, y, outputs, first, last, fetched);
    block<Kind, R - 1>(rows, x, inner, weights, y, outputs, first, last, fetched);
  }
}

// Copies `rows` rows of x so that the parts [k, k + SPAN) of all of them lie side by side.
void pack(const float* x, int64_t rows, int64_t inner, float* to) {
  for (int64_t k = 0; k < inner; k += SPAN)
    for (int64_t r = 0; r < rows; ++r, to += SPAN) std::copy_n(x + r * inner + k, std::min(SPAN, inner - k), to);
}

// Panels [first, last) for any number of rows.  More than registers hold pass in blocks over a group of panels that stays in the
// cache.  Memory would idle behind the first block, so each block fetches a share of the next group.
template <class Kind>
void in_blocks(const float* x, int64_t rows, int64_t inner, const uint32_t* weights, float* y, int64_t outputs, int64_t first, int64_t last) {
  static thread_local std::vector<float> packed;
  const int64_t blocks = (rows + MOST_ROWS - 1) / MOST_ROWS, padded = (inner + SPAN - 1) / SPAN * SPAN;
  const int64_t together = blocks > 1 ? 4 / Kind::WORDS : 4, group = together * inner * LANES * Kind::WORDS;
  packed.resize(std::max<int64_t>(packed.size(), rows * padded));
  const auto begin = [&](int64_t b) { return rows * b / blocks; };
  for (int64_t b = 0; b < blocks; ++b)
    if (begin(b + 1) - begin(b) > FEW_ROWS) pack(x + begin(b) * inner, begin(b + 1) - begin(b), inner, packed.data() + begin(b) * padded);
  for (int64_t p = first; p < last; p += together)
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t row = begin(b), many = begin(b + 1) - row;
      const float* from = many > FEW_ROWS ? packed.data() + row * padded : x + row * inner;
      const bool next = blocks > 1 && p + together < last && p + b > first;  // nobody fetched the first group
      const Fetched fetched{next ? group + b * group / together / blocks : 0, LANES * Kind::WORDS / blocks};
      block<Kind>(many, from, inner, weights, y + row * outputs, outputs, p, std::min(last, p + together), fetched);
    }
}

// gate = silu(gate) * up, in outputs [first, last).
void combine(float* gate, const float* up, int64_t rows, int64_t outputs, int64_t first, int64_t last) {
  const Floats one = Floats{} + 1.f;
  const auto combined = [&](Floats g, Floats u) {
    const Floats e = exponential(g < Floats{} ? g : -g);
    return g * ((g < Floats{} ? e : one) / (one + e)) * u;
  };
  for (int64_t r = 0; r < rows; ++r) {
    float* to = gate + r * outputs;
    const float* by = up + r * outputs;
    int64_t n = first;
    for (; n + LANES <= last; n += LANES) store(to + n, combined(load(to + n), load(by + n)));
    for (; n < last; ++n) to[n] = combined(to[n] - Floats{}, by[n] - Floats{})[0];
  }
}

// Each thread has panels of its own or, where it has rows enough to be busy while it reads all weights, rows: what it writes then
// is what it reads next, and is in its own cache.  up: room for the second product of a gated one, or null.
template <class Kind>
void multiply(const float* x, int64_t rows, int64_t inner, const uint32_t* weights, float* y, float* up, int64_t outputs) {
  const int64_t count = (outputs + PANEL - 1) / PANEL;
  const bool alone = rows * inner * outputs < SMALL;
#pragma omp parallel if (!alone)
  {
    const int64_t threads = omp_get_num_threads(), own = omp_get_thread_num();
    const bool by_rows = rows >= BUSY * Kind::WORDS * threads;
    const int64_t all = by_rows ? rows : count, begin = all * own / threads, end = all * (own + 1) / threads;
    const int64_t row = by_rows ? begin : 0, many = by_rows ? end - begin : rows, at = row * outputs;
    const int64_t first = by_rows ? 0 : begin, last = by_rows ? count : end;
    in_blocks<Kind>(x + row * inner, many, inner, weights, y + at, outputs, first, last);
    if (up) {
      in_blocks<Kind>(x + row * inner, many, inner, weights + count * inner * LANES * Kind::WORDS, up + at, outputs, first, last);
      combine(y + at, up + at, many, outputs, first * PANEL, std::min(outputs, last * PANEL));
    }
  }
}

}  // namespace

extern "C" int outrider_panel() { return PANEL; }

namespace {

AOTITorchError product(AtenTensorHandle x, AtenTensorHandle weights, int64_t outputs, bool is_gated, AtenTensorHandle* result) {
  int64_t dims = 0, *sizes = nullptr, *words = nullptr;
  void *from = nullptr, *by = nullptr, *to = nullptr, *second = nullptr;
  AtenTensorHandle up = nullptr;
  sure(aoti_torch_get_dim(x, &dims));
  sure(aoti_torch_get_sizes(x, &sizes));
  sure(aoti_torch_get_sizes(weights, &words));
  const int64_t inner = sizes[dims - 1];
  std::vector<int64_t> shape(sizes, sizes + dims), strides(dims);
  shape.back() = outputs;
  int64_t rows = 1;
  for (int64_t d = dims - 1, step = 1; d >= 0; step *= shape[d--]) strides[d] = step;
  for (int64_t d = 0; d < dims - 1; ++d) rows *= shape[d];
  sure(aoti_torch_empty_strided(dims, shape.data(), strides.data(), aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, result));
  sure(aoti_torch_get_data_ptr(x, &from));
  sure(aoti_torch_get_data_ptr(weights, &by));
  sure(aoti_torch_get_data_ptr(*result, &to));
  if (is_gated) {
    sure(aoti_torch_empty_strided(dims, shape.data(), strides.data(), aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, &up));
    sure(aoti_torch_get_data_ptr(up, &second));
  }
  const auto multiply_by = words[2] == LANES ? multiply<Half> : multiply<Single>;
  multiply_by(static_cast<float*>(from), rows, inner, static_cast<uint32_t*>(by), static_cast<float*>(to), static_cast<float*>(second), outputs);
  if (up) sure(aoti_torch_delete_tensor_object(up));
  return AOTI_TORCH_SUCCESS;
}

}  // namespace

// x [..., inner] float32 and contiguous, weights [panels, inner, LANES * Kind::WORDS] int32; result [..., outputs].
extern "C" AOTITorchError aoti_torch_cpu_multiply(AtenTensorHandle x, AtenTensorHandle weights, int64_t outputs, AtenTensorHandle* result) {
  return product(x, weights, outputs, false, result);
}

// The same of twice as many panels: half of them G's, then U's.
extern "C" AOTITorchError aoti_torch_cpu_gated(AtenTensorHandle x, AtenTensorHandle weights, int64_t outputs, AtenTensorHandle* result) {
  return product(x, weights, outputs, true, result);
}

namespace {

template <AOTITorchError called(AtenTensorHandle, AtenTensorHandle, int64_t, AtenTensorHandle*)>
void boxed(uint64_t* stack, uint64_t, uint64_t) {
  AtenTensorHandle x = reinterpret_cast<AtenTensorHandle>(stack[0]), weights = reinterpret_cast<AtenTensorHandle>(stack[1]), result;
  called(x, weights, static_cast<int64_t>(stack[2]), &result);
  sure(aoti_torch_delete_tensor_object(x));
  sure(aoti_torch_delete_tensor_object(weights));
  stack[0] = reinterpret_cast<uint64_t>(result);
}

const Operator multiplies("multiply", "multiply(Tensor x, Tensor weights, int outputs) -> Tensor", boxed<aoti_torch_cpu_multiply>);
const Operator gates("gated", "gated(Tensor x, Tensor weights, int outputs) -> Tensor", boxed<aoti_torch_cpu_gated>);

}  // namespace
