// The kinds of weights of GGUF files: how a file stores a block, how a panel of 16 outputs does, and how that is unpacked into bytes.
// Facts about the files are ggml's; multiplying and unpacking are ours.
#pragma once

#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "operators.h"

// Vectors of 64 and of 32 bytes that the processor has.
#if OUTRIDER_BYTES == 64 && defined(__AVX512F__)
#define WIDE 1
#elif OUTRIDER_BYTES == 32 && defined(__AVX2__)
#define MIDDLE 1
#endif

namespace outrider::quantized {

constexpr int PANEL = 16, VECTORS = PANEL / LANES;
constexpr int BLOCK = 32, QUADS = BLOCK / 4;  // weights, and words of four of them
constexpr int BLOCKS = 8;                     // of a part

typedef uint8_t Bytes __attribute__((vector_size(LANES), aligned(1)));
typedef int8_t Signed __attribute__((vector_size(LANES), aligned(1)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2)));

// A part of a panel, unpacked: words of four weights, or of one that is a float.
struct alignas(64) Part {
  uint32_t words[BLOCKS * BLOCK * PANEL];
  float scales[BLOCKS * 2 * PANEL], mins[BLOCKS * 2 * PANEL];  // of groups
};

inline Words load_words(const void* at) { return *static_cast<const Words*>(at); }
inline void store_words(void* at, Words words) { *static_cast<Words*>(at) = words; }

inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(WIDE)
  return reinterpret_cast<Floats>(_mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#elif defined(MIDDLE) && defined(__FMA__)
  return reinterpret_cast<Floats>(_mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
#else
  for (int n = 0; n < LANES; ++n) c[n] = __builtin_fmaf(a[n], b[n], c[n]);
  return c;
#endif
}

// The same value, computed before what follows: compilers add integers in another order, for which there are no registers.
template <class Vector>
inline Vector pinned(Vector value) {
#if defined(WIDE)
  __asm__("" : "+v"(value));
#elif defined(MIDDLE)
  __asm__("" : "+x"(value));
#endif
  return value;
}

// Weight k of each word, times 2^(8 k).
inline Floats in_place(Words words, int k) { return __builtin_convertvector(reinterpret_cast<Ints>(words & (0xffu << 8 * k)), Floats); }
// Signed weight k of each word, times 2^24.
inline Floats highest(Words words, int k) {
  return __builtin_convertvector(reinterpret_cast<Ints>((words << (24 - 8 * k)) & 0xff000000u), Floats);
}

// Whether the processor multiplies signed bytes by signed ones: unsigned weights have fewer than 8 bits.
#if defined(__ARM_FEATURE_DOTPROD) && OUTRIDER_BYTES == 16
constexpr bool SIGNED = true;
#else
constexpr bool SIGNED = false;
#endif

// Sums of four products of weights, unsigned where they have fewer than 8 bits, and int8.
#if (defined(MIDDLE) && !defined(__AVXVNNI__)) || (defined(WIDE) && defined(__AVX512BW__) && !defined(__AVX512VNNI__))
template <int BITS>
struct Dot {
  typedef int16_t Type __attribute__((vector_size(OUTRIDER_BYTES)));
  // sums of two products that int16 holds: of 2 * 127 * 15, 31, 63 or 128
  static constexpr int STEPS = BITS == 4 ? 8 : BITS == 5 ? 4 : BITS == 6 ? 2 : 1, BIAS = 0;
  static Type add(Type sum, Words words, Words x) {
#if defined(WIDE)
    __m512i weights = reinterpret_cast<__m512i>(words), by = reinterpret_cast<__m512i>(x);
    if (BITS == 8) {
      by = _mm512_mask_sub_epi8(by, _mm512_movepi8_mask(weights), _mm512_setzero_si512(), by);
      weights = _mm512_abs_epi8(weights);
    }
    return sum + reinterpret_cast<Type>(_mm512_maddubs_epi16(weights, by));
#else
    __m256i weights = reinterpret_cast<__m256i>(words), by = reinterpret_cast<__m256i>(x);
    if (BITS == 8) {
      by = _mm256_sign_epi8(by, weights);
      weights = _mm256_abs_epi8(weights);
    }
    return sum + reinterpret_cast<Type>(_mm256_maddubs_epi16(weights, by));
#endif
  }
  static Ints whole(Type sum) {
#if defined(WIDE)
    return reinterpret_cast<Ints>(_mm512_madd_epi16(reinterpret_cast<__m512i>(sum), _mm512_set1_epi16(1)));
#else
    return reinterpret_cast<Ints>(_mm256_madd_epi16(reinterpret_cast<__m256i>(sum), _mm256_set1_epi16(1)));
#endif
  }
};
#else
template <int BITS>
struct Dot {
  using Type = Ints;
  static constexpr int STEPS = QUADS, BIAS = BITS == 8 && !SIGNED ? 128 : 0;  // what is added to signed weights
  static Type add(Type sum, Words words, Words x) {
    if (BIAS) words ^= 0x80808080u;
#if defined(WIDE) && defined(__AVX512VNNI__)
    return reinterpret_cast<Type>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(words), reinterpret_cast<__m512i>(x)));
#elif defined(MIDDLE) && defined(__AVXVNNI__)
    return reinterpret_cast<Type>(_mm256_dpbusd_avx_epi32(reinterpret_cast<__m256i>(sum), reinterpret_cast<__m256i>(words), reinterpret_cast<__m256i>(x)));
#elif defined(__ARM_FEATURE_DOTPROD) && OUTRIDER_BYTES == 16
    sum = reinterpret_cast<Type>(vdotq_s32(reinterpret_cast<int32x4_t>(sum), reinterpret_cast<int8x16_t>(words), reinterpret_cast<int8x16_t>(x)));
    return sum;
#else
    for (int k = 0; k < 4; ++k)
      sum += reinterpret_cast<Ints>((words >> 8 * k) & 255) * (reinterpret_cast<Ints>(x << (24 - 8 * k)) >> 24);
    return sum;
#endif
  }
  static Ints whole(Type sum) { return sum; }
};
#endif

