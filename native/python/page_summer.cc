#include "python/page_summer.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/bounds.h"
#include "base/page_sum.h"
#include "cuda/page_summer.h"
#include "python/errors.h"

namespace py = pybind11;

namespace kvc::python {

namespace {

class PythonPageSummer {
 public:
  explicit PythonPageSummer(bool on_gpu) {
    if (on_gpu) gpu_ = unwrap(without_gil([] { return cuda::PageSummer::create(); }));
  }

  py::bytes sum(uint64_t address, uint64_t nbytes, std::vector<uint64_t> layers, const std::vector<uint32_t>& blocks,
                uint64_t stride, const std::vector<uint64_t>& runs, uint64_t run_bytes) {
    std::vector<uint64_t> sums(layers.size() * blocks.size());
    unwrap(without_gil([&]() -> Status {
      if (sums.empty() || runs.empty()) return {};
      const uint64_t block = *std::max_element(blocks.begin(), blocks.end());
      const uint64_t layer = *std::max_element(layers.begin(), layers.end());
      const uint64_t run = *std::max_element(runs.begin(), runs.end());
      const uint64_t room = nbytes > block * stride ? nbytes - block * stride : 0;
      if (stride > nbytes || !fits(layer, run_bytes, room) || !fits(run, run_bytes, room - layer)) {
        return Error{ErrorCode::kOutOfRange, {}, {}, "sum_pages", "a page lies outside its memory region"};
      }
      for (uint64_t& offset : layers) offset += address;
      const PageSums pages{
          .layers = layers.data(),
          .blocks = blocks.data(),
          .runs = runs.data(),
          .sums = sums.data(),
          .stride = stride,
          .run_bytes = run_bytes,
          .layer_count = static_cast<uint32_t>(layers.size()),
          .block_count = static_cast<uint32_t>(blocks.size()),
          .run_count = static_cast<uint32_t>(runs.size()),
      };
      if (gpu_ != nullptr) return gpu_->sum(pages);
      sum_pages(pages);
      return {};
    }));
    return {reinterpret_cast<const char*>(sums.data()), sums.size() * sizeof(uint64_t)};
  }

 private:
  std::unique_ptr<cuda::PageSummer> gpu_;  // null: the pages are in host memory
};

}  // namespace

void bind_page_summer(py::module_& module) {
  py::class_<PythonPageSummer>(module, "PageSummer", py::is_final())
      .def(py::init<bool>(), py::arg("on_gpu"))
      .def("sum", &PythonPageSummer::sum, py::arg("address"), py::arg("nbytes"), py::arg("layers"), py::arg("blocks"),
           py::arg("stride"), py::arg("runs"), py::arg("run_bytes"));
}

}  // namespace kvc::python
