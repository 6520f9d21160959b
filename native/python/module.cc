// kv_connector._native: the module's table of contents. Its stub is kv_connector/_native.pyi.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/stream_signal.h"
#include "engine/message.h"
#include "engine/shared_memory.h"
#include "python/python_engine.h"

namespace py = pybind11;

namespace kvc::python {

namespace {

// Every provider of this build: usable, or why a domain of it does not open here.
std::vector<std::tuple<std::string, bool, std::string>> probe_providers() {
  class Deaf final : public DomainSink {
    void on_complete(WorkId, const Error*) noexcept override {}
    void on_immediate(LinkId, uint32_t) noexcept override {}
    bool on_message(LinkId, std::span<const std::byte>) noexcept override { return true; }
    void on_link_down(LinkId, const Error&, bool) noexcept override {}
  };
  return without_gil([] {
    std::vector<std::tuple<std::string, bool, std::string>> found;
    Deaf sink;
    for (const std::string_view provider : provider_names()) {
      DomainConfig config;
      config.provider = provider;
      const Result<std::unique_ptr<Domain>> domain = open_domain(config, sink);
      found.emplace_back(provider, domain.ok(), domain.ok() ? "" : domain.error().to_string());
    }
    return found;
  });
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "The native engine; kv_connector.engine is its typed face.";
  module.def("probe_providers", &probe_providers);
  module.attr("MAX_MESSAGE_BYTES") = kMaxUserMessageBytes;

  py::class_<SharedMemory>(module, "SharedMemory", py::buffer_protocol(), py::is_final())
      .def(py::init([](const std::string& name, uint64_t nbytes) {
             return std::make_unique<SharedMemory>(unwrap(SharedMemory::create(name, nbytes)));
           }),
           py::arg("name"), py::arg("nbytes"))
      .def_property_readonly("address",
                             [](const SharedMemory& self) { return reinterpret_cast<uintptr_t>(self.data()); })
      .def_property_readonly("nbytes", &SharedMemory::size)
      .def_property_readonly("fd", &SharedMemory::fd)
      .def_buffer([](SharedMemory& self) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(self.data()), static_cast<py::ssize_t>(self.size()));
      });

  py::class_<LayerSignal, std::shared_ptr<LayerSignal>>(module, "LayerSignal")
      .def("store", &LayerSignal::store, py::arg("value"))
      .def("load", &LayerSignal::load);
  // A stream travels as the integer that frameworks show (torch.cuda.Stream.cuda_stream).
  py::class_<cuda::StreamSignal, LayerSignal, std::shared_ptr<cuda::StreamSignal>>(module, "StreamSignal",
                                                                                   py::is_final())
      .def(
          "store_on_stream",
          [](cuda::StreamSignal& self, uintptr_t stream, uint64_t value) {
            unwrap(self.store_on_stream(reinterpret_cast<cuda::Stream>(stream), value));
          },
          py::arg("stream"), py::arg("value"))
      .def(
          "advance_on_stream",
          [](cuda::StreamSignal& self, uintptr_t stream) {
            unwrap(self.advance_on_stream(reinterpret_cast<cuda::Stream>(stream)));
          },
          py::arg("stream"));

  using E = PythonEngine;
  py::class_<E>(module, "TransferEngine", py::is_final())
      .def(py::init<std::string, const std::vector<DomainTuple>&, bool, uint32_t, int>(), py::arg("name"),
           py::arg("domains"), py::arg("allow_fallback"), py::arg("spin_us"), py::arg("worker_cpu"))
      .def("close", &E::close)
      .def("register_memory", &E::register_memory, py::arg("address"), py::arg("nbytes"), py::arg("memfd"),
           py::arg("memfd_offset"))
      .def("deregister_memory", &E::deregister_memory, py::arg("region"), py::arg("timeout"))
      .def("region_descriptor", &E::region_descriptor, py::arg("region"))
      .def("import_region", &E::import_region, py::arg("peer"), py::arg("descriptor"))
      .def("offer", &E::offer, py::arg("name"))
      .def("accept", &E::accept, py::arg("name"), py::arg("offer"))
      .def("complete", &E::complete, py::arg("peer"), py::arg("answer"))
      .def("fence", &E::fence, py::arg("peer"), py::arg("timeout"))
      .def("disconnect", &E::disconnect, py::arg("peer"), py::arg("timeout"))
      .def("lane", &E::lane, py::arg("peer"))
      .def("open_transfer", &E::open_transfer, py::arg("peer"), py::arg("callback"))
      .def("write", &E::write, py::arg("transfer"), py::arg("source"), py::arg("source_offset"), py::arg("target"),
           py::arg("target_offset"), py::arg("nbytes"), py::arg("immediate"), py::arg("domain"))
      .def("write_pages", &E::write_pages, py::arg("transfer"), py::arg("page_bytes"), py::arg("source"),
           py::arg("source_indices"), py::arg("source_stride"), py::arg("source_offset"), py::arg("target"),
           py::arg("target_indices"), py::arg("target_stride"), py::arg("target_offset"), py::arg("immediate"))
      .def("arm", &E::arm, py::arg("transfer"), py::arg("signal"), py::arg("page_bytes"), py::arg("source"),
           py::arg("source_indices"), py::arg("source_stride"), py::arg("source_offset"), py::arg("target"),
           py::arg("target_indices"), py::arg("target_stride"), py::arg("target_offset"), py::arg("layers"))
      .def("seal", &E::seal, py::arg("transfer"))
      .def("cancel", &E::cancel, py::arg("transfer"))
      .def("quiesce", &E::quiesce, py::arg("transfer"), py::arg("timeout"))
      .def("progress", &E::progress, py::arg("transfer"))
      .def("write_one", &E::write_one, py::arg("peer"), py::arg("source"), py::arg("source_offset"), py::arg("target"),
           py::arg("target_offset"), py::arg("nbytes"), py::arg("immediate"), py::arg("callback"), py::arg("domain"))
      .def("add_peer_group", &E::add_peer_group, py::arg("members"))
      .def("remove_peer_group", &E::remove_peer_group, py::arg("group"))
      .def("scatter", &E::scatter, py::arg("group"), py::arg("source"), py::arg("slices"), py::arg("callback"))
      .def("barrier", &E::barrier, py::arg("group"), py::arg("immediates"), py::arg("callback"))
      .def("send", &E::send, py::arg("peer"), py::arg("message"), py::arg("callback"))
      .def("receive", &E::receive, py::arg("limit"))
      .def("wait_message", &E::wait_message, py::arg("timeout"))
      .def("message_fd", &E::message_fd)
      .def("alloc_counters", &E::alloc_counters, py::arg("count"))
      .def("expect", &E::expect, py::arg("counters"), py::arg("targets"), py::arg("callback"))
      .def("counter_values", &E::counter_values, py::arg("counters"))
      .def("release_counters", &E::release_counters, py::arg("counters"))
      .def("wait_transfer", &E::wait_transfer, py::arg("transfer"), py::arg("timeout"))
      .def("wait_counters", &E::wait_counters, py::arg("counters"), py::arg("timeout"))
      .def("poll_events", &E::poll_events, py::arg("limit"))
      .def("next_callback", &E::next_callback)
      .def("event_fd", &E::event_fd)
      .def("create_signal", &E::create_signal)
      .def("create_stream_signal", &E::create_stream_signal)
      .def("stats", [](E& self) { return py::tuple(py::cast(self.stats())); })
      .def("domains", &E::domains)
      .def("unusable", &E::unusable);
}

}  // namespace kvc::python