// float16 as float32.
inline Floats widened(const uint8_t* at) {
#if defined(WIDE)
  return reinterpret_cast<Floats>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))));
#elif defined(MIDDLE) && defined(__F16C__)
  return reinterpret_cast<Floats>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
#else
  const Words half = __builtin_convertvector(*reinterpret_cast<const Halves*>(at), Words), bits = (half & 0x7fff) << 13;
  const Floats value = reinterpret_cast<Floats>(bits) * 0x1p112f;  // exact: exponents differ by 112
  const Words kept = value < 65536.f ? reinterpret_cast<Words>(value) : bits | 0x7f800000;
  return reinterpret_cast<Floats>(kept | (half & 0x8000) << 16);
#endif
}

template <class Each>
inline void for_vectors(Each each) {
  for (int lane = 0; lane < PANEL; lane += LANES) each(lane);
}

// Moves `count` pieces of SIZE bytes of output n to where a panel has those of all outputs side by side.
template <int SIZE>
void spread(const uint8_t* from, int64_t n, int count, uint8_t* to) {
  for (int piece = 0; piece < count; ++piece) std::memcpy(to + (piece * PANEL + n) * SIZE, from + piece * SIZE, SIZE);
}

// What a product needs to know of a kind: bits of an unpacked weight, 0 for floats, and weights that share scale and min.
template <int MOST_BITS, int IN_GROUP = 32>
struct Arithmetic {
  static constexpr int BITS = MOST_BITS, GROUP = IN_GROUP;
  using InFloats = Arithmetic<MOST_BITS == 0 || MOST_BITS == 8 ? MOST_BITS : 4, IN_GROUP>;  // to which few bits are all one
};

// ── floats ────────────────────────────────────────────────────────────────────────────────────────────────────────────

template <int STEP>
struct Plain {
  using Numbers = Arithmetic<0>;
  static constexpr int SIZE = BLOCK, STORED = SIZE * STEP, BYTES = STORED;
  static void pack(const uint8_t* block, int64_t n, uint8_t* panel) { spread<STEP>(block, n, SIZE, panel); }
  static float weight(const Part& part, int64_t k, int64_t lane) { return reinterpret_cast<const float*>(part.words)[k * PANEL + lane]; }
};

struct F32 : Plain<4> {
  static void unpack(const uint8_t* from, Part& to, int64_t block) { std::memcpy(to.words + block * BLOCK * PANEL, from, BYTES * PANEL); }
};

