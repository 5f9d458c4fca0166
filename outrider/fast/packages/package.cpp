// A compiled package of torch, called without the interpreter's lock: torch's own Python call holds it for the whole pass, so
// that a server could not send an answer meanwhile.
#include <ATen/ops/from_blob.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/library.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace {

using Package = torch::inductor::AOTIModelPackageLoader;

Package& opened(int64_t package) { return *reinterpret_cast<Package*>(package); }

int64_t open(std::string path) { return reinterpret_cast<int64_t>(new Package(path)); }

// Where its weights are elsewhere, the constants that are none; and the names of all that it is given.
std::tuple<std::string, std::vector<std::string>> describe(int64_t package) {
  auto metadata = opened(package).get_metadata();
  return {metadata["constants"], opened(package).get_constant_fqns()};
}

// The weights stay where they are, and the caller keeps them: torch never lets go of a tensor that it is given so, which
// is why it gets one that owns nothing.
void give(int64_t package, std::vector<std::string> names, std::vector<at::Tensor> weights) {
  if (names.size() != weights.size()) throw std::runtime_error("outrider: as many names as weights are wanted");
  std::unordered_map<std::string, at::Tensor> constants;
  for (size_t n = 0; n < names.size(); ++n) {
    at::Tensor& own = weights[n];
    constants.emplace(names[n], at::from_blob(own.data_ptr(), own.sizes(), own.strides(), own.options()));
  }
  opened(package).load_constants(constants, false, true, true);
}

std::vector<at::Tensor> run(int64_t package, std::vector<at::Tensor> arguments) {
  return opened(package).boxed_run(std::move(arguments));
}

TORCH_LIBRARY_FRAGMENT(outrider, library) {
  library.def("open_package(str path) -> int", &open);
  library.def("describe_package(int package) -> (str, str[])", &describe);
  library.def("give_package(int package, str[] names, Tensor[] weights) -> ()", &give);
  library.def("run_package(int package, Tensor[] arguments) -> Tensor[]", &run);
}

}  // namespace

extern "C" void outrider_close_package(int64_t package) { delete &opened(package); }
