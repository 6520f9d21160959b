#include "python/python_engine.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>

namespace kvc::python {

namespace py = pybind11;

namespace {

// Interval at which a blocking call checks for signals (Ctrl-C) and for close(), as in EventQueue::wait().
constexpr auto kSlice = std::chrono::milliseconds(100);

std::span<const std::byte> view(const py::bytes& bytes) {
  const std::string_view text(bytes);
  return std::as_bytes(std::span(text));
}

py::bytes to_bytes(const Bytes& bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

HandshakeTuple to_tuple(const Handshake& handshake) {
  return {handshake.peer, to_bytes(handshake.bytes), handshake.passed_over};
}

Timeout to_timeout(double seconds) {
  if (!(seconds >= 0))
    raise({ErrorCode::kInvalidArgument, {}, {}, {}, "the timeout must be a number of seconds, 0 or more"});
  // 31e6 s, about a year, serves as no limit and does not overflow.
  return Timeout(static_cast<int64_t>(std::min(seconds, 31e6) * 1e6));
}

Pages to_pages(const Indices& indices, uint64_t stride, uint64_t offset) {
  return {std::vector<int64_t>(indices.data(), indices.data() + indices.size()), stride, offset};
}

}  // namespace

EventTuple to_tuple(const Event& event) {
  std::optional<ErrorTuple> error;
  if (event.error) error = to_tuple(*event.error);
  std::vector<std::pair<PeerId, ErrorTuple>> failures;
  failures.reserve(event.failures.size());
  for (const PeerFailure& failure : event.failures) failures.emplace_back(failure.peer, to_tuple(failure.error));
  return {static_cast<int>(event.kind), event.id, event.quiesced, event.pages, event.bytes, std::move(error),
          std::move(failures)};
}

std::vector<DomainConfig> domain_configs(const std::vector<DomainTuple>& domains) {
  std::vector<DomainConfig> configs;
  for (const auto& [provider, device, address, connections, fabric, seed, max_delay_us, copy_blocks] : domains) {
    configs.push_back({.provider = provider,
                       .device = device,
                       .address = address,
                       .connections = connections,
                       .fabric = fabric,
                       .seed = seed,
                       .max_delay_us = max_delay_us,
                       .copy_blocks = copy_blocks});
  }
  load_libraries(configs);
  return configs;
}

PythonEngine::PythonEngine(std::string name, const std::vector<DomainTuple>& domains, bool allow_fallback,
                           uint32_t spin_us, uint32_t workers, int worker_cpu) {
  EngineConfig config;
  config.name = std::move(name);
  config.domains = domain_configs(domains);
  config.allow_fallback = allow_fallback;
  config.spin_us = spin_us;
  config.workers = workers;
  config.worker_cpu = worker_cpu;
  engine_ = unwrap(without_gil([&] { return TransferEngine::create(std::move(config)); }));
}

PythonEngine::~PythonEngine() { (void)end(); }

void PythonEngine::close() { unwrap(end()); }

Status PythonEngine::end() {
  // A forked child has none of the threads that may be in a call or hold the lock, so waiting for them would never end.
  if (process_ != getpid()) return {};
  std::shared_ptr<TransferEngine> engine;
  {
    const std::lock_guard lock(mutex_);
    engine = std::exchange(engine_, nullptr);
  }
  if (engine == nullptr) return {};
  return without_gil([&] {
    // Threads in a blocking call leave at the end of their slice, and all others within microseconds. This thread then
    // owns the transfer engine alone, and after this function no code touches registered memory.
    while (engine.use_count() > 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    Status ended = engine->close();
    engine.reset();
    callbacks_->close();
    return ended;
  });
}

std::shared_ptr<TransferEngine> PythonEngine::engine() {
  std::shared_ptr<TransferEngine> engine;
  {
    const std::lock_guard lock(mutex_);
    engine = engine_;
  }
  if (engine == nullptr) raise({ErrorCode::kClosed, {}, {}, {}, "the transfer engine was closed"});
  return engine;
}

EventCallback PythonEngine::callback_for(uint64_t token) {
  if (token == 0) return {};
  return [queue = callbacks_, token](const Event& event) { queue->put(token, event); };
}

// Calls `call(engine, timeout)` without the GIL, in slices, until it returns anything but kTimeout.
template <typename Call>
auto PythonEngine::sliced(double timeout, Call call) {
  const auto deadline = std::chrono::steady_clock::now() + to_timeout(timeout);
  while (true) {
    const std::shared_ptr<TransferEngine> held = engine();
    auto result = without_gil([&] {
      const auto left = std::chrono::duration_cast<Timeout>(deadline - std::chrono::steady_clock::now());
      return call(*held, std::clamp<Timeout>(left, Timeout::zero(), kSlice));
    });
    const bool timed_out = !result.ok() && result.error().code == ErrorCode::kTimeout;
    if (!timed_out || std::chrono::steady_clock::now() >= deadline) return unwrap(std::move(result));
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

// --- Memory

std::vector<RegionId> PythonEngine::register_memory(const std::vector<RangeTuple>& tuples) {
  std::vector<MemoryRange> ranges;
  ranges.reserve(tuples.size());
  for (const auto& [address, bytes, memfd, memfd_offset] : tuples) {
    ranges.push_back({reinterpret_cast<std::byte*>(static_cast<uintptr_t>(address)), bytes, memfd, memfd_offset});
  }
  const auto held = engine();
  return unwrap(without_gil([&] { return held->register_memory(ranges); }));
}

void PythonEngine::deregister_memory(const std::vector<RegionId>& regions, double timeout) {
  sliced(timeout, [&](TransferEngine& engine, Timeout slice) { return engine.deregister_memory(regions, slice); });
}

py::bytes PythonEngine::region_descriptor(const std::vector<RegionId>& regions) {
  return to_bytes(unwrap(engine()->region_descriptor(regions)));
}

std::vector<RemoteRegionId> PythonEngine::import_regions(PeerId peer, const py::bytes& descriptor) {
  return unwrap(engine()->import_regions(peer, view(descriptor)));
}

// --- Peers

HandshakeTuple PythonEngine::offer(std::string name, const std::vector<std::string>& without) {
  const auto held = engine();
  return to_tuple(unwrap(without_gil([&] { return held->offer(std::move(name), without); })));
}

HandshakeTuple PythonEngine::accept(std::string name, const py::bytes& offer) {
  const auto held = engine();
  const auto bytes = view(offer);
  return to_tuple(unwrap(without_gil([&] { return held->accept(std::move(name), bytes); })));
}

void PythonEngine::complete(PeerId peer, const py::bytes& answer) {
  const auto held = engine();
  const auto bytes = view(answer);
  unwrap(without_gil([&] { return held->complete(peer, bytes); }));
}

void PythonEngine::fence(PeerId peer, double timeout) {
  sliced(timeout, [=](TransferEngine& engine, Timeout slice) { return engine.fence(peer, slice); });
}

void PythonEngine::disconnect(PeerId peer, double timeout) {
  bool begun = false;
  sliced(timeout, [=, &begun](TransferEngine& engine, Timeout slice) -> Status {
    Status status = engine.disconnect(peer, slice);
    // The disconnect finished between two slices.
    if (!status && status.error().code == ErrorCode::kUnknownPeer && begun) return {};
    begun = true;
    return status;
  });
}

std::string PythonEngine::lane(PeerId peer) { return unwrap(engine()->lane(peer)); }

// --- Writing

TransferId PythonEngine::open_transfer(PeerId peer, uint64_t callback) {
  return unwrap(engine()->open_transfer(peer, callback_for(callback)));
}

void PythonEngine::write(TransferId transfer, RegionId source, uint64_t source_offset, RemoteRegionId target,
                         uint64_t target_offset, uint64_t bytes, std::optional<uint32_t> immediate,
                         std::optional<uint32_t> domain) {
  unwrap(engine()->write(transfer, source, source_offset, target, target_offset, bytes, immediate, domain));
}

void PythonEngine::write_pages(TransferId transfer, uint64_t page_bytes, RegionId source, const Indices& source_indices,
                               uint64_t source_stride, uint64_t source_offset, RemoteRegionId target,
                               const Indices& target_indices, uint64_t target_stride, uint64_t target_offset,
                               std::optional<uint32_t> immediate) {
  unwrap(engine()->write_pages(transfer, {page_bytes, source, to_pages(source_indices, source_stride, source_offset),
                                          target, to_pages(target_indices, target_stride, target_offset), immediate}));
}

void PythonEngine::arm(TransferId transfer, std::shared_ptr<LayerSignal> signal, uint64_t page_bytes, RegionId source,
                       const Indices& source_indices, uint64_t source_stride, uint64_t source_offset,
                       RemoteRegionId target, const Indices& target_indices, uint64_t target_stride,
                       uint64_t target_offset, const std::vector<LayerTuple>& layers) {
  std::vector<ArmedLayer> armed;
  armed.reserve(layers.size());
  for (const auto& [value, from, to, immediate] : layers) armed.push_back({value, from, to, immediate});
  unwrap(engine()->arm(transfer, std::move(signal),
                       {page_bytes, source, to_pages(source_indices, source_stride, source_offset), target,
                        to_pages(target_indices, target_stride, target_offset), std::nullopt},
                       std::move(armed)));
}

void PythonEngine::arm_slices(TransferId transfer, std::shared_ptr<LayerSignal> signal,
                              const std::vector<ArmedTuple>& slices) {
  std::vector<ArmedSlice> armed;
  armed.reserve(slices.size());
  for (const auto& [value, source, from, target, to, bytes, immediate] : slices) {
    armed.push_back({value, source, from, target, to, bytes, immediate});
  }
  unwrap(engine()->arm_slices(transfer, std::move(signal), std::move(armed)));
}

void PythonEngine::wait_drained(TransferId transfer, uint64_t signal_value, double timeout) {
  sliced(timeout,
         [=](TransferEngine& engine, Timeout slice) { return engine.wait_drained(transfer, signal_value, slice); });
}

void PythonEngine::seal(TransferId transfer) { unwrap(engine()->seal(transfer)); }

void PythonEngine::cancel(TransferId transfer) {
  const auto held = engine();
  unwrap(without_gil([&] { return held->cancel(transfer); }));
}

void PythonEngine::quiesce(TransferId transfer, double timeout) {
  sliced(timeout, [=](TransferEngine& engine, Timeout slice) { return engine.quiesce(transfer, slice); });
}

std::tuple<uint64_t, uint64_t, uint64_t, uint64_t> PythonEngine::progress(TransferId transfer) {
  const TransferProgress progress = unwrap(engine()->progress(transfer));
  return {progress.pages_posted, progress.bytes_posted, progress.pages_done, progress.bytes_done};
}

TransferId PythonEngine::write_one(PeerId peer, RegionId source, uint64_t source_offset, RemoteRegionId target,
                                   uint64_t target_offset, uint64_t bytes, std::optional<uint32_t> immediate,
                                   uint64_t callback, std::optional<uint32_t> domain) {
  return unwrap(engine()->write_one(peer, source, source_offset, target, target_offset, bytes, immediate,
                                    callback_for(callback), domain));
}

// --- Peer groups

PeerGroupId PythonEngine::add_peer_group(const std::vector<PeerId>& members) {
  return unwrap(engine()->add_peer_group(members));
}

void PythonEngine::remove_peer_group(PeerGroupId group) { unwrap(engine()->remove_peer_group(group)); }

TransferId PythonEngine::scatter(PeerGroupId group, RegionId source, const std::vector<SliceTuple>& slices,
                                 uint64_t callback) {
  std::vector<ScatterSlice> native;
  native.reserve(slices.size());
  for (const auto& [from, target, to, bytes, immediate] : slices)
    native.push_back({from, target, to, bytes, immediate});
  return unwrap(engine()->scatter(group, source, native, callback_for(callback)));
}

TransferId PythonEngine::barrier(PeerGroupId group, const std::vector<uint32_t>& immediates, uint64_t callback) {
  return unwrap(engine()->barrier(group, immediates, callback_for(callback)));
}

ScatterId PythonEngine::prepare_scatter(PeerGroupId group, const std::vector<PreparedTuple>& slices,
                                        uint64_t callback) {
  std::vector<PreparedSlice> prepared;
  prepared.reserve(slices.size());
  for (const auto& [member, source, from, target, to, bytes, immediate] : slices) {
    prepared.push_back({member, source, from, target, to, bytes, immediate});
  }
  return unwrap(engine()->prepare_scatter(group, prepared, callback_for(callback)));
}

TransferId PythonEngine::submit_scatter(ScatterId scatter, const Updates& updates) {
  static_assert(sizeof(ScatterUpdate) == 3 * sizeof(uint64_t), "a row is one update");
  const auto* const rows = reinterpret_cast<const ScatterUpdate*>(updates.data());
  return unwrap(engine()->submit_scatter(scatter, {rows, static_cast<size_t>(updates.size() / 3)}));
}

void PythonEngine::release_scatter(ScatterId scatter) { unwrap(engine()->release_scatter(scatter)); }

// --- Messages

TransferId PythonEngine::send(PeerId peer, const py::bytes& message, uint64_t callback) {
  return unwrap(engine()->send(peer, view(message), callback_for(callback)));
}

std::vector<MessageTuple> PythonEngine::receive(size_t limit) {
  std::vector<MessageTuple> tuples;
  for (const Message& message : engine()->receive(limit)) tuples.emplace_back(message.peer, to_bytes(message.bytes));
  return tuples;
}

MessageTuple PythonEngine::wait_message(double timeout) {
  const Message message =
      sliced(timeout, [](TransferEngine& engine, Timeout slice) { return engine.wait_message(slice); });
  return {message.peer, to_bytes(message.bytes)};
}

int PythonEngine::message_fd() { return engine()->message_fd(); }

// --- Counting

std::pair<CounterSetId, std::vector<uint32_t>> PythonEngine::alloc_counters(uint32_t count,
                                                                            const std::vector<PeerId>& raisers) {
  CounterSet set = unwrap(engine()->alloc_counters(count, raisers));
  return {set.id, std::move(set.immediates)};
}

void PythonEngine::expect(CounterSetId counters, const std::vector<uint64_t>& targets, uint64_t callback,
                          std::shared_ptr<CompletionWord> word, uint64_t value) {
  unwrap(engine()->expect(counters, targets, callback_for(callback), std::move(word), value));
}

CounterReader PythonEngine::counter_reader(CounterSetId counters) { return unwrap(engine()->counter_reader(counters)); }

std::vector<uint64_t> PythonEngine::counter_values(CounterSetId counters) {
  return unwrap(engine()->counter_values(counters));
}

void PythonEngine::release_counters(CounterSetId counters) { unwrap(engine()->release_counters(counters)); }

// --- Waiting

// Not sliced: between two slices, poll_events() of another thread could take the event.
template <typename Call>
EventTuple PythonEngine::waited(double timeout, Call call) {
  const Timeout whole = to_timeout(timeout);
  const std::shared_ptr<TransferEngine> held = engine();
  bool interrupted = false;
  bool closed = false;
  const auto stays = [&] {
    {
      const std::lock_guard lock(mutex_);
      closed = engine_ == nullptr;
    }
    const py::gil_scoped_acquire gil;
    interrupted = PyErr_CheckSignals() != 0;
    return !closed && !interrupted;
  };
  const Result<Event> event = without_gil([&] { return call(*held, whole, stays); });
  if (interrupted) throw py::error_already_set();
  if (closed) raise({ErrorCode::kClosed, {}, {}, {}, "the transfer engine was closed"});
  return to_tuple(unwrap(event));
}

EventTuple PythonEngine::wait_transfer(TransferId transfer, double timeout) {
  return waited(timeout, [=](TransferEngine& engine, Timeout whole, const auto& stays) {
    return engine.wait_transfer(transfer, whole, stays);
  });
}

EventTuple PythonEngine::wait_counters(CounterSetId counters, double timeout) {
  return waited(timeout, [=](TransferEngine& engine, Timeout whole, const auto& stays) {
    return engine.wait_counters(counters, whole, stays);
  });
}

std::vector<EventTuple> PythonEngine::poll_events(size_t limit) {
  std::vector<EventTuple> tuples;
  for (const Event& event : engine()->poll_events(limit)) tuples.push_back(to_tuple(event));
  return tuples;
}

std::optional<std::pair<uint64_t, EventTuple>> PythonEngine::next_callback() {
  // Not sliced: it blocks until close(), on a thread that has no other work.
  const auto queue = callbacks_;
  std::optional<CallbackQueue::Entry> entry = without_gil([&] { return queue->take(); });
  if (!entry) return std::nullopt;
  return std::pair{entry->token, to_tuple(entry->event)};
}

int PythonEngine::event_fd() { return engine()->event_fd(); }

// --- Other methods

std::shared_ptr<cuda::StreamSignal> PythonEngine::create_stream_signal() {
  return unwrap(engine()->create_stream_signal());
}

std::shared_ptr<LayerSignal> PythonEngine::create_signal() { return engine()->create_signal(); }

void PythonEngine::start_trace(size_t steps) {
  const auto held = engine();
  unwrap(without_gil([&] { return held->start_trace(steps); }));
}

std::pair<std::vector<StepTuple>, uint64_t> PythonEngine::take_trace() {
  const TakenTrace taken = engine()->take_trace();
  std::vector<StepTuple> steps;
  steps.reserve(taken.steps.size());
  for (const TraceStep& s : taken.steps) {
    steps.emplace_back(static_cast<int>(s.kind), s.nanoseconds, s.request, s.transfer, s.signal_value, s.source,
                       s.pages);
  }
  return {std::move(steps), taken.lost};
}

std::vector<uint64_t> PythonEngine::stats() {
  const EngineStats s = engine()->stats();
  return {s.pages_written,    s.bytes_written,      s.batches_posted, s.immediates_received,
          s.immediates_stale, s.immediates_foreign, s.links,          s.links_lost,
          s.links_restored,   s.pages_rewritten,    s.sleeps,         s.callback_errors,
          s.transfers_open,   s.counters_allocated, s.peers,          s.regions};
}

std::vector<LostLinkTuple> PythonEngine::lost_links() {
  const auto held = engine();
  std::vector<LostLinkTuple> tuples;
  for (const LostLink& lost : unwrap(without_gil([&] { return held->lost_links(); }))) {
    tuples.emplace_back(lost.peer, lost.link, lost.links, lost.domain, lost.times_lost, lost.up,
                        lost.reason.to_string());
  }
  return tuples;
}

std::vector<std::string> PythonEngine::domains() { return engine()->domains(); }

std::vector<std::string> PythonEngine::unusable() {
  std::vector<std::string> reasons;
  for (const Error& error : engine()->unusable()) reasons.push_back(error.to_string());
  return reasons;
}

}  // namespace kvc::python
