// kv_connector._bench: the baselines of `kv-connector bench`, and latency without Python.
//
// Every function releases the GIL while it moves bytes. Memory is passed by its address: the benchmark owns the pools
// and keeps them alive.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "bench/engine_end.h"
#include "bench/engine_ping_pong.h"
#include "bench/expert_steps.h"
#include "bench/group_steps.h"
#include "bench/memory_copy.h"
#include "bench/micro.h"
#include "bench/plain_socket.h"

namespace py = pybind11;

namespace kvc::bench {
namespace {

using Slots = py::array_t<int64_t, py::array::c_style>;

std::byte* memory(uintptr_t address) { return reinterpret_cast<std::byte*>(address); }  // NOLINT: an address it is

std::span<const int64_t> view(const Slots& slots) { return {slots.data(), static_cast<size_t>(slots.size())}; }

py::bytes to_python(const Bytes& bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

std::span<const std::byte> from_python(std::string_view bytes) { return std::as_bytes(std::span(bytes)); }

using Unlocked = py::call_guard<py::gil_scoped_release>;

// provider, device, address
using DomainTuple = std::tuple<std::string, std::string, std::string>;

std::vector<DomainConfig> domains_of(const std::vector<DomainTuple>& tuples) {
  std::vector<DomainConfig> domains;
  for (const auto& [provider, device, address] : tuples) {
    domains.push_back({.provider = provider, .device = device, .address = address, .max_delay_us = 0});
  }
  return domains;
}

template <typename F>
auto unlocked(F f) {
  const py::gil_scoped_release released;
  return f();
}

// Converts to nanoseconds by step.
py::dict to_python(const Steps& steps) {
  py::dict named;
  named["submit"] = steps.submit;
  named["dequeue"] = steps.dequeue;
  named["first"] = steps.first;
  named["last"] = steps.last;
  named["done"] = steps.done;
  return named;
}

py::dict to_python(const ExpertPhase& phase) {
  py::dict named;
  named["submit"] = phase.submit;
  named["first"] = phase.first;
  return named;
}

}  // namespace

PYBIND11_MODULE(_bench, module) {
  module.doc() = "Baselines and native latency loops of `kv-connector bench`.";

  module.def(
      "copy_pages",
      [](uintptr_t target, const Slots& target_slots, uintptr_t source, const Slots& source_slots,
         uint64_t page_bytes) {
        const PageList to{memory(target), view(target_slots), page_bytes};
        const PageList from{memory(source), view(source_slots), page_bytes};
        const py::gil_scoped_release unlocked;
        copy_pages(to, from);
      },
      py::arg("target"), py::arg("target_slots"), py::arg("source"), py::arg("source_slots"), py::arg("page_bytes"),
      "One memcpy a page within this process.");

  module.def(
      "write_pages_to_process",
      [](int pid, uintptr_t target, const Slots& target_slots, uintptr_t source, const Slots& source_slots,
         uint64_t page_bytes, size_t pages_per_call) {
        const PageList to{memory(target), view(target_slots), page_bytes};
        const PageList from{memory(source), view(source_slots), page_bytes};
        const py::gil_scoped_release unlocked;
        write_pages_to_process(pid, to, from, pages_per_call);
      },
      py::arg("pid"), py::arg("target"), py::arg("target_slots"), py::arg("source"), py::arg("source_slots"),
      py::arg("page_bytes"), py::arg("pages_per_call"),
      "Writes pages into the memory of another process with process_vm_writev.");

  py::class_<SocketTarget>(module, "SocketTarget", "Serves its pool to one SocketInitiator, on a thread of its own.")
      .def(py::init([](uintptr_t pool, uint64_t pool_bytes) {
             return std::make_unique<SocketTarget>(memory(pool), pool_bytes);
           }),
           py::arg("pool"), py::arg("pool_bytes"))
      .def_property_readonly("port", &SocketTarget::port);

  py::class_<SocketInitiator>(module, "SocketInitiator", "Writes pages over one plain blocking TCP connection.")
      .def(
          py::init([](uintptr_t pool, uint16_t port) { return std::make_unique<SocketInitiator>(memory(pool), port); }),
          py::arg("pool"), py::arg("port"))
      .def(
          "write_pages",
          [](SocketInitiator& self, const Slots& target_slots, uintptr_t source, const Slots& source_slots,
             uint64_t page_bytes) {
            const PageList from{memory(source), view(source_slots), page_bytes};
            const std::span<const int64_t> to = view(target_slots);
            const py::gil_scoped_release unlocked;
            self.write_pages(to, from);
          },
          py::arg("target_slots"), py::arg("source"), py::arg("source_slots"), py::arg("page_bytes"))
      .def("ping_pong", &SocketInitiator::ping_pong, py::arg("bytes"), py::arg("iterations"), py::arg("pause_us"),
           Unlocked(), "Half of each round trip, in microseconds.");

  py::class_<EngineEnd>(module, "EngineEnd", "One side of a measurement between two engines.")
      .def("offer", [](EngineEnd& self) { return to_python(self.offer()); })
      .def("accept", [](EngineEnd& self, std::string_view offer) { return to_python(self.accept(from_python(offer))); })
      .def("complete", [](EngineEnd& self, std::string_view answer) { self.complete(from_python(answer)); })
      .def("descriptor", [](EngineEnd& self) { return to_python(self.descriptor()); })
      .def("import_region", [](EngineEnd& self, std::string_view bytes) { self.import_region(from_python(bytes)); })
      .def("singles", &EngineEnd::singles, py::arg("bytes"), py::arg("iterations"), py::arg("immediate"), Unlocked(),
           "Seconds that each of these writes took, one after the other.")
      .def(
          "register_once",
          [](EngineEnd& self, uintptr_t address, uint64_t bytes) { self.register_once(memory(address), bytes); },
          py::arg("memory"), py::arg("bytes"), Unlocked(), "Registers memory and deregisters it again. Any thread.");

  py::class_<EnginePingPong, EngineEnd> ping_pong(module, "EnginePingPong",
                                                  "One side of a ping-pong between two engines.");
  py::enum_<EnginePingPong::Face>(ping_pong, "Face")
      .value("WORKER", EnginePingPong::Face::kWorker, "answers in the counter's callback, on the transfer thread")
      .value("THREAD", EnginePingPong::Face::kThread, "answers on a thread that sleeps in wait_counters()");
  ping_pong
      .def(py::init([](const std::vector<DomainTuple>& domains, uint32_t spin_us, uintptr_t buffer,
                       uint64_t buffer_bytes, int memfd) {
             return std::make_unique<EnginePingPong>(domains_of(domains), spin_us, memory(buffer), buffer_bytes, memfd);
           }),
           py::arg("domains"), py::arg("spin_us"), py::arg("buffer"), py::arg("buffer_bytes"), py::arg("memfd"))
      .def("prepare", &EnginePingPong::prepare, py::arg("iterations"))
      .def("ping", &EnginePingPong::ping, py::arg("face"), py::arg("peer_immediates"), py::arg("bytes"),
           py::arg("pause_us"), Unlocked())
      .def("pong", &EnginePingPong::pong, py::arg("face"), py::arg("peer_immediates"), py::arg("bytes"), Unlocked());

  py::class_<GroupSteps>(module, "GroupSteps", "Measures the steps of a scatter and of a barrier.")
      .def(py::init([](const std::vector<DomainTuple>& domains, const std::vector<DomainTuple>& peer_domains,
                       uint32_t spin_us, uint32_t peers, uint64_t slice_bytes) {
             return std::make_unique<GroupSteps>(domains_of(domains), domains_of(peer_domains), spin_us, peers,
                                                 slice_bytes);
           }),
           py::arg("domains"), py::arg("peer_domains"), py::arg("spin_us"), py::arg("peers"), py::arg("slice_bytes"))
      .def("domains", &GroupSteps::domains)
      .def(
          "scatter",
          [](GroupSteps& self, uint32_t iterations) {
            return to_python(unlocked([&] { return self.scatter(iterations); }));
          },
          py::arg("iterations"))
      .def(
          "barrier",
          [](GroupSteps& self, uint32_t iterations) {
            return to_python(unlocked([&] { return self.barrier(iterations); }));
          },
          py::arg("iterations"))
      .def(
          "prepared_scatter",
          [](GroupSteps& self, uint32_t iterations) {
            return to_python(unlocked([&] { return self.prepared_scatter(iterations); }));
          },
          py::arg("iterations"))
      .def(
          "prepared_barrier",
          [](GroupSteps& self, uint32_t iterations) {
            return to_python(unlocked([&] { return self.prepared_barrier(iterations); }));
          },
          py::arg("iterations"));

  py::class_<ExpertSteps>(module, "ExpertSteps", "Measures how soon packets of experts between nodes reach the lanes.")
      .def(py::init([](const std::vector<DomainTuple>& domains, const std::vector<DomainTuple>& peer_domains,
                       uint32_t spin_us, uint32_t peers, uint32_t tokens, uint32_t row_bytes) {
             return std::make_unique<ExpertSteps>(domains_of(domains), domains_of(peer_domains), spin_us, peers, tokens,
                                                  row_bytes);
           }),
           py::arg("domains"), py::arg("peer_domains"), py::arg("spin_us"), py::arg("peers"), py::arg("tokens"),
           py::arg("row_bytes"), Unlocked())
      .def(
          "steps",
          [](ExpertSteps& self, uint32_t iterations) {
            const ExpertTimes times = unlocked([&] { return self.steps(iterations); });
            py::dict named;
            named["dispatch"] = to_python(times.dispatch);
            named["combine"] = to_python(times.combine);
            return named;
          },
          py::arg("iterations"));

  module.def("submit_write", &submit_write, py::arg("iterations"), Unlocked());
  module.def("submit_write_one", &submit_write_one, py::arg("iterations"), Unlocked());
  module.def("post_pages", &post_pages, py::arg("iterations"), py::arg("pages"), py::arg("page_bytes"), Unlocked());
  module.def("count_immediates", &count_immediates, py::arg("immediates"), py::arg("counters"), Unlocked());
  module.def("clock_cost", &clock_cost);
}

}  // namespace kvc::bench
