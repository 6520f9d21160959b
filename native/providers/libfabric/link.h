// Link: one end of a connection to a peer: what is posted on it, what arrives over it, and how it ends.
//
// Each link has its own endpoint, although reliable datagrams would let all peers share one, for these reasons:
// - fence() has to be sound. A peer's outstanding writes cannot be revoked on a shared endpoint. Removing its address
//   stops our writes to it, not its writes to us, and all peers share the keys that it knows. A closed endpoint takes
//   nothing any more.
// - An immediate identifies its sender, so that transfers can go on over other links when this one breaks.
// - Nothing of a closed link turns up later, because its queue is closed with it.
// The cost is one call for each link to look for completions. On EFA it is also a queue pair and a completion queue for
// each link (a NIC has several hundred). On tcp it is a listening socket, on shm a few MB of /dev/shm.
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

// The state that the links of a domain share.
struct LinkContext {
  std::shared_ptr<const Device> device;
  ControlQueue& control;
  CompletionQueue& completions;
  const Tuning tuning;
  RegionTable regions{};
};

// Used on the driving thread only; nothing blocks. Destroyed on the control thread, once it was fenced or closed.
class Link {
 public:
  Link(LinkContext& context, LinkId id, std::shared_ptr<Endpoint> endpoint);
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  const Endpoint& endpoint() const noexcept { return *endpoint_; }

  // As the calls of Domain.
  Posted post(const WriteBatch& batch);
  Posted send(WorkId work, std::span<const std::byte> message);
  void take(uint32_t slot);

  // Reads completions and posts what waits, bounded. Returns true if anything happened.
  bool poll();
  // Whether poll() should look at this link each turn: something waits or is in flight, or something arrived lately.
  bool active() const noexcept;
  // Checks, once in a while, whether the peer has fallen silent. `gap` is the time since the last call.
  void look_after(Clock::time_point now, Clock::duration gap);
  // Handles the end of the peer's process.
  void lose_peer();
  // Whether poll() and fence() have nothing to do until the endpoint's descriptor is readable or the control thread is
  // done.
  bool may_sleep() { return is_open() ? endpoint_->may_sleep() : state_ != State::kClosing || !endpoint_->closed(); }
  // Whether something waits that no descriptor announces, so that poll() must be called again soon.
  bool waits_for_room() const noexcept;

  // One step of Domain::fence(); call it until it returns true. First, within Tuning::bye, the taken messages are
  // acknowledged and Bye is sent. Then the control thread closes the endpoint, which this thread does not touch
  // meanwhile. Then the completions of what had landed are read from its queue, and the rest of what was posted fails.
  bool fence();
  // Closes at once, without Bye. May block.
  void close();

  // Withdraws one of our regions.
  void revoke(const Region& region) { keys_.revoke(region); }
  // Ends the region's registration with this endpoint. Returns false if it has to be called again.
  bool release(const Region& region) { return memories_.release(region); }

 private:
  enum class State : uint8_t {
    kOpen,
    kLeaving,  // only messages are posted
    kClosing,  // the control thread uses the endpoint until it is closed()
  };
  struct Batch {
    WriteBatch posted;  // without its pages
    bool active = false;
    Keys::Target* target = nullptr;  // set once the key is known or lost; null for a batch without pages
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
  // Returns false if there was no failure after all.
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
  // Returns false while the batch's key is requested.
  bool resolve(Batch& batch);
  // Returns 0, -FI_EAGAIN, or another error of libfabric. The batch's own error is put into batch.error.
  ssize_t write(Batch& batch, const PageRun& run);
  void fail_queued(uint64_t rkey);
  void end_batch(Batch& batch);

  // The end.
  void break_with(Error error);
  // Returns the error with which posted works fail.
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
  bool up_;                      // whether the peer knows our address
  std::optional<Error> broken_;  // the reason for which the link does not work any more
  bool bye_received_ = false;
  bool bye_said_ = false;
  Clock::time_point leaving_until_;
  uint32_t quiet_polls_ = 0;  // polls since something happened

  std::vector<Write> writes_;
  std::vector<Write*> free_writes_;
  std::deque<Batch> batches_;  // a deque, so that addresses stay valid
  std::vector<Batch*> free_batches_;
  std::deque<Batch*> queue_;  // batches with runs left to post, in order

  // Immediates in flight to the peer are limited to what its completion queue holds.
  uint64_t immediates_posted_ = 0;
  uint64_t immediates_seen_by_peer_ = 0;
  uint64_t immediates_seen_ = 0;
  uint64_t immediates_reported_ = 0;
};

}  // namespace kvc::libfabric
