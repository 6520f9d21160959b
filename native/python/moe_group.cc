#include "python/moe_group.h"

#include <fcntl.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "moe/group.h"
#include "python/errors.h"
#include "python/moe_far_ranks.h"

namespace py = pybind11;

namespace kvc::python {

namespace {

using Sizes = std::vector<uint32_t>;
using ColumnTuple = std::tuple<uintptr_t, uint32_t, uint64_t, bool>;

uint64_t nanoseconds(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0)
    raise(invalid("moe_group", "the timeout must be a number of seconds, 0 or more"));
  return static_cast<uint64_t>(std::min(seconds, 1e6) * 1e9);
}

// Its destructor waits for the GPU, without the GIL.
class PythonMoeGroup {
 public:
  PythonMoeGroup(uint32_t rank, uint32_t ranks, int device, uint64_t dispatch_bytes, uint64_t combine_bytes,
                 uint32_t max_tokens, uint32_t experts, uint32_t slots, double timeout, bool survive)
      : slots_(slots) {
    const moe::GroupConfig config{rank,       ranks,   device, dispatch_bytes,       combine_bytes,
                                  max_tokens, experts, slots,  nanoseconds(timeout), survive};
    group_ = unwrap(without_gil([&] { return moe::Group::create(config); }));
  }
  PythonMoeGroup(const PythonMoeGroup&) = delete;
  PythonMoeGroup& operator=(const PythonMoeGroup&) = delete;
  ~PythonMoeGroup() {
    without_gil([&] {
      group_.reset();
      far_.reset();
    });
  }

  moe::Group& group() { return *group_; }
  const moe::Layout& layout(uint32_t slot) const {
    if (slot >= slots_)
      raise(invalid("moe_group",
                    "slot " + std::to_string(slot) + " does not exist: the group has " + std::to_string(slots_)));
    return group_->layout();
  }

  int descriptor() {
    UniqueFd made = unwrap(group_->descriptor());
    const int fd = fcntl(made.get(), F_DUPFD_CLOEXEC, 0);
    if (fd < 0) raise(system_error({}, "moe_descriptor", errno));
    return fd;
  }
  void dispatch(uintptr_t stream, uint32_t slot, const Sizes& sizes, uintptr_t ids, uint32_t ids_bytes, uint32_t top_k,
                const std::vector<ColumnTuple>& columns, uint32_t phases, std::optional<size_t> ids_column) {
    std::vector<moe::ColumnSpec> specs;
    specs.reserve(columns.size());
    for (const auto& [source, row_bytes, offset, to_all] : columns) {
      specs.push_back({reinterpret_cast<const void*>(source), row_bytes, offset, to_all});
    }
    if (ids_column && *ids_column < specs.size()) specs[*ids_column].blank = true;
    unwrap(without_gil([&] {
      return group_->dispatch(reinterpret_cast<cuda::Stream>(stream), slot, sizes, reinterpret_cast<const void*>(ids),
                              ids_bytes, top_k, specs, phases);
    }));
  }
  void combine(uintptr_t stream, uint32_t slot, const Sizes& sizes, uintptr_t out, uint32_t hidden, bool accumulate,
               uint32_t phases) {
    unwrap(without_gil([&] {
      return group_->combine(reinterpret_cast<cuda::Stream>(stream), slot, sizes, reinterpret_cast<void*>(out), hidden,
                             accumulate, phases);
    }));
  }
  std::optional<std::pair<uint32_t, uint32_t>> fault() {
    const auto found = group_->fault();
    if (!found) return std::nullopt;
    return std::pair{static_cast<uint32_t>(found->first), found->second};
  }
  void close(double timeout) {
    const uint64_t bound = nanoseconds(timeout);
    unwrap(without_gil([&] { return group_->close(bound); }));
    without_gil([&] { far_.reset(); });
  }
  void join(PythonFarRanks& far) {
    std::shared_ptr<moe::FarRanks> joined = far.far();
    unwrap(group_->join(*joined));
    far_ = std::move(joined);
  }

