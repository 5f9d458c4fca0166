// Products of rows with weights as GGUF files quantise them.
//
// y[r, n] = sum over k of x[r, k] * w[n, k], w = scale * q + min.  A panel holds the blocks of 16 outputs side by side: first their
// scales, then words of four weights each, one word an output.  A part of a panel is unpacked into bytes in the first cache, then
// multiplied by a few rows at a time.  Outputs lie in lanes and are summed in the order of k, whatever else is computed with them: a
// row's result depends neither on how many rows there are nor on how wide vectors are.
//
// In float32: the products of 16 weights are summed by fused multiply-adds, the sum times the scale is added by another, and so is
// min times the sum of x.  Weights are not shifted to the end of their words: x is scaled by powers of two instead.
//
// In integers: x is rounded to int8 with a scale for each 32, products of integers are summed exactly, and the sum is added as above.

#include <algorithm>
#include <vector>

#include "quantized.h"

using namespace outrider;
using namespace outrider::quantized;

namespace {

constexpr int MOST_ROWS = 8 / VECTORS;  // as registers hold
constexpr int64_t FEW = 8;              // rows, below which a thread prepares them all
constexpr int64_t AHEAD = 4096, LINE = 64;  // bytes, by which reading runs ahead, and of a cache line
constexpr int64_t MOST_PREPARED = 256;  // rows, whose arithmetic takes far longer than reading weights
constexpr int64_t TOGETHER = 4;         // panels that many rows pass, so that these are read less often

// Rows as the products read them.
struct Prepared {
  std::vector<uint32_t> values;  // float32, or four int8 to a word: [rows, stride]
  std::vector<float> scales;     // of 32 int8: [rows, blocks]
  std::vector<float> sums;       // of x over each group: [rows, groups]
  int64_t stride = 0, blocks = 0, groups = 0;
};

thread_local Prepared prepared;
thread_local Part parts[TOGETHER];
thread_local std::vector<float> results;

// One row from some block on.
struct Row {
  const uint32_t* values;
  const float *scales, *sums;
};

typedef float Four __attribute__((vector_size(16), aligned(4)));

// The sum of 16 floats, in one order on every processor.
float sum_of_16(const float* x) {
  const auto four = [&](int n) { return *reinterpret_cast<const Four*>(x + 4 * n); };
  const Four sum = (four(0) + four(1)) + (four(2) + four(3));
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// 16 values and their sum; IN_PLACE: for weights that are not shifted.
template <bool IN_PLACE>
float prepare_floats(const float* x, float* to) {
  constexpr float PLACES[4] = {1.f, 0x1p-8f, 0x1p-16f, 0x1p-24f};
  for (int k = 0; k < 16; ++k) to[k] = IN_PLACE ? x[k] * PLACES[k % 4] : x[k];
  return sum_of_16(x);
}

// 32 values as int8, the sums of both halves, and the scale.
float prepare_integers(const float* x, int8_t* to, int (&sums)[2]) {
  Ints bits = {};  // the order of positive floats is that of their bits, and a NaN's are above all
  for (int k = 0; k < BLOCK; k += LANES) {
    const Ints own = reinterpret_cast<Ints>(load(x + k)) & 0x7fffffff;
    bits = own > bits ? own : bits;
  }
  int32_t largest = 0;
  for (int n = 0; n < LANES; ++n) largest = std::max<int32_t>(largest, bits[n]);
  float most;
  std::memcpy(&most, &largest, sizeof most);
  const float inverse = most < 1e-30f ? 0.f : 127.f / most, shift = 12582912.f;  // 1.5 * 2^23: rounds what is added
  sums[0] = sums[1] = 0;
  for (int k = 0; k < BLOCK; k += LANES) {
    const Floats shifted = fused(load(x + k), inverse - Floats{}, shift - Floats{});
    const Ints whole = reinterpret_cast<Ints>(shifted) - 0x4b400000;
    for (int n = 0; n < LANES; ++n) to[k + n] = static_cast<int8_t>(whole[n]);
  }
  for (int k = 0; k < BLOCK; ++k) sums[k / 16] += to[k];
  return most < 1e-30f ? 0.f : most / 127.f;
}

template <class Numbers, bool INTEGERS>
void prepare(const float* x, int64_t inner, int64_t row, Prepared& to) {
  uint32_t* values = to.values.data() + row * to.stride;
  float *scales = to.scales.data() + row * to.blocks, *sums = to.sums.data() + row * to.groups;
  for (int64_t b = 0; b < to.blocks; ++b) {
    alignas(64) float padded[BLOCK] = {};
    const float* from = x + row * inner + b * BLOCK;
    if ((b + 1) * BLOCK > inner) from = static_cast<const float*>(std::memcpy(padded, from, (inner - b * BLOCK) * sizeof(float)));
    if constexpr (INTEGERS) {
      int halves[2];
      const float scale = scales[b] = prepare_integers(from, reinterpret_cast<int8_t*>(values + b * QUADS), halves);
      if constexpr (Numbers::GROUP == 32)
        sums[b] = (Numbers::BITS == 8 ? 1.f : scale) * (halves[0] + halves[1]);
      else
        for (int h = 0; h < 2; ++h) sums[2 * b + h] = scale * halves[h];
    } else {
      float* floats = reinterpret_cast<float*>(values) + b * BLOCK;
      const float first = prepare_floats<Numbers::BITS && Numbers::BITS < 8>(from, floats);
      const float second = prepare_floats<Numbers::BITS && Numbers::BITS < 8>(from + 16, floats + 16);
      if constexpr (Numbers::GROUP == 32)
        sums[b] = first + second;
      else
        sums[2 * b] = first, sums[2 * b + 1] = second;
    }
  }
}

// Adds R rows times a part of a panel of quantised weights to `results`, in float32.
template <class Numbers, int R>
void add_floats(const Part& part, int64_t blocks, const Row (&rows)[R], Floats (&results)[R][VECTORS]) {
  // sums of 16 products each; few rows take both of a block at once, so that the next one needs not wait for the last
  constexpr int GROUPS = BLOCK / Numbers::GROUP, AT_ONCE = 2 * R * VECTORS <= 8 ? 2 : 1;
  for (int64_t b = 0; b < blocks; ++b)
#pragma GCC unroll 2
    for (int half = 0; half < 2; half += AT_ONCE) {
      Floats sums[AT_ONCE][R][VECTORS] = {};
#pragma GCC unroll 4
      for (int q = 0; q < QUADS / 2; ++q)
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k)
#pragma GCC unroll 2
          for (int h = 0; h < AT_ONCE; ++h) {
            const int64_t quad = b * QUADS + (half + h) * QUADS / 2 + q;
            Floats weights[VECTORS];
            for (int v = 0; v < VECTORS; ++v) {
              const Words words = load_words(part.words + quad * PANEL + v * LANES);
              weights[v] = Numbers::BITS == 8 ? highest(words, k) : in_place(words, k);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
              const Floats x = reinterpret_cast<const float*>(rows[r].values)[quad * 4 + k] - Floats{};
              for (int v = 0; v < VECTORS; ++v) sums[h][r][v] = fused(weights[v], x, sums[h][r][v]);
            }
          }
#pragma GCC unroll 2
      for (int h = 0; h < AT_ONCE; ++h) {
        const int64_t group = b * GROUPS + (half + h) * (GROUPS - 1);
        for (int v = 0; v < VECTORS; ++v) {
          const Floats scale = load(part.scales + group * PANEL + v * LANES) * (Numbers::BITS == 8 ? 0x1p-24f : 1.f);
          const Floats min = load(part.mins + group * PANEL + v * LANES);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            results[r][v] = fused(sums[h][r][v], scale, results[r][v]);
            if (Numbers::BITS < 8 && half + h >= 2 - GROUPS) results[r][v] = fused(min, rows[r].sums[group] - Floats{}, results[r][v]);
          }
        }
      }
    }
}

