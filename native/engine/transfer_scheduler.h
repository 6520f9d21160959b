// TransferScheduler: everything that is to be posted, from its submission to its event.
//
// Four units do the work. The Poster decides what is posted next and over which link. The FlightTable accounts for
// posted work. The Rewriter settles what a broken link has left open. Endings reports how each stream ended. This class
// connects them. Every method runs on the transfer thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/armed_plans.h"
#include "engine/counter_sets.h"
#include "engine/endings.h"
#include "engine/event_queue.h"
#include "engine/flight_table.h"
#include "engine/poster.h"
#include "engine/registry.h"
#include "engine/rewriter.h"
#include "engine/scatter.h"
#include "engine/stats.h"
#include "engine/transfer.h"

namespace kvc {

class TransferScheduler final : private Poster::Owner {
 public:
  // `first_generation`: see FlightTable.
  TransferScheduler(Registry<Transfer>& transfers, const CounterSets& counters, EventQueue& events, Stats& stats,
                    uint32_t first_generation = 0);

  // --- Commands. If the transfer is ending, they do nothing: its final event gives the reason.
  void add(Transfer& transfer, RequestRef request);
  void arm(ArmedPlan plan);
  void seal(Transfer& transfer);
  void cancel(Transfer& transfer);
  void start(ScatterRun& run) { run.start(poster_, endings_); }
  void cancel(ScatterRun& run) { run.cancel(poster_, endings_); }
  // Stops posting to the peer and fails its open and future transfers.
  void fail_peer(Peer& peer, const Error& error);

  // --- The turn of the transfer thread.
  bool post_due_layers();
  bool post() { return poster_.post(); }
  bool settle();
  // True if a signal has reached a value since the last look, or if a GPU may write one at any time. The transfer
  // thread must not sleep while this is true.
  bool has_due_layers() const { return armed_.may_be_due(); }
  Endings& endings() noexcept { return endings_; }

  // The outcome of a completion.
  struct Ended {
    Peer* peer = nullptr;
    // A link to take out of use: the error concerns the link and not the batch, and the peer has other links.
    Link* link = nullptr;
    uint32_t goodbye_to = 0;  // not 0: the completed work was the goodbye to this peer
  };
  Ended complete(WorkId work, const Error* error);

  // Returns the peers whose other links were not made so far and are needed now.
  std::vector<Peer*> take_wanting() { return std::exchange(wanting_, {}); }

  // --- A broken link that both ends have closed.
  std::vector<uint32_t> unsettled_counters(const Link& link) const { return rewriter_.unsettled_counters(link); }
  void recover(Peer& peer, Link& link, std::span<const Landed> landed) { rewriter_.recover(peer, link, landed); }

  // Sends an internal message; see Poster.
  bool send(Peer& peer, std::span<const std::byte> message, Link* only = nullptr) {
    return poster_.send(peer, message, only);
  }
  bool say_goodbye(Peer& peer, std::span<const std::byte> message) {
    return poster_.send(peer, message, nullptr, true);
  }

 private:
  void fail(Stream& stream, Error error) override { endings_.fail(stream, std::move(error)); }
  void wants_links(Peer& peer) override;
  bool may_post(const Stream& stream) const override { return !rewriter_.given_up(stream); }

  void resolve(uint32_t place, const Error* error, bool may_land);
  void finish_request(Stream& stream, const Request& request);
  void drop_pending(Stream& stream);
  void look(Stream& stream);

  Registry<Transfer>& transfers_;
  Stats& stats_;
  FlightTable flights_;
  Poster poster_;
  Rewriter rewriter_;
  Endings endings_;
  ArmedPlans armed_;
  std::vector<Peer*> wanting_;
};

}  // namespace kvc