struct F16 : Plain<2> {
  static void unpack(const uint8_t* from, Part& to, int64_t block) {
    for (int at = 0; at < BLOCK * PANEL; at += LANES) store(reinterpret_cast<float*>(to.words) + block * BLOCK * PANEL + at, widened(from + 2 * at));
  }
};

struct BF16 : Plain<2> {
  static void unpack(const uint8_t* from, Part& to, int64_t block) {
    for (int at = 0; at < BLOCK * PANEL; at += LANES) {
      const Words bits = __builtin_convertvector(*reinterpret_cast<const Halves*>(from + 2 * at), Words) << 16;
      store(reinterpret_cast<float*>(to.words) + block * BLOCK * PANEL + at, reinterpret_cast<Floats>(bits));
    }
  }
};

// ── integers ──────────────────────────────────────────────────────────────────────────────────────────────────────────

template <int WEIGHTS, int IN_FILE, int PACKED, int BITS, int GROUP = 32>
struct Quantised {
  using Numbers = Arithmetic<BITS, GROUP>;
  static constexpr int SIZE = WEIGHTS, STORED = IN_FILE, BYTES = PACKED;
  static float weight(const Part& part, int64_t k, int64_t lane) {
    const uint32_t byte = part.words[k / 4 * PANEL + lane] >> 8 * (k % 4) & 255;
    const int64_t group = k / GROUP * PANEL + lane;
    return BITS == 8 ? part.scales[group] * static_cast<int8_t>(byte) : __builtin_fmaf(part.scales[group], byte, part.mins[group]);
  }
};

// The four weights of a block's eight words that `words(q, lane)` gives.
template <class Quads>
inline void unpack_words(Part& to, int64_t block, Quads words) {
  for_vectors([&](int lane) {
#pragma GCC unroll 8
    for (int q = 0; q < QUADS; ++q) store_words(to.words + (block * QUADS + q) * PANEL + lane, words(q, lane));
  });
}

inline Words nibbles(const uint8_t* from, int word, int lane, int high) { return load_words(from + (word * PANEL + lane) * 4) >> 4 * high & 0x0f0f0f0fu; }

// The signed bytes that nibbles stand for.
inline Words looked_up(const int8_t (&table)[16], Words nibbles) {
#if defined(WIDE) && defined(__AVX512BW__)
  const __m512i four = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return reinterpret_cast<Words>(_mm512_shuffle_epi8(four, reinterpret_cast<__m512i>(nibbles)));
#elif defined(MIDDLE)
  const __m256i two = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return reinterpret_cast<Words>(_mm256_shuffle_epi8(two, reinterpret_cast<__m256i>(nibbles)));
#elif defined(__ARM_NEON) && OUTRIDER_BYTES == 16
  return reinterpret_cast<Words>(vqtbl1q_s8(vld1q_s8(table), reinterpret_cast<uint8x16_t>(nibbles)));
#else
  Words bytes = {};
  for (int n = 0; n < LANES; ++n)
    for (int k = 0; k < 32; k += 8) bytes[n] |= static_cast<uint32_t>(static_cast<uint8_t>(table[nibbles[n] >> k & 15])) << k;
  return bytes;
#endif
}

inline constexpr int8_t IQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
inline constexpr int8_t E2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // of MXFP4, doubled

// Bytes of a panel's row as floats.
template <class Of>
inline Floats row_of(const uint8_t* from) {
  return __builtin_convertvector(*reinterpret_cast<const Of*>(from), Floats);
}

struct Q4_0 : Quantised<32, 18, 18, 4> {
  static void pack(const uint8_t* block, int64_t n, uint8_t* panel) {
    spread<2>(block, n, 1, panel);
    spread<4>(block + 2, n, 4, panel + 2 * PANEL);
  }
  static void unpack(const uint8_t* from, Part& to, int64_t block) {
    for_vectors([&](int lane) {
      const Floats scale = widened(from + 2 * lane);
      store(to.scales + block * PANEL + lane, scale);
      store(to.mins + block * PANEL + lane, scale * -8.f);
    });
    unpack_words(to, block, [&](int q, int lane) { return nibbles(from + 2 * PANEL, q % 4, lane, q / 4); });
  }
};