// The same of weights that are floats.
template <class Numbers, int R>
void add_whole(const Part& part, int64_t blocks, const Row (&rows)[R], Floats (&results)[R][VECTORS]) {
  for (int64_t h = 0; h < 2 * blocks; ++h) {
    Floats sums[R][VECTORS] = {};
#pragma GCC unroll 4
    for (int64_t k = h * 16; k < (h + 1) * 16; ++k)
      for (int v = 0; v < VECTORS; ++v) {
        const Floats weights = load(reinterpret_cast<const float*>(part.words) + k * PANEL + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
          sums[r][v] = fused(weights, reinterpret_cast<const float*>(rows[r].values)[k] - Floats{}, sums[r][v]);
      }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < VECTORS; ++v) results[r][v] += sums[r][v];
  }
}

// The same in integers.
template <class Numbers, int R>
void add_integers(const Part& part, int64_t blocks, const Row (&rows)[R], Floats (&results)[R][VECTORS]) {
  using Sum = Dot<Numbers::BITS>;
  constexpr int GROUPS = BLOCK / Numbers::GROUP, IN_GROUP = Numbers::GROUP / 4, STEPS = std::min(IN_GROUP, Sum::STEPS);
  for (int64_t group = 0; group < blocks * GROUPS; ++group) {
    Ints sums[R][VECTORS] = {};
#pragma GCC unroll 8
    for (int first = 0; first < IN_GROUP; first += STEPS) {
      typename Sum::Type products[R][VECTORS] = {};
#pragma GCC unroll 8
      for (int q = 0; q < STEPS; ++q) {
        const int64_t quad = group * IN_GROUP + first + q;
        Words words[VECTORS];
        for (int v = 0; v < VECTORS; ++v) words[v] = load_words(part.words + quad * PANEL + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const Words x = Words{} + rows[r].values[quad];
          for (int v = 0; v < VECTORS; ++v) products[r][v] = pinned(Sum::add(products[r][v], words[v], x));
        }
      }
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < VECTORS; ++v) sums[r][v] += Sum::whole(products[r][v]);
    }
    for (int v = 0; v < VECTORS; ++v) {
      const Floats scale = load(part.scales + group * PANEL + v * LANES), min = load(part.mins + group * PANEL + v * LANES);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        Floats sum = __builtin_convertvector(sums[r][v], Floats);
        if (Sum::BIAS) sum -= Floats{} + Sum::BIAS * rows[r].sums[group];  // exact
        results[r][v] = fused(sum, scale * rows[r].scales[group / GROUPS], results[r][v]);
        if (Numbers::BITS < 8) results[r][v] = fused(min, rows[r].sums[group] - Floats{}, results[r][v]);
      }
    }
  }
}

