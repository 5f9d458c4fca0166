// Shared by our kernels: vectors as wide as compiler flags say (AVX-512, AVX2, NEON), threads, and the registration of operators.
#pragma once

#include <cstdint>
#include <stdexcept>

#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_num_threads() 1
#define omp_get_thread_num() 0
#endif
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace outrider {

#if defined(__AVX512F__)
constexpr int BYTES = 64;
#elif defined(__AVX2__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif
constexpr int LANES = BYTES / 4;
// vectors of GCC and clang themselves
typedef float Floats __attribute__((vector_size(BYTES), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(BYTES), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(BYTES), aligned(4)));

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
