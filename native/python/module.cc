// kv_connector._native: the definition of the module. Its stub is kv_connector/_native.pyi.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "base/shared_memory.h"
#include "cuda/gpu_completion_word.h"
#include "cuda/stream_signal.h"
#include "engine/message.h"
#include "providers/factory.h"
#include "python/moe_far_ranks.h"
#include "python/moe_group.h"
#include "python/page_summer.h"
#include "python/python_engine.h"

namespace py = pybind11;

namespace kvc::python {

namespace {

// Returns for every provider of this build whether a domain of it opens here, and the error if it does not.
std::vector<std::tuple<std::string, bool, std::string>> probe_providers() {
  // Tasks run at once, because the domains end immediately.
  class Idle final : public ControlQueue {
    void run(std::function<void()> task) override { task(); }
  };
  std::vector<DomainConfig> configs;
  for (const std::string_view provider : provider_names()) configs.emplace_back().provider = provider;
  load_libraries(configs);  // the caller holds the GIL
  return without_gil([&] {
    std::vector<std::tuple<std::string, bool, std::string>> found;
    Idle control;
    for (const DomainConfig& config : configs) {
      const Result<OpenedDomain> domain = open_domain(config, control);
      found.emplace_back(config.provider, domain.ok(), domain.ok() ? "" : domain.error().to_string());
    }
    return found;
  });
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "The native transfer engine. kv_connector.engine is its typed interface.";
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
  // A stream is passed as the integer that frameworks provide (torch.cuda.Stream.cuda_stream).
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

  py::class_<CounterReader>(module, "CounterReader", py::is_final())
      .def("__len__", &CounterReader::size)
      .def(
          "value",
          [](const CounterReader& self, size_t counter) {
            if (counter >= self.size()) throw py::index_error();
            return self.value(counter);
          },
          py::arg("counter"));
  using Word = cuda::GpuCompletionWord;
  py::class_<CompletionWord, std::shared_ptr<CompletionWord>>(module, "_CompletionWord");
  py::class_<Word, CompletionWord, std::shared_ptr<Word>>(module, "CompletionWord", py::is_final())
      .def(py::init([](int device, bool on_gpu, bool remote_writes) {
             auto made = without_gil(
                 [&] { return Word::create(device, on_gpu ? Word::Place::kGpu : Word::Place::kHost, remote_writes); });
             return std::shared_ptr<Word>(unwrap(std::move(made)));
           }),
           py::arg("device"), py::arg("on_gpu") = false, py::arg("remote_writes") = true)
      .def(
          "store", [](Word& self, uint64_t value) { unwrap(self.store(value)); }, py::arg("value"))
      .def_property_readonly("device_pointer", [](const Word& self) { return self.device(); });

  bind_moe_far_ranks(module);
  bind_moe_group(module);
  bind_page_summer(module);

  using E = PythonEngine;
  py::class_<E>(module, "TransferEngine", py::is_final())
      .def(py::init<std::string, const std::vector<DomainTuple>&, bool, uint32_t, uint32_t, int>(), py::arg("name"),
           py::arg("domains"), py::arg("allow_fallback"), py::arg("spin_us"), py::arg("workers"), py::arg("worker_cpu"))
      .def("close", &E::close)
      .def("register_memory", &E::register_memory, py::arg("ranges"))
      .def("deregister_memory", &E::deregister_memory, py::arg("regions"), py::arg("timeout"))
      .def("region_descriptor", &E::region_descriptor, py::arg("regions"))
      .def("import_regions", &E::import_regions, py::arg("peer"), py::arg("descriptor"))
      .def("offer", &E::offer, py::arg("name"), py::arg("without"))
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
      .def("arm_slices", &E::arm_slices, py::arg("transfer"), py::arg("signal"), py::arg("slices"))
      .def("wait_drained", &E::wait_drained, py::arg("transfer"), py::arg("signal_value"), py::arg("timeout"))
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
      .def("prepare_scatter", &E::prepare_scatter, py::arg("group"), py::arg("slices"), py::arg("callback"))
      .def("submit_scatter", &E::submit_scatter, py::arg("scatter"), py::arg("updates"))
      .def("release_scatter", &E::release_scatter, py::arg("scatter"))
      .def("send", &E::send, py::arg("peer"), py::arg("message"), py::arg("callback"))
      .def("receive", &E::receive, py::arg("limit"))
      .def("wait_message", &E::wait_message, py::arg("timeout"))
      .def("message_fd", &E::message_fd)
      .def("alloc_counters", &E::alloc_counters, py::arg("count"), py::arg("raisers"))
      .def("expect", &E::expect, py::arg("counters"), py::arg("targets"), py::arg("callback"), py::arg("word"),
           py::arg("value"))
      .def("counter_reader", &E::counter_reader, py::arg("counters"))
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
      .def("lost_links", &E::lost_links)
      .def("start_trace", &E::start_trace, py::arg("steps"))
      .def("take_trace", &E::take_trace)
      .def("domains", &E::domains)
      .def("unusable", &E::unusable);
}

}  // namespace kvc::python
