// TransferEngine::Impl: the parts of a transfer engine, and helpers that several operations share.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <string>
#include <vector>

#include "base/ids.h"
#include "base/waker.h"
#include "engine/control_thread.h"
#include "engine/counter_sets.h"
#include "engine/domain_group.h"
#include "engine/domain_thread.h"
#include "engine/event_queue.h"
#include "engine/lanes.h"
#include "engine/memory_region.h"
#include "engine/message_pool.h"
#include "engine/offers.h"
#include "engine/peer.h"
#include "engine/registry.h"
#include "engine/scatter.h"
#include "engine/stats.h"
#include "engine/trace.h"
#include "engine/transfer.h"
#include "engine/transfer_engine.h"
#include "engine/transfer_thread.h"

namespace kvc {

// A peer group. It keeps members that are gone; writes to them fail.
struct PeerGroup {
  std::vector<std::shared_ptr<Peer>> members;
};

class TransferEngine::Impl {
 public:
  Impl(EngineConfig engine_config, std::shared_ptr<Waker> shared_waker)
      : config(std::move(engine_config)),
        waker(std::move(shared_waker)),
        control([this] {
          waker->nudge();
          for (const auto& thread : domain_threads) thread->nudge();
        }),
        offers(config, lanes),
        group({lanes, peers, transfers, regions, remote_regions, counters, events, messages, stats, control,
               [this](std::function<void()> task) { transfer_thread.submit<Call>(std::move(task)); }}),
        transfer_thread(config, lanes, group, waker, stats) {}
  // Blocks until everything has ended, however long a GPU takes. Call end() first to bound the wait.
  ~Impl() {
    stop();
    control.run([this] { end_memory(); });
    control.run([this] { end_lanes(); });
    control.stop();
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  // Starts all threads. Blocks until the domains are open.
  Status start() {
    const uint32_t others = std::min(config.workers - 1, static_cast<uint32_t>(config.domains.size()));
    for (uint32_t i = 0; i < others; ++i) {
      Result<std::shared_ptr<Waker>> own = Waker::create();
      if (!own) return own.error();
      const auto& thread = domain_threads.emplace_back(std::make_unique<DomainThread>(std::move(own.value())));
      const int cpu = config.worker_cpu < 0 ? -1 : config.worker_cpu + 1 + static_cast<int>(i);
      const auto spin = std::chrono::microseconds(config.spin_us);
      if (Status started = thread->start("kvc" + std::to_string(i + 1) + "-" + config.name, cpu, spin); !started) {
        return started;
      }
    }
    if (Status started = control.start("kvc-c-" + config.name); !started) return started;
    if (Status started = memory.start("kvc-m-" + config.name); !started) return started;
    if (Status started = transfer_thread.start(control, domain_threads); !started) return started;
    control.run([this] {
      for (Lane& lane : lanes.all()) {
        for (LaneDomain& domain : lane.domains) control.watch(*domain.connector);
      }
    });
    return {};
  }

  // Unmapping a peer's memory takes 50 to 250 us (H100), so a domain's 16,384 regions take about 4 s. Before that,
  // copies of this process's GPU have had the 5 s of DomainGroup to end.
  static constexpr Timeout kEndTimeout = std::chrono::seconds(5);

  // Ends everything but the object; call it once. kTimeout: the control thread is still in a driver call (a hanging
  // GPU) and uses this object.
  Status end() {
    stop();
    if (!control.runs()) return {};
    std::string domains;
    for (const Lane& lane : lanes.all()) {
      for (const LaneDomain& domain : lane.domains) {
        // Not LaneDomain::description, which dates from before the memory was registered. Now the description names the
        // GPU.
        domains += (domains.empty() ? "" : ", ") + domain.connector->description();
      }
    }
    // Waits for tasks that the domains left to the thread: ends of links, which wait for this process's copies.
    bool ended = control.run_for([] {}, kEndTimeout);
    if (ended) {
      control.run_for([this] { end_memory(); }, Timeout::max());  // 30 ms a GiB, and no wait for a GPU
      ended = control.run_for([this] { end_lanes(); }, kEndTimeout) &&
              control.run_for([] {}, kEndTimeout);  // also what end_lanes() left to the thread: words in GPU memory
    }
    if (ended) return {};
    return Error{
        ErrorCode::kTimeout,
        {},
        {},
        "close",
        "the work of " + domains + " has not ended within " +
            std::to_string(std::chrono::duration_cast<std::chrono::seconds>(kEndTimeout).count()) +
            " s: its GPU or driver hangs. Copies may still read the registered memory and write peers' memory. Do not "
            "free or reuse the registered memory before this process ends, and restart the process"};
  }

  // Runs `f` (which returns a Result) on the control thread and returns the result. Blocks.
  template <typename F>
  std::invoke_result_t<F> on_control(const char* operation, F f) {
    if (transfer_thread.on_thread()) return std::invoke_result_t<F>(TransferThread::blocking_in_callback(operation));
    return control.call(std::move(f));
  }
  // Runs `f` on the thread that registers memory. Blocks.
  template <typename F>
  std::invoke_result_t<F> on_memory_thread(const char* operation, F f) {
    if (transfer_thread.on_thread()) return std::invoke_result_t<F>(TransferThread::blocking_in_callback(operation));
    return memory.call(std::move(f));
  }

  // --- Lookups.

  static Error no_transfer(TransferId id, const char* operation) {
    return invalid(operation, "transfer " + std::to_string(id) + " is not open: it has ended");
  }
  static Error unknown_region(const char* operation, std::string message) {
    return Error{ErrorCode::kUnknownRegion, {}, {}, operation, std::move(message)};
  }
  Result<std::shared_ptr<Transfer>> find_transfer(TransferId id, const char* operation) const {
    std::shared_ptr<Transfer> transfer = transfers.find(id);
    if (transfer == nullptr) return no_transfer(id, operation);
    return transfer;
  }
  Result<std::shared_ptr<Peer>> find_peer(PeerId id, const char* operation) const {
    std::shared_ptr<Peer> peer = peers.find(id);
    if (peer == nullptr) {
      return Error{ErrorCode::kUnknownPeer,
                   {},
                   {},
                   operation,
                   "peer " + std::to_string(id) + " is unknown: it was fenced or never connected"};
    }
    return peer;
  }
  // Finds a peer that has answered the offer.
  Result<std::shared_ptr<Peer>> find_connected(PeerId id, const char* operation) const {
    Result<std::shared_ptr<Peer>> peer = find_peer(id, operation);
    if (peer && peer.value()->state.load(std::memory_order_acquire) == Peer::State::kOffered) {
      return invalid(operation,
                     "peer " + peer.value()->name + " has not answered the offer yet: call complete() first");
    }
    return peer;
  }
  // The scatter whose submission has this `id`, and its run. No value: no such submission is in flight.
  struct Submission {
    std::shared_ptr<Scatter> scatter;
    ScatterRun* run = nullptr;
  };
  std::optional<Submission> find_submission(TransferId id) const {
    ScatterRun* run = nullptr;
    std::shared_ptr<Scatter> scatter =
        scatters.find_if([&](const Scatter& candidate) { return (run = candidate.find(id)) != nullptr; });
    if (scatter == nullptr) return std::nullopt;
    return Submission{std::move(scatter), run};
  }

  // The objects that a write needs, which belong together.
  struct Ends {
    Transfer* transfer = nullptr;
    LocalRegion* source = nullptr;
    const RemoteRegion* target = nullptr;
  };
  // Finds the regions of `ends.transfer`. The caller holds writes_mutex while it uses them.
  Status peek_regions(Ends& ends, RegionId source, RemoteRegionId target, const char* operation) const;
  // Called for each write. Defined here so that the compiler inlines it.
  Status peek_ends(Ends& ends, TransferId transfer, RegionId source, RemoteRegionId target,
                   const char* operation) const {
    ends.transfer = transfers.peek(transfer);
    if (ends.transfer == nullptr) return no_transfer(transfer, operation);
    return peek_regions(ends, source, target, operation);
  }
  // Like Ends, but holding references, for use without the mutex.
  struct HeldEnds {
    std::shared_ptr<Transfer> transfer;
    std::shared_ptr<LocalRegion> source;
    std::shared_ptr<const RemoteRegion> target;
  };
  Status hold_ends(HeldEnds& held, TransferId transfer, RegionId source, RemoteRegionId target, const char* operation);
  Status check_single(const Ends& ends, const SingleWrite& write, uint64_t bytes, const char* operation) const;

  // Creates a transfer that only the caller knows. publish() adds it to the registry.
  Result<std::shared_ptr<Transfer>> make_transfer(PeerId peer, EventCallback callback,
                                                  Transfer::Kind kind = Transfer::Kind::kWrites);
  Status publish(const std::shared_ptr<Transfer>& transfer);
  Status publish_locked(const std::shared_ptr<Transfer>& transfer);

  Result<std::shared_ptr<PeerGroup>> find_group(PeerGroupId id, const char* operation) const;
  // Checks that `given` is the number of members.
  Status check_members(PeerGroupId id, size_t given, const char* operation) const;
  Result<std::shared_ptr<Scatter>> make_scatter(PeerGroupId group, const std::vector<PreparedSlice>& slices,
                                                EventCallback callback, const char* operation);
  Result<TransferId> submit(const std::shared_ptr<Scatter>& scatter, std::span<const ScatterUpdate> updates);
  // Submits a scatter that was made for this submission alone.
  Result<TransferId> submit_once(const Result<std::shared_ptr<Scatter>>& scatter,
                                 std::span<const ScatterUpdate> updates);

  // The transfer thread ends first, because it needs the control thread for that. The connectors end last, on the
  // control thread.
  void stop() {
    transfer_thread.stop();
    memory.stop();
  }
  // Both run on the control thread, in this order. A second call does nothing.
  void end_memory() {
    control.unwatch_all();
    for (const std::shared_ptr<LocalRegion>& region : regions.all()) region->memory->registrations.clear();
  }
  void end_lanes() {
    transfer_thread.drop_commands();
    counters.clear();  // readers may outlive the control thread
    lanes.close_connectors();
  }

  const EngineConfig config;
  const pid_t process = getpid();  // a forked child has none of the threads
  WriterFirstMutex peers_mutex;
  WriterFirstMutex writes_mutex;  // guards what a write looks up
  Registry<Peer> peers{peers_mutex};
  Registry<PeerGroup> peer_groups{peers_mutex};
  Registry<Scatter> scatters{peers_mutex};
  Registry<Transfer> transfers{writes_mutex};
  Registry<LocalRegion> regions{writes_mutex};
  Registry<const RemoteRegion> remote_regions{writes_mutex};
  IdSource<PeerId> peer_ids;
  IdSource<PeerGroupId> group_ids;
  IdSource<ScatterId> scatter_ids;
  IdSource<TransferId> transfer_ids;
  IdSource<RegionId> region_ids;
  IdSource<RemoteRegionId> remote_region_ids;
  const std::shared_ptr<CounterSets> counted = std::make_shared<CounterSets>();  // shared with CounterReaders
  CounterSets& counters = *counted;
  EventQueue events;
  MessagePool messages;
  Stats stats;
  Trace trace;
  std::shared_ptr<Waker> waker;
  std::vector<std::unique_ptr<DomainThread>> domain_threads;  // EngineConfig::workers minus the first
  Lanes lanes;
  ControlThread control;
  ControlThread memory{[] {}};  // registers and deregisters memory; wakes no thread, because its callers wait for it
  Offers offers;                // used on the control thread
  DomainGroup group;
  TransferThread transfer_thread;
};

}  // namespace kvc