// Rows [first, first + R) times a part of a panel that begins at this block; results [rows, PANEL] hold what came before.
template <class Numbers, bool INTEGERS, int R>
void tile(const Part& part, int64_t block, int64_t blocks, const Prepared& from, int64_t first, float* results) {
  Row rows[R];
  Floats sums[R][VECTORS] = {};
  for (int64_t r = 0; r < R; ++r) {
    constexpr int GROUPS = BLOCK / Numbers::GROUP;
    rows[r] = {from.values.data() + (first + r) * from.stride + block * (INTEGERS ? QUADS : BLOCK),
               from.scales.data() + (first + r) * from.blocks + block, from.sums.data() + (first + r) * from.groups + block * GROUPS};
    for (int v = 0; block && v < VECTORS; ++v) sums[r][v] = load(results + r * PANEL + v * LANES);
  }
  if constexpr (INTEGERS)
    add_integers<Numbers, R>(part, blocks, rows, sums);
  else if constexpr (Numbers::BITS)
    add_floats<Numbers, R>(part, blocks, rows, sums);
  else
    add_whole<Numbers, R>(part, blocks, rows, sums);
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < VECTORS; ++v) store(results + r * PANEL + v * LANES, sums[r][v]);
}

template <class Numbers, bool INTEGERS, int R = MOST_ROWS>
void few(int64_t count, const Part& part, int64_t block, int64_t blocks, const Prepared& from, int64_t first, float* results) {
  if constexpr (R > 0) {
    if (count == R) return tile<Numbers, INTEGERS, R>(part, block, blocks, from, first, results);
    few<Numbers, INTEGERS, R - 1>(count, part, block, blocks, from, first, results);
  }
}

