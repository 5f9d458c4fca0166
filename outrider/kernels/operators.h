// Shared by our kernels: vectors as wide as compiler flags say (AVX-512, AVX2, NEON) and e^x of them, threads, and the registration
// of operators.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <stdexcept>

#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_num_threads() 1
#define omp_get_thread_num() 0
#endif
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace outrider {

#if defined(OUTRIDER_BYTES)  // given by a test
#elif defined(__AVX512F__)
#define OUTRIDER_BYTES 64
#elif defined(__AVX2__)
#define OUTRIDER_BYTES 32
#else
#define OUTRIDER_BYTES 16
#endif
constexpr int BYTES = OUTRIDER_BYTES;
constexpr int LANES = BYTES / 4;
// vectors of GCC and clang themselves
typedef float Floats __attribute__((vector_size(BYTES), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(BYTES), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(BYTES), aligned(4)));

inline Floats load(const float* at) { return *reinterpret_cast<const Floats*>(at); }
inline void store(float* at, Floats value) { *reinterpret_cast<Floats*>(at) = value; }

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

constexpr int64_t SMALL = 1 << 16;  // multiply-adds below which a second thread costs more than it saves

inline void sure(AOTITorchError error) {
  if (error) throw std::runtime_error("outrider: torch's C interface reported an error");
}

// An operator of torch for eager code; compiled packages call its C name.
struct Operator {
  TorchLibraryHandle schema, kernel;
  Operator(const char* name, const char* signature, void (*boxed)(uint64_t*, uint64_t, uint64_t)) {
    sure(aoti_torch_library_init_fragment("outrider", __FILE__, __LINE__, &schema));
    sure(aoti_torch_library_def(schema, signature));
    sure(aoti_torch_library_init_impl("outrider", "CPU", __FILE__, __LINE__, &kernel));
    sure(aoti_torch_library_impl(kernel, name, boxed));
  }
};

}  // namespace outrider