struct Q4_1 : Quantised<32, 20, 20, 4> {
  static void pack(const uint8_t* block, int64_t n, uint8_t* panel) {
    spread<2>(block, n, 2, panel);
    spread<4>(block + 4, n, 4, panel + 4 * PANEL);
  }
  static void unpack(const uint8_t* from, Part& to, int64_t block) {
    for_vectors([&](int lane) {
      store(to.scales + block * PANEL + lane, widened(from + 2 * lane));
      store(to.mins + block * PANEL + lane, widened(from + 2 * (PANEL + lane)));
    });
    unpack_words(to, block, [&](int q, int lane) { return nibbles(from + 4 * PANEL, q % 4, lane, q / 4); });
  }
};

// HEAD bytes of a block are its scale, and its min if there is one.
template <int IN_FILE, int HEAD>
struct Q5 : Quantised<32, IN_FILE, IN_FILE, 5> {
  // fifth bits: that of weight 4 q + k is bit 8 k + q of an output's word
  static void pack(const uint8_t* block, int64_t n, uint8_t* panel) {
    uint32_t bits, moved = 0;
    std::memcpy(&bits, block + HEAD, 4);
    for (int k = 0; k < BLOCK; ++k) moved |= (bits >> k & 1) << (8 * (k % 4) + k / 4);
    spread<2>(block, n, HEAD / 2, panel);
    std::memcpy(panel + HEAD * PANEL + 4 * n, &moved, 4);
    spread<4>(block + HEAD + 4, n, 4, panel + (HEAD + 4) * PANEL);
  }
  static void unpack(const uint8_t* from, Part& to, int64_t block) {
    for_vectors([&](int lane) {
      const Floats scale = widened(from + 2 * lane);
      store(to.scales + block * PANEL + lane, scale);
      store(to.mins + block * PANEL + lane, HEAD == 2 ? scale * -16.f : widened(from + 2 * (PANEL + lane)));
    });
    unpack_words(to, block, [&](int q, int lane) {
      const Words fifth = load_words(from + HEAD * PANEL + 4 * lane);
      return nibbles(from + (HEAD + 4) * PANEL, q % 4, lane, q / 4) | ((q < 4 ? fifth << (4 - q) : fifth >> (q - 4)) & 0x10101010u);
    });
  }
};

struct Q5_0 : Q5<22, 2> {};
struct Q5_1 : Q5<24, 4> {};

struct Q8_0 : Quantised<32, 34, 34, 8> {
  static void pack(const uint8_t* block, int64_t n, uint8_t* panel) {
    spread<2>(block, n, 1, panel);
    spread<4>(block + 2, n, 8, panel + 2 * PANEL);
  }
  static void unpack(const uint8_t* from, Part& to, int64_t block) {
    for_vectors([&](int lane) { store(to.scales + block * PANEL + lane, widened(from + 2 * lane)); });
    unpack_words(to, block, [&](int q, int lane) { return load_words(from + 2 * PANEL + (q * PANEL + lane) * 4); });
  }
};

struct IQ4_NL : Quantised<32, 18, 18, 8> {
  static constexpr auto pack = Q4_0::pack;
  static void unpack(const uint8_t* from, Part& to, int64_t block) {
    for_vectors([&](int lane) { store(to.scales + block * PANEL + lane, widened(from + 2 * lane)); });
    unpack_words(to, block, [&](int q, int lane) { return looked_up(IQ4, nibbles(from + 2 * PANEL, q % 4, lane, q / 4)); });
  }
};

struct MXFP4 : Quantised<32, 17, 17, 8> {
  static void pack(const uint8_t* block, int64_t n, uint8_t* panel) {
    spread<1>(block, n, 1, panel);
    spread<4>(block + 1, n, 4, panel + PANEL);
  }
  static void unpack(const uint8_t* from, Part& to, int64_t block) {
    for_vectors([&](int lane) {  // half of 2^(e - 127); the two least are subnormal
      const Words e = __builtin_convertvector(*reinterpret_cast<const Bytes*>(from + lane), Words);
      store(to.scales + block * PANEL + lane, reinterpret_cast<Floats>(e < 2 ? 0x200000u << (e & 1) : (e - 1) << 23));
    });
    unpack_words(to, block, [&](int q, int lane) { return looked_up(E2M1, nibbles(from + PANEL, q % 4, lane, q / 4)); });
  }
};

