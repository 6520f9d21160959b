// PythonEngine: a TransferEngine with an interface of plain tuples and numbers. It can be closed while other threads
// use it.
//
// Calls that only take short locks keep the GIL: releasing it would cost more than the calls, and the transfer thread
// never needs it. Calls that may block release the GIL.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/stream_signal.h"
#include "engine/transfer_engine.h"
#include "python/callback_queue.h"
#include "python/errors.h"

namespace kvc::python {

// kv_connector/_native.pyi describes the fields.
using EventTuple = std::tuple<int, uint64_t, bool, uint64_t, uint64_t, std::optional<ErrorTuple>,
                              std::vector<std::pair<PeerId, ErrorTuple>>>;
using MessageTuple = std::pair<PeerId, pybind11::bytes>;
using SliceTuple = std::tuple<uint64_t, RemoteRegionId, uint64_t, uint64_t, std::optional<uint32_t>>;
using PreparedTuple =
    std::tuple<uint32_t, RegionId, uint64_t, RemoteRegionId, uint64_t, uint64_t, std::optional<uint32_t>>;
using ArmedTuple =
    std::tuple<uint64_t, RegionId, uint64_t, RemoteRegionId, uint64_t, uint64_t, std::optional<uint32_t>>;
using RangeTuple = std::tuple<uint64_t, uint64_t, int, uint64_t>;
using DomainTuple =
    std::tuple<std::string, std::string, std::string, uint32_t, std::string, uint64_t, uint32_t, uint32_t>;
using HandshakeTuple = std::tuple<PeerId, pybind11::bytes, std::vector<std::string>>;
using StepTuple = std::tuple<int, int64_t, uint64_t, TransferId, uint64_t, uint64_t, uint64_t>;
// peer, link, links, domain, times lost, up, reason
using LostLinkTuple = std::tuple<PeerId, uint32_t, uint32_t, std::string, uint64_t, bool, std::string>;
using LayerTuple = std::tuple<uint64_t, uint64_t, uint64_t, uint32_t>;
using Indices = pybind11::array_t<int64_t, pybind11::array::c_style>;
using Updates = pybind11::array_t<uint64_t, pybind11::array::c_style>;  // one row of three values per slice

EventTuple to_tuple(const Event& event);
// Loads the libraries that the domains need. The caller holds the GIL.
std::vector<DomainConfig> domain_configs(const std::vector<DomainTuple>& domains);

class PythonEngine {
 public:
  PythonEngine(std::string name, const std::vector<DomainTuple>& domains, bool allow_fallback, uint32_t spin_us,
               uint32_t workers, int worker_cpu);
  ~PythonEngine();
  void close();

  std::vector<RegionId> register_memory(const std::vector<RangeTuple>& ranges);
  void deregister_memory(const std::vector<RegionId>& regions, double timeout);
  pybind11::bytes region_descriptor(const std::vector<RegionId>& regions);
  std::vector<RemoteRegionId> import_regions(PeerId peer, const pybind11::bytes& descriptor);

  HandshakeTuple offer(std::string name, const std::vector<std::string>& without);
  HandshakeTuple accept(std::string name, const pybind11::bytes& offer);
  void complete(PeerId peer, const pybind11::bytes& answer);
  void fence(PeerId peer, double timeout);
  void disconnect(PeerId peer, double timeout);
  std::string lane(PeerId peer);

  TransferId open_transfer(PeerId peer, uint64_t callback);
  void write(TransferId transfer, RegionId source, uint64_t source_offset, RemoteRegionId target,
             uint64_t target_offset, uint64_t bytes, std::optional<uint32_t> immediate, std::optional<uint32_t> domain);
  void write_pages(TransferId transfer, uint64_t page_bytes, RegionId source, const Indices& source_indices,
                   uint64_t source_stride, uint64_t source_offset, RemoteRegionId target, const Indices& target_indices,
                   uint64_t target_stride, uint64_t target_offset, std::optional<uint32_t> immediate);
  void arm(TransferId transfer, std::shared_ptr<LayerSignal> signal, uint64_t page_bytes, RegionId source,
           const Indices& source_indices, uint64_t source_stride, uint64_t source_offset, RemoteRegionId target,
           const Indices& target_indices, uint64_t target_stride, uint64_t target_offset,
           const std::vector<LayerTuple>& layers);
  void arm_slices(TransferId transfer, std::shared_ptr<LayerSignal> signal, const std::vector<ArmedTuple>& slices);
  void wait_drained(TransferId transfer, uint64_t signal_value, double timeout);
  void seal(TransferId transfer);
  void cancel(TransferId transfer);
  void quiesce(TransferId transfer, double timeout);
  std::tuple<uint64_t, uint64_t, uint64_t, uint64_t> progress(TransferId transfer);
  TransferId write_one(PeerId peer, RegionId source, uint64_t source_offset, RemoteRegionId target,
                       uint64_t target_offset, uint64_t bytes, std::optional<uint32_t> immediate, uint64_t callback,
                       std::optional<uint32_t> domain);

  PeerGroupId add_peer_group(const std::vector<PeerId>& members);
  void remove_peer_group(PeerGroupId group);
  TransferId scatter(PeerGroupId group, RegionId source, const std::vector<SliceTuple>& slices, uint64_t callback);
  TransferId barrier(PeerGroupId group, const std::vector<uint32_t>& immediates, uint64_t callback);

  ScatterId prepare_scatter(PeerGroupId group, const std::vector<PreparedTuple>& slices, uint64_t callback);
  TransferId submit_scatter(ScatterId scatter, const Updates& updates);
  void release_scatter(ScatterId scatter);

  TransferId send(PeerId peer, const pybind11::bytes& message, uint64_t callback);
  std::vector<MessageTuple> receive(size_t limit);
  MessageTuple wait_message(double timeout);
  int message_fd();

  std::pair<CounterSetId, std::vector<uint32_t>> alloc_counters(uint32_t count, const std::vector<PeerId>& raisers);
  void expect(CounterSetId counters, const std::vector<uint64_t>& targets, uint64_t callback,
              std::shared_ptr<CompletionWord> word, uint64_t value);
  CounterReader counter_reader(CounterSetId counters);
  std::vector<uint64_t> counter_values(CounterSetId counters);
  void release_counters(CounterSetId counters);

  EventTuple wait_transfer(TransferId transfer, double timeout);
  EventTuple wait_counters(CounterSetId counters, double timeout);
  std::vector<EventTuple> poll_events(size_t limit);
  std::optional<std::pair<uint64_t, EventTuple>> next_callback();
  int event_fd();

  std::shared_ptr<LayerSignal> create_signal();
  std::shared_ptr<cuda::StreamSignal> create_stream_signal();
  std::vector<uint64_t> stats();
  std::vector<LostLinkTuple> lost_links();
  void start_trace(size_t steps);
  std::pair<std::vector<StepTuple>, uint64_t> take_trace();
  std::vector<std::string> domains();
  std::vector<std::string> unusable();

 private:
  Status end();                              // does the work of close(), which raises the returned error
  std::shared_ptr<TransferEngine> engine();  // raises CLOSED after close()
  EventCallback callback_for(uint64_t token);
  template <typename Call>
  auto sliced(double timeout, Call call);
  template <typename Call>
  EventTuple waited(double timeout, Call call);

  const pid_t process_ = getpid();
  std::mutex mutex_;
  std::shared_ptr<TransferEngine> engine_;  // null once closed; guarded by mutex_
  const std::shared_ptr<CallbackQueue> callbacks_ = std::make_shared<CallbackQueue>();
};

}  // namespace kvc::python