 private:
  uint32_t slots_;
  std::shared_ptr<moe::FarRanks> far_;  // null: no ranks of other nodes
  std::unique_ptr<moe::Group> group_;
};

}  // namespace

void bind_moe_group(py::module_& module) {
  using G = PythonMoeGroup;
  module.attr("MOE_MAX_RANKS") = moe::kMaxRanks;
  module.attr("MOE_MAX_COLUMNS") = moe::kMaxColumns;
  module.attr("MOE_MAX_TOP_K") = moe::kMaxTopK;
  module.attr("MOE_COLUMN_ALIGNMENT") = moe::kColumnAlignment;
  py::class_<G>(module, "MoeGroup", py::is_final())
      .def(py::init<uint32_t, uint32_t, int, uint64_t, uint64_t, uint32_t, uint32_t, uint32_t, double, bool>(),
           py::arg("rank"), py::arg("ranks"), py::arg("device"), py::arg("dispatch_bytes"), py::arg("combine_bytes"),
           py::arg("max_tokens"), py::arg("experts"), py::arg("slots"), py::arg("timeout"), py::arg("survive") = false)
      .def_property_readonly("segment_bytes", [](G& self) { return self.group().segment_bytes(); })
      .def_property_readonly("base", [](G& self) { return reinterpret_cast<uintptr_t>(self.group().base()); })
      .def(
          "dispatch_offset", [](G& self, uint32_t slot) { return self.layout(slot).dispatch(slot); }, py::arg("slot"))
      .def(
          "combine_offset", [](G& self, uint32_t slot) { return self.layout(slot).combine(slot); }, py::arg("slot"))
      .def("descriptor", &G::descriptor)
      .def(
          "attach",
          [](G& self, uint32_t rank, int fd) { unwrap(without_gil([&] { return self.group().attach(rank, fd); })); },
          py::arg("rank"), py::arg("descriptor"))
      .def("join", &G::join, py::arg("far"))
      .def(
          "place",
          [](G& self, const std::vector<uint32_t>& owners) {
            unwrap(without_gil([&] { return self.group().place(owners); }));
          },
          py::arg("owners"))
      .def("dispatch", &G::dispatch, py::arg("stream"), py::arg("slot"), py::arg("sizes"), py::arg("ids"),
           py::arg("ids_bytes"), py::arg("top_k"), py::arg("columns"), py::arg("phases") = 3,
           py::arg("ids_column") = py::none())
      .def("combine", &G::combine, py::arg("stream"), py::arg("slot"), py::arg("sizes"), py::arg("out"),
           py::arg("hidden"), py::arg("accumulate") = false, py::arg("phases") = 3)
      .def(
          "lose", [](G& self, uint32_t rank, bool left) { self.group().lose(rank, left); }, py::arg("rank"),
          py::arg("left") = false)
      .def("fault", &G::fault)
      .def(
          "fence", [](G& self, uint32_t rank) { self.group().fence(rank); }, py::arg("rank"))
      .def("masked", [](G& self) { return self.group().masked(); })
      .def("epochs", [](G& self) { return unwrap(without_gil([&] { return self.group().epochs(); })); })
      .def(
          "begin",
          [](G& self, const std::vector<uint32_t>& epochs) {
            unwrap(without_gil([&] { return self.group().begin(epochs); }));
          },
          py::arg("epochs"))
      .def(
          "prepare_admission",
          [](G& self, uint32_t rank, int fd) {
            unwrap(without_gil([&] { return self.group().prepare_admission(rank, fd); }));
          },
          py::arg("rank"), py::arg("descriptor"))
      .def("cancel_admission", [](G& self) { without_gil([&] { self.group().cancel_admission(); }); })
      .def("admit", [](G& self) { return unwrap(without_gil([&] { return self.group().admit(); })); })
      .def("close", &G::close, py::arg("timeout"));
}

}  // namespace kvc::python
