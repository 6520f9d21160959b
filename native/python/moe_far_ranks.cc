#include "python/moe_far_ranks.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "python/errors.h"
#include "python/python_engine.h"

namespace py = pybind11;

namespace kvc::python {

namespace {

using moe::FarRanks;

std::span<const std::byte> view_of(const py::bytes& bytes) {
  const std::string_view text(bytes);
  return std::as_bytes(std::span(text));
}

py::bytes bytes_of(const Bytes& bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

// Runs a call of the forming, which blocks, and returns its bytes.
template <typename Call>
py::bytes formed(PythonFarRanks& self, Call call) {
  const std::shared_ptr<FarRanks> far = self.far();
  return bytes_of(unwrap(without_gil([&] { return call(*far); })));
}

}  // namespace

std::shared_ptr<FarRanks> PythonFarRanks::far() {
  std::shared_ptr<FarRanks> far;
  {
    const std::lock_guard lock(mutex_);
    far = far_;
  }
  if (far == nullptr) raise({ErrorCode::kClosed, {}, {}, "moe_far_ranks", "the lanes to other nodes are closed"});
  return far;
}

void PythonFarRanks::close() {
  std::shared_ptr<FarRanks> ended;
  {
    const std::lock_guard lock(mutex_);
    ended = std::exchange(far_, nullptr);
  }
  without_gil([&] { ended.reset(); });
}

void bind_moe_far_ranks(py::module_& module) {
  using F = PythonFarRanks;
  py::class_<F>(module, "MoeFarRanks", py::is_final())
      .def(py::init([](std::string name, const std::vector<DomainTuple>& domains, uint32_t rank, uint32_t ranks,
                       const std::vector<uint32_t>& far, uint32_t slots, uint32_t max_tokens, uint32_t row_bytes,
                       uint32_t hidden) {
             EngineConfig engine;
             engine.name = std::move(name);
             engine.domains = domain_configs(domains);
             moe::FarConfig config{rank, ranks, 0, slots, max_tokens, row_bytes, hidden};
             for (const uint32_t other : far) config.far |= other < 32 ? 1U << other : 1U << 31;
             return std::make_unique<F>(
                 unwrap(without_gil([&] { return FarRanks::create(std::move(engine), config); })));
           }),
           py::arg("name"), py::arg("domains"), py::arg("rank"), py::arg("ranks"), py::arg("far"), py::arg("slots"),
           py::arg("max_tokens"), py::arg("row_bytes"), py::arg("hidden"))
      .def(
          "offer", [](F& self, uint32_t rank) { return formed(self, [&](FarRanks& far) { return far.offer(rank); }); },
          py::arg("rank"))
      .def(
          "accept",
          [](F& self, uint32_t rank, const py::bytes& offer) {
            const std::span<const std::byte> given = view_of(offer);
            return formed(self, [&](FarRanks& far) { return far.accept(rank, given); });
          },
          py::arg("rank"), py::arg("offer"))
      .def(
          "complete",
          [](F& self, uint32_t rank, const py::bytes& accepted) {
            const std::span<const std::byte> given = view_of(accepted);
            return formed(self, [&](FarRanks& far) { return far.complete(rank, given); });
          },
          py::arg("rank"), py::arg("accepted"))
      .def(
          "meet",
          [](F& self, uint32_t rank, const py::bytes& completed) {
            const std::span<const std::byte> given = view_of(completed);
            const std::shared_ptr<FarRanks> far = self.far();
            unwrap(without_gil([&] { return far->meet(rank, given); }));
          },
          py::arg("rank"), py::arg("completed"))
      .def("begin",
           [](F& self) {
             const std::shared_ptr<FarRanks> far = self.far();
             unwrap(without_gil([&] { return far->begin(); }));
           })
      .def("departures",
           [](F& self) {
             std::vector<std::tuple<uint32_t, bool, std::string>> found;
             for (FarRanks::Departure& one : self.far()->departures()) {
               found.emplace_back(one.rank, one.left, std::move(one.reason));
             }
             return found;
           })
      .def("departure_fd", [](F& self) { return self.far()->departure_fd(); })
      .def(
          "send",
          [](F& self, uint32_t rank, const py::bytes& message) { unwrap(self.far()->send(rank, view_of(message))); },
          py::arg("rank"), py::arg("message"))
      .def("receive",
           [](F& self) {
             std::vector<std::pair<uint32_t, py::bytes>> found;
             for (const auto& [rank, bytes] : self.far()->receive()) found.emplace_back(rank, bytes_of(bytes));
             return found;
           })
      .def("message_fd", [](F& self) { return self.far()->message_fd(); })
      .def(
          "failure", [](F& self, uint32_t rank) { return self.far()->failure(rank); }, py::arg("rank"))
      .def("counts",
           [](F& self) {
             const FarRanks::Counts counts = self.far()->counts();
             return std::tuple(counts.scatters, counts.immediates, counts.rewritten, counts.links, counts.links_lost);
           })
      .def(
          "leave",
          [](F& self, double timeout) {
            if (!std::isfinite(timeout) || timeout < 0) {
              raise(invalid("moe_leave", "the timeout must be a number of seconds, 0 or more"));
            }
            const std::shared_ptr<FarRanks> far = self.far();
            without_gil([&] { far->leave(Timeout(static_cast<int64_t>(std::min(timeout, 1e6) * 1e6))); });
          },
          py::arg("timeout"))
      .def("close", &F::close);
}

}  // namespace kvc::python