// Panels [first, last) for all rows.
template <class Numbers, bool INTEGERS>
void panels(const Prepared& from, int64_t rows, const Layout& layout, const uint8_t* weights, float* y, int64_t outputs, int64_t first,
            int64_t last) {
  const int64_t tiles = (rows + MOST_ROWS - 1) / MOST_ROWS, together = tiles > 2 ? TOGETHER : 1;
  results.resize(std::max<int64_t>(results.size(), TOGETHER * rows * PANEL));
  for (int64_t p = first; p < last; p += together) {
    const int64_t count = std::min(together, last - p);
    for (int64_t block = 0; block < from.blocks; block += BLOCKS) {
      const int64_t blocks = std::min<int64_t>(BLOCKS, from.blocks - block);
      for (int64_t n = 0; n < count; ++n)
        for (int64_t b = 0; b < blocks; b += layout.size / BLOCK) {
          const uint8_t* at = weights + ((p + n) * from.blocks + block + b) * BLOCK / layout.size * layout.packed * PANEL;
          // the processor's own reading ahead stops while a part is multiplied; of large blocks it would be too much at once
          for (int64_t line = 0; layout.size == BLOCK && line < layout.packed * PANEL; line += LINE) __builtin_prefetch(at + AHEAD + line, 0, 2);
          layout.unpack(at, parts[n], b);
        }
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t row = rows * t / tiles, many = rows * (t + 1) / tiles - row;
        for (int64_t n = 0; n < count; ++n) few<Numbers, INTEGERS>(many, parts[n], block, blocks, from, row, results.data() + (n * rows + row) * PANEL);
      }
    }
    for (int64_t n = 0; n < count; ++n)
      for (int64_t r = 0; r < rows; ++r)
        std::copy_n(results.data() + (n * rows + r) * PANEL, std::min<int64_t>(PANEL, outputs - (p + n) * PANEL), y + r * outputs + (p + n) * PANEL);
  }
}

template <class Numbers, bool INTEGERS>
void multiply(const Layout& layout, const float* x, int64_t rows, int64_t inner, const uint8_t* weights, float* y, int64_t outputs) {
  for (; rows > MOST_PREPARED; rows -= MOST_PREPARED, x += MOST_PREPARED * inner, y += MOST_PREPARED * outputs)
    multiply<Numbers, INTEGERS>(layout, x, MOST_PREPARED, inner, weights, y, outputs);
  Prepared& to = prepared;  // this thread's, also in the others
  to.blocks = (inner + layout.size - 1) / layout.size * layout.size / BLOCK;
  to.stride = to.blocks * (INTEGERS ? QUADS : BLOCK), to.groups = to.blocks * BLOCK / Numbers::GROUP;
  to.values.resize(std::max<size_t>(to.values.size(), rows * to.stride));
  to.scales.resize(std::max<size_t>(to.scales.size(), rows * to.blocks));
  to.sums.resize(std::max<size_t>(to.sums.size(), rows * to.groups));
#pragma omp parallel for if (rows >= FEW)
  for (int64_t r = 0; r < rows; ++r) prepare<Numbers, INTEGERS>(x, inner, r, to);
  const int64_t count = (outputs + PANEL - 1) / PANEL;
#pragma omp parallel if (rows * inner * outputs >= SMALL)
  {
    const int64_t threads = omp_get_num_threads(), own = omp_get_thread_num();
    panels<Numbers, INTEGERS>(to, rows, layout, weights, y, outputs, count * own / threads, count * (own + 1) / threads);
  }
}

