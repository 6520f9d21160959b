// Link: one end of a connection to a peer: what is posted on it, what comes over it, and how it ends.
//
// Why an endpoint for each link, where reliable datagrams would let all peers share one:
//  - fence() has to be sound. What a peer may still write cannot be called back on a shared endpoint: removing its
//    address stops our writes to it, not its writes to us, and the keys that it knows are everybody's. An endpoint that
//    is closed takes nothing any more.
//  - An immediate says whose it is, so that transfers can go on over other links when this one breaks.
//  - Nothing of a closed link turns up later: its queue goes with it.
// What it costs: on EFA a queue pair and a completion queue for each link (a NIC has several hundred), on tcp a
// listening socket, on shm a few MB of /dev/shm; and a call for each link to look for completions.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "lane/control_queue.h"
#include "lane/domain.h"
#include "lane/immediate.h"
#include "lane/page_runs.h"
#include "lane/region_table.h"
#include "providers/libfabric/endpoint.h"
#include "providers/libfabric/keys.h"
#include "providers/libfabric/liveness.h"
#include "providers/libfabric/memories.h"
#include "providers/libfabric/messages.h"
#include "providers/libfabric/tuning.h"

namespace kvc::libfabric {

// What the links of a domain share.
struct LinkContext {
  std::shared_ptr<const Device> device;
  ControlQueue& control;
  CompletionQueue& completions;
  const Tuning tuning;
  RegionTable regions{};
};

// The driving thread; nothing blocks. Destroyed on the control thread, once it was fenced or closed.
class Link {
 public:
  Link(LinkContext& context, LinkId id, std::shared_ptr<Endpoint> endpoint);
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  const Endpoint& endpoint() const noexcept { return *endpoint_; }

  // As Domain's.
  Posted post(const WriteBatch& batch);
  Posted send(WorkId work, std::span<const std::byte> message);
  void take(uint32_t slot);

  // Reads completions and posts what waits, bounded. True if anything happened.
  bool poll();
  // Something waits or is under way, or something came lately: worth a look each turn.
  bool active() const noexcept;
  // Once in a while: finds out about a peer that has fallen silent. `gap`: since the last time.
  void look_after(Clock::time_point now, Clock::duration gap);
  // The peer's process is gone.
  void lose_peer();
  // Whether poll() and fence() have nothing to do until the endpoint's descriptor is readable or the control thread is
  // done.
  bool may_sleep() { return is_open() ? endpoint_->may_sleep() : state_ != State::kClosing || !endpoint_->closed(); }
  // Something waits that no descriptor announces: look again soon.
  bool waits_for_room() const noexcept;

  // A step of Domain::fence(), until it is true. First what was taken is told and Bye is said, within Tuning::bye; then the
  // control thread closes the endpoint, while nobody here touches it; then what had landed is read from its queue, and
  // the rest of what was posted fails.
  bool fence();
  // Without a word and at once: may block.
  void close();

  // A region of ours is withdrawn.
  void revoke(const Region& region) { keys_.revoke(region); }
  // It ends. False: call again.
  bool release(const Region& region) { return memories_.release(region); }

 private:
  enum class State : uint8_t {
    kOpen,
    kLeaving,  // nothing is posted any more but messages
    kClosing,  // the endpoint is the control thread's until it is closed()
  };
  struct Batch {
    WriteBatch posted;  // but for its pages
    bool active = false;
    Keys::Target* target = nullptr;  // once it is known, or lost; none where there are no pages
    uint32_t runs_count = 0;
    uint32_t next_run = 0;
    uint32_t in_flight = 0;
    std::optional<Error> error;
    std::array<PageRun, Immediate::kMaxMultiplicity> runs;

    bool has_pages() const noexcept { return posted.page_bytes > 0; }
  };
  struct Write : Operation {
    Batch* batch = nullptr;
  };

  bool is_open() const noexcept { return state_ == State::kOpen && !broken_; }
  bool writes_under_way() const noexcept { return free_writes_.size() < writes_.size(); }

  // Completions.
  bool read_completions();
  void handle(const fi_cq_data_entry& entry);
  // False: there was none after all.
  bool handle_failure();
  void finish(Write& write, const Error* error);
  void count(uint32_t immediate);

  // Messages.
  bool push_messages();
  void receive(MessageBuffer& buffer, size_t length);
  void repost(MessageBuffer& buffer);
  Status obey(const Messages::Received& message);

  // Writes.
  bool push_writes();
  // False: its key is still being asked for.
  bool resolve(Batch& batch);
  // 0, -FI_EAGAIN, or another error of libfabric's or, in batch.error, of the batch's.
  ssize_t write(Batch& batch, const PageRun& run);
  void fail_queued(uint64_t rkey);
  void end_batch(Batch& batch);

  // The end.
  void break_with(Error error);
  // Why what was posted fails.
  Error ended() const;
  void stop_posting();
  bool has_parted();
  void end_posted();

  LinkContext& context_;
  const LinkId id_;
  const std::shared_ptr<Endpoint> endpoint_;
  Messages messages_;
  Memories memories_;
  Keys keys_;
  Liveness liveness_;

  State state_ = State::kOpen;
  bool up_;                      // the peer knows our address
  std::optional<Error> broken_;  // why the link does not work any more
  bool bye_received_ = false;
  bool bye_said_ = false;
  Clock::time_point leaving_until_;
  uint32_t quiet_polls_ = 0;  // since something happened

  std::vector<Write> writes_;
  std::vector<Write*> free_writes_;
  std::deque<Batch> batches_;  // a slab: addresses stay
  std::vector<Batch*> free_batches_;
  std::deque<Batch*> queue_;  // with something left to post, in order

  // Immediates under way to the peer are limited to what its completion queue holds.
  uint64_t immediates_posted_ = 0;
  uint64_t immediates_seen_by_peer_ = 0;
  uint64_t immediates_seen_ = 0;
  uint64_t immediates_reported_ = 0;
};

}  // namespace kvc::libfabric