struct IQ4_XS : Quantised<256, 136, 138, 8> {
  // scale, its factor for each of 8 blocks, which a file has in 4 and 2 bits and a panel in 8
  static void pack(const uint8_t* block, int64_t n, uint8_t* panel) {
    spread<2>(block, n, 1, panel);
    for (int b = 0; b < 8; ++b) {
      const int low = block[4 + b / 2] >> b % 2 * 4 & 15, high = block[2 + b / 4] >> b % 4 * 2 & 3;
      panel[(2 + b) * PANEL + n] = static_cast<uint8_t>((low | high << 4) - 32);
    }
    spread<4>(block + 8, n, 32, panel + 10 * PANEL);
  }
  static void unpack(const uint8_t* from, Part& to, int64_t block) {
#pragma GCC unroll 8
    for (int b = 0; b < 8; ++b) {
      for_vectors([&](int lane) {
        store(to.scales + (block + b) * PANEL + lane, widened(from + 2 * lane) * row_of<Signed>(from + (2 + b) * PANEL + lane));
      });
      unpack_words(to, block + b, [&](int q, int lane) { return looked_up(IQ4, nibbles(from + 10 * PANEL, b * 4 + q % 4, lane, q / 4)); });
    }
  }
};

// Words of numbers of two bits, of which four blocks share eight, and of single bits, of which eight do.
inline Words twos(const uint8_t* from, int b, int q, int lane) {
  return load_words(from + ((b / 4 * 8 + q) * PANEL + lane) * 4) >> 2 * (b % 4) & 0x03030303u;
}
inline Words ones(const uint8_t* from, int b, int q, int lane) { return load_words(from + (q * PANEL + lane) * 4) >> b & 0x01010101u; }

struct Q2_K : Quantised<256, 84, 84, 4, 16> {
  static void pack(const uint8_t* block, int64_t n, uint8_t* panel) {
    spread<2>(block + 80, n, 2, panel);
    spread<1>(block, n, 16, panel + 4 * PANEL);
    spread<4>(block + 16, n, 16, panel + 20 * PANEL);
  }
  static void unpack(const uint8_t* from, Part& to, int64_t block) {
    for (int group = 0; group < 16; ++group)
      for_vectors([&](int lane) {
        const Words factors = __builtin_convertvector(*reinterpret_cast<const Bytes*>(from + (4 + group) * PANEL + lane), Words);
        const int64_t at = (2 * block + group) * PANEL + lane;
        store(to.scales + at, widened(from + 2 * lane) * __builtin_convertvector(factors & 15, Floats));
        store(to.mins + at, -widened(from + 2 * (PANEL + lane)) * __builtin_convertvector(factors >> 4, Floats));
      });
#pragma GCC unroll 8
    for (int b = 0; b < 8; ++b) unpack_words(to, block + b, [&](int q, int lane) { return twos(from + 20 * PANEL, b, q, lane); });
  }
};

struct Q3_K : Quantised<256, 110, 114, 4, 16> {
  // scale, its factor for each of 16 groups, which a file has in 4 and 2 bits and a panel in 8
  static void pack(const uint8_t* block, int64_t n, uint8_t* panel) {
    const uint8_t *low = block + 96, *high = block + 104;
    spread<2>(block + 108, n, 1, panel);
    for (int g = 0; g < 16; ++g)
      panel[(2 + g) * PANEL + n] = static_cast<uint8_t>(((low[g % 8] >> g / 8 * 4 & 15) | (high[g % 4] >> g / 4 * 2 & 3) << 4) - 32);
    spread<4>(block, n, 24, panel + 18 * PANEL);
  }
  static void unpack(const uint8_t* from, Part& to, int64_t block) {
    for (int group = 0; group < 16; ++group)
      for_vectors([&](int lane) {
        const Floats scale = widened(from + 2 * lane) * row_of<Signed>(from + (2 + group) * PANEL + lane);
        store(to.scales + (2 * block + group) * PANEL + lane, scale);
        store(to.mins + (2 * block + group) * PANEL + lane, scale * -4.f);
      });
#pragma GCC unroll 8
    for (int b = 0; b < 8; ++b)
      unpack_words(to, block + b, [&](int q, int lane) { return twos(from + 50 * PANEL, b, q, lane) | ones(from + 18 * PANEL, b, q, lane) << 2; });
  }
};