// Rows `ids` of the weights themselves.
void look_up(const Layout& layout, const int64_t* ids, int64_t count, const uint8_t* weights, float* to, int64_t inner) {
  const int64_t blocks = (inner + layout.size - 1) / layout.size;
#pragma omp parallel for if (count >= FEW)
  for (int64_t n = 0; n < count; ++n)
    for (int64_t b = 0; b < blocks; ++b) {
      layout.unpack(weights + (ids[n] / PANEL * blocks + b) * layout.packed * PANEL, parts[0], 0);
      for (int64_t k = b * layout.size; k < std::min(inner, (b + 1) * layout.size); ++k)
        to[n * inner + k] = layout.weight(parts[0], k - b * layout.size, ids[n] % PANEL);
    }
}

using Product = void (*)(const Layout&, const float*, int64_t, int64_t, const uint8_t*, float*, int64_t);

struct Functions {
  Layout layout;
  Product in_floats, in_integers;
};

template <class Kind>
constexpr Functions functions() {
  using Numbers = typename Kind::Numbers;
  return {layout_of<Kind>(), multiply<typename Numbers::InFloats, false>, multiply<Numbers, (Numbers::BITS > 0)>};
}

template <class Kind>
constexpr Functions known = functions<Kind>();

// By the numbers of kinds in GGUF files.
const Functions& of_kind(int64_t kind) {
  switch (kind) {
    case 0: return known<F32>;
    case 1: return known<F16>;
    case 2: return known<Q4_0>;
    case 3: return known<Q4_1>;
    case 6: return known<Q5_0>;
    case 7: return known<Q5_1>;
    case 8: return known<Q8_0>;
    case 10: return known<Q2_K>;
    case 11: return known<Q3_K>;
    case 12: return known<Q4_K>;
    case 13: return known<Q5_K>;
    case 14: return known<Q6_K>;
    case 20: return known<IQ4_NL>;
    case 23: return known<IQ4_XS>;
    case 30: return known<BF16>;
    case 39: return known<MXFP4>;
  }
  throw std::runtime_error("outrider: weights of an unknown kind");
}

}  // namespace

// Blocks [rows, blocks] of a file, in panels.
extern "C" void outrider_pack(int64_t kind, const void* blocks, int64_t rows, int64_t count, void* panels) {
  const Layout& own = of_kind(kind).layout;
#pragma omp parallel for
  for (int64_t p = 0; p < (rows + PANEL - 1) / PANEL; ++p)
    for (int64_t n = 0; n < std::min<int64_t>(PANEL, rows - p * PANEL); ++n)
      for (int64_t b = 0; b < count; ++b)
        own.pack(static_cast<const uint8_t*>(blocks) + ((p * PANEL + n) * count + b) * own.stored, n,
                 static_cast<uint8_t*>(panels) + (p * count + b) * own.packed * PANEL);
}

// y [rows, outputs] of x [rows, inner].
extern "C" void outrider_product(int64_t kind, bool in_integers, const float* x, int64_t rows, int64_t inner, const void* panels, float* y,
                                 int64_t outputs) {
  const Functions& own = of_kind(kind);
  (in_integers ? own.in_integers : own.in_floats)(own.layout, x, rows, inner, static_cast<const uint8_t*>(panels), y, outputs);
}

