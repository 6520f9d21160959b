// TransferScheduler: decides what is posted next, accounts for what was posted, and ends transfers.
//
// Every method runs on the worker thread. One turn posts a quantum for each peer that has something to post: round
// robin over peers and, within a peer, over its transfers, so that a huge request delays a small one by a few batches
// at most. Each batch takes the link that would be through with it first: the one with the fewest bytes in flight for
// its speed.
//
// A domain may call on_complete() from within post(): so completions only do accounts and put the transfer on a list;
// settle() ends transfers and calls callbacks, outside any domain's call.
//
// Where a link breaks and the peer has others, its unfinished batches are not failed but kept (Link::unsettled) until
// the LinkKeeper has asked the peer what landed; recover() then writes again what is missing (docs/architecture.md,
// "Many NICs").
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "engine/counter_sets.h"
#include "engine/event_queue.h"
#include "engine/layer_signal.h"
#include "engine/registry.h"
#include "engine/request.h"
#include "engine/stats.h"
#include "engine/transfer.h"

namespace kvc {

// Layers of one arm() call, waiting for their signal.
struct ArmedPlan {
  std::shared_ptr<Transfer> transfer;
  std::shared_ptr<LayerSignal> signal;
  std::shared_ptr<LocalRegion> source;
  std::shared_ptr<const RemoteRegion> target;
  std::shared_ptr<const PageTable> table;
  uint64_t page_bytes = 0;
  std::vector<ArmedLayer> layers;  // by rising signal value
  size_t next = 0;                 // the first one whose signal has not passed

  bool due() const { return signal->load() >= layers[next].signal_value; }
};

class TransferScheduler {
 public:
  TransferScheduler(Registry<Transfer>& transfers, const CounterSets& counters, EventQueue& events, Stats& stats)
      : transfers_(transfers), counters_(counters), events_(events), stats_(stats) {}

  // --- Commands. On a transfer that is ending they do nothing: its final event says why.
  void add(Transfer& transfer, std::shared_ptr<Request> request);
  void arm(ArmedPlan plan);
  void seal(Transfer& transfer);
  void cancel(Transfer& transfer);
  // Stops posting to the peer and fails its transfers, now and in future.
  void fail_peer(Peer& peer, const Error& error);

  // --- The worker's turn.
  bool post_due_layers();
  bool post();
  void fired(CounterSets::Fired set) { fired_.push_back(std::move(set)); }
  bool settle();
  // Keeps what was erased from a registry until the commands that may mean it are carried out (Registry::peek): those
  // that have been submitted by now.
  void retire(std::shared_ptr<const void> erased) { retired_.push_back(std::move(erased)); }
  size_t retired() const { return retired_.size(); }
  // Lets go of the oldest `count`.
  void release(size_t count);
  // A signal passed since the last look, or a GPU may write one at any time: the worker must not sleep.
  bool has_due_layers() const;

  // A batch or message ended. A link in the answer is to be taken out: the error speaks of it and not of the batch,
  // and the batch waits in Link::unsettled, since the peer has other links.
  struct Lost {
    Peer* peer = nullptr;
    Link* link = nullptr;
  };
  Lost complete(WorkId work, const Error* error) noexcept;

  // --- A link that broke, and that both ends have closed.

  // The counters of what is unsettled on it, each once.
  std::vector<uint32_t> unsettled_counters(const Link& link) const;
  // What the peer counted over it, for one of these counters.
  struct Landed {
    uint32_t counter = 0;
    uint32_t pages = 0;     // modulo LinkTally::kModulus
    bool released = false;  // the peer waits for it no longer
    bool known = true;
  };
  // Settles it: what was counted is done, and the rest goes over the peer's other links. `landed` is by counter.
  void recover(Link& link, std::span<const Landed> landed);

  // Sends an internal message over `only`, or else over any link that is up. False: none takes it now.
  bool send(Peer& peer, std::span<const std::byte> message, Link* only = nullptr);

 private:
  // A posted batch or message, found by its WorkId: index in the slab, and a generation against completions of a
  // reused entry.
  struct InFlight {
    bool used = false;
    uint32_t generation = 0;
    Transfer* transfer =
        nullptr;  // alive: a transfer ends only when nothing of it is in flight; null: internal message
    std::shared_ptr<Request> request{};
    size_t position = 0;
    uint32_t pages = 0;
    uint64_t bytes = 0;
    uint64_t charge = 0;  // of the link's window
    Link* link = nullptr;
    LocalRegion* source = nullptr;  // alive: deregistration waits for its batches
    bool message = false;
    bool waits = false;  // in Link::unsettled

    std::optional<uint32_t> counter() const;  // raised by it
  };

  enum class Outcome : uint8_t {
    kPosted,
    kBlocked,  // no link has room
    kWaits,    // no link has room for this (a message, a pinned write), where others may have for other things
    kNothing,
  };
  Outcome post_batch(Transfer& transfer);
  bool post_peer(Peer& peer);
  Link* pick_link(Peer& peer, const Request& request, const Request::Batch& batch, uint64_t charge, uint32_t tried);
  static void split(const Peer& peer, Request& request);
  static void remove_ready(Transfer& transfer, const std::shared_ptr<Request>& request);
  WorkId take_entry(InFlight entry);
  void put_back(WorkId work);
  void free_entry(uint32_t index);
  static void leave_link(InFlight& entry);

  void resolve(uint32_t index, const Error* error, bool may_land);
  void finish_request(Transfer& transfer, const Request& request);
  bool given_up(const Transfer& transfer) const;
  void rewrite(std::vector<uint32_t> entries, std::optional<uint32_t> counter, uint32_t missing);

  void make_runnable(Transfer& transfer, bool first = false);
  static void record(Transfer& transfer, Error error);
  void fail(Transfer& transfer, Error error);
  void drop_pending(Transfer& transfer);
  void touch(Transfer& transfer);
  void finish(Transfer& transfer);
  void finish_recovery(Transfer& recovery);
  void call(const EventCallback& callback, const Event& event) noexcept;

  Registry<Transfer>& transfers_;
  const CounterSets& counters_;
  EventQueue& events_;
  Stats& stats_;

  std::vector<ArmedPlan> armed_;
  std::vector<Peer*> active_;       // peers with runnable transfers
  std::vector<Transfer*> waiting_;  // post_peer()'s: those whose next is kWaits
  std::vector<InFlight> slab_;
  std::vector<uint32_t> free_entries_;
  std::vector<std::shared_ptr<Transfer>> touched_;
  std::vector<std::shared_ptr<Transfer>> recoveries_;
  std::vector<CounterSets::Fired> fired_;
  std::vector<std::shared_ptr<const void>> retired_;
};

}  // namespace kvc