// A scale and a min, and for each of 8 blocks their factors, which a file has in 6 bits and a panel in 8.
inline void pack_factors(const uint8_t* block, int64_t n, uint8_t* panel) {
  const uint8_t* six = block + 4;
  spread<2>(block, n, 2, panel);
  for (int b = 0; b < 8; ++b) {
    const bool low = b < 4;
    panel[(4 + b) * PANEL + n] = low ? six[b] & 63 : (six[b + 4] & 15) | (six[b - 4] >> 6) << 4;
    panel[(12 + b) * PANEL + n] = low ? six[b + 4] & 63 : six[b + 4] >> 4 | (six[b] >> 6) << 4;
  }
}
inline void unpack_factors(const uint8_t* from, Part& to, int64_t block, int b) {
  for_vectors([&](int lane) {
    store(to.scales + (block + b) * PANEL + lane, widened(from + 2 * lane) * row_of<Bytes>(from + (4 + b) * PANEL + lane));
    store(to.mins + (block + b) * PANEL + lane, -widened(from + 2 * (PANEL + lane)) * row_of<Bytes>(from + (12 + b) * PANEL + lane));
  });
}

struct Q4_K : Quantised<256, 144, 148, 4> {
  static void pack(const uint8_t* block, int64_t n, uint8_t* panel) {
    pack_factors(block, n, panel);
    spread<4>(block + 16, n, 32, panel + 20 * PANEL);
  }
  static void unpack(const uint8_t* from, Part& to, int64_t block) {
#pragma GCC unroll 8
    for (int b = 0; b < 8; ++b) {
      unpack_factors(from, to, block, b);
      unpack_words(to, block + b, [&](int q, int lane) { return nibbles(from + 20 * PANEL, b / 2 * 8 + q, lane, b % 2); });
    }
  }
};

struct Q5_K : Quantised<256, 176, 180, 5> {
  static void pack(const uint8_t* block, int64_t n, uint8_t* panel) {
    pack_factors(block, n, panel);
    spread<4>(block + 16, n, 40, panel + 20 * PANEL);
  }
  static void unpack(const uint8_t* from, Part& to, int64_t block) {
#pragma GCC unroll 8
    for (int b = 0; b < 8; ++b) {
      unpack_factors(from, to, block, b);
      unpack_words(to, block + b, [&](int q, int lane) {
        return nibbles(from + 52 * PANEL, b / 2 * 8 + q, lane, b % 2) | ones(from + 20 * PANEL, b, q, lane) << 4;
      });
    }
  }
};

struct Q6_K : Quantised<256, 210, 210, 6, 16> {
  static void pack(const uint8_t* block, int64_t n, uint8_t* panel) {
    spread<2>(block + 208, n, 1, panel);
    spread<1>(block + 192, n, 16, panel + 2 * PANEL);
    spread<4>(block, n, 48, panel + 18 * PANEL);
  }
  static void unpack(const uint8_t* from, Part& to, int64_t block) {
    for (int group = 0; group < 16; ++group)
      for_vectors([&](int lane) {
        const Floats scale = widened(from + 2 * lane) * row_of<Signed>(from + (2 + group) * PANEL + lane);
        store(to.scales + (2 * block + group) * PANEL + lane, scale);
        store(to.mins + (2 * block + group) * PANEL + lane, scale * -32.f);
      });
#pragma GCC unroll 8
    for (int b = 0; b < 8; ++b) {  // halves of 128 weights: four blocks share the words of their highest two bits
      const int half = b / 4, part = b % 4;
      unpack_words(to, block + b, [&](int q, int lane) {
        return nibbles(from + 18 * PANEL, half * 16 + part % 2 * 8 + q, lane, part / 2) | twos(from + 146 * PANEL, b, q, lane) << 4;
      });
    }
  }
};

// A kind as functions.
struct Layout {
  void (*unpack)(const uint8_t*, Part&, int64_t);           // of a panel's block into a part, from this block of 32 on
  float (*weight)(const Part&, int64_t, int64_t);           // that is the k-th of a lane
  void (*pack)(const uint8_t*, int64_t, uint8_t*);          // a file's block as that of output n in a panel
  int64_t size, stored, packed;                             // weights of a block, its bytes in a file and in a panel
};

template <class Kind>
constexpr Layout layout_of() {
  return {Kind::unpack, Kind::weight, Kind::pack, Kind::SIZE, Kind::STORED, Kind::BYTES};
}

}  // namespace outrider::quantized