namespace {

struct Sizes {  // of a tensor
  int64_t dims, *sizes, count = 1;
  explicit Sizes(AtenTensorHandle tensor) {
    sure(aoti_torch_get_dim(tensor, &dims));
    sure(aoti_torch_get_sizes(tensor, &sizes));
    for (int64_t d = 0; d < dims; ++d) count *= sizes[d];
  }
};

template <class Value>
Value* data(AtenTensorHandle tensor) {
  void* found = nullptr;
  sure(aoti_torch_get_data_ptr(tensor, &found));
  return static_cast<Value*>(found);
}

float* empty(std::vector<int64_t> shape, AtenTensorHandle* result) {
  std::vector<int64_t> strides(shape.size());
  for (int64_t d = shape.size() - 1, step = 1; d >= 0; step *= shape[d--]) strides[d] = step;
  sure(aoti_torch_empty_strided(shape.size(), shape.data(), strides.data(), aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, result));
  return data<float>(*result);
}

}  // namespace

// x [..., inner] float32 and contiguous, weights [panels, bytes] uint8; result [..., outputs].
extern "C" AOTITorchError aoti_torch_cpu_quantized(AtenTensorHandle x, AtenTensorHandle weights, int64_t kind, int64_t outputs, int64_t in_integers,
                                                   AtenTensorHandle* result) {
  const Sizes sizes(x);
  const int64_t inner = sizes.sizes[sizes.dims - 1];
  std::vector<int64_t> shape(sizes.sizes, sizes.sizes + sizes.dims);
  shape.back() = outputs;
  float* to = empty(shape, result);
  if (sizes.count) outrider_product(kind, in_integers, data<float>(x), sizes.count / inner, inner, data<void>(weights), to, outputs);
  return AOTI_TORCH_SUCCESS;
}

// ids [...] int64, weights as above; result [..., inner].
extern "C" AOTITorchError aoti_torch_cpu_quantized_rows(AtenTensorHandle ids, AtenTensorHandle weights, int64_t kind, int64_t inner, AtenTensorHandle* result) {
  const Sizes sizes(ids), panels(weights);
  std::vector<int64_t> shape(sizes.sizes, sizes.sizes + sizes.dims);
  shape.push_back(inner);
  float* to = empty(shape, result);
  const int64_t* from = data<int64_t>(ids);
  for (int64_t n = 0; n < sizes.count; ++n)
    if (from[n] < 0 || from[n] >= panels.sizes[0] * PANEL) throw std::runtime_error("outrider: an index is beyond the rows of a quantised embedding");
  look_up(of_kind(kind).layout, from, sizes.count, data<uint8_t>(weights), to, inner);
  return AOTI_TORCH_SUCCESS;
}

#if !defined(OUTRIDER_UNREGISTERED)  // as a test of other vectors than this processor's wants it
namespace {

AtenTensorHandle handle(uint64_t value) { return reinterpret_cast<AtenTensorHandle>(value); }

void product(uint64_t* stack, uint64_t, uint64_t) {
  AtenTensorHandle result;
  aoti_torch_cpu_quantized(handle(stack[0]), handle(stack[1]), stack[2], stack[3], stack[4], &result);
  for (int n = 0; n < 2; ++n) sure(aoti_torch_delete_tensor_object(handle(stack[n])));
  stack[0] = reinterpret_cast<uint64_t>(result);
}

void rows(uint64_t* stack, uint64_t, uint64_t) {
  AtenTensorHandle result;
  aoti_torch_cpu_quantized_rows(handle(stack[0]), handle(stack[1]), stack[2], stack[3], &result);
  for (int n = 0; n < 2; ++n) sure(aoti_torch_delete_tensor_object(handle(stack[n])));
  stack[0] = reinterpret_cast<uint64_t>(result);
}

const Operator products("quantized", "quantized(Tensor x, Tensor weights, int kind, int outputs, int in_integers) -> Tensor", product);
const Operator looks_up("quantized_rows", "quantized_rows(Tensor ids, Tensor weights, int kind, int columns) -> Tensor", rows);

}  // namespace
#endif
