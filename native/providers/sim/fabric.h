// Fabric: where the sim domains of one process meet.
//
// Threads: each domain belongs to one thread, and so does each connector; the fabric is what those threads share. A page is
// copied by the receiving domain's thread, under the link's gate; completions travel back through the sender's inbox.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/unique_fd.h"
#include "lane/domain.h"
#include "lane/page_runs.h"

namespace kvc::sim {

inline Error sim_error(ErrorCode code, std::string operation, std::string message) {
  return Error{code, "sim", {}, std::move(operation), std::move(message)};
}

class Inbox;
class Fabric;

// The NIC behind a domain, as far as it can fail (faults.h).
struct Nic {
  std::string device;
  std::atomic<bool> up{true};
  std::atomic<int64_t> pages_to_cut{0};  // pages that it still carries before it is cut; 0: no such plan
  std::atomic<uint64_t> bits_per_second{0};
  std::vector<std::weak_ptr<struct Gate>> gates;  // of its links; guarded by the fabric's mutex
};

// Both ends of a link. Whoever holds the gate and finds it open may copy a page; who closes it knows that no page
// lands after that, in either direction.
struct Gate {
  std::mutex mutex;
  bool open = true;
  std::atomic<bool> cut{false};  // by a NIC: what was under way in either direction is lost, completions too
  // By side: 0 the offerer's, 1 the acceptor's. Set before the other side can send.
  std::array<std::shared_ptr<Inbox>, 2> inbox;
  std::array<LinkId, 2> link{};
  std::array<std::shared_ptr<Nic>, 2> nic;
  std::array<std::atomic<bool>, 2> attached{};  // the side's domain has it: it may be written to
};

// One posted batch, or a message: its runs of pages are delivered one by one, in any order; the last one reports. In use
// by its sender's link again once nobody else holds it.
struct Batch {
  std::shared_ptr<Gate> gate;
  int sender = 0;     // the sender's side of the gate
  uint32_t slot = 0;  // of the sender's link
  uint64_t rkey = 0;
  uint64_t page_bytes = 0;
  bool counted = false;
  uint32_t immediate = 0;
  struct Run {
    PageRun pages;
    int64_t due_ns = 0;
  };
  std::vector<Run> runs;
  Bytes message;  // not empty: a message, whose one run says when it is due
  // The receiving thread's:
  size_t runs_left = 0;
  std::optional<Error> error;
};

struct BatchArrival {
  std::shared_ptr<Batch> batch;
};
// To the sender: the batch of this slot has ended, or the message was taken.
struct WorkDone {
  LinkId link = 0;
  uint32_t slot = 0;
  bool message = false;
  std::optional<Error> error{};
};
struct LinkClosed {
  LinkId link = 0;
};
// The other side has the link: what was refused as too early may be posted.
struct LinkReady {};
using Message = std::variant<BatchArrival, WorkDone, LinkClosed, LinkReady>;

// Messages to one domain. Any thread puts; the domain's thread takes.
class Inbox {
 public:
  explicit Inbox(UniqueFd fd) : fd_(std::move(fd)) {}
  // Built in place: most of a message is the room for an error.
  template <typename Kind>
  void put(Kind&& message) {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    messages_.emplace_back(std::in_place_type<Kind>, std::forward<Kind>(message));
    if (sleeping_ && !signalled_) wake();
  }
  // Into `messages`, which is empty before.
  void take(std::vector<Message>& messages);
  // False: something is there.
  bool prepare_sleep();
  // The domain is gone: nobody takes any more. Messages hold their link's gate, and that holds this.
  void close();
  int fd() const { return fd_.get(); }

 private:
  void wake();

  const UniqueFd fd_;
  std::mutex mutex_;
  std::vector<Message> messages_;
  bool closed_ = false;
  bool sleeping_ = false;
  bool signalled_ = false;
};

class Fabric {
 public:
  // The fabric of this name in this process; it lives as long as a domain holds it.
  static std::shared_ptr<Fabric> get(const std::string& name);

  Fabric();
  // Tells fabrics apart, those of other processes included.
  uint64_t token() const { return token_; }
  uint64_t next_domain() { return next_domain_.fetch_add(1); }

  // A gate waits under its secret from offer() until accept() takes it.
  void publish(uint64_t secret, std::shared_ptr<Gate> gate);
  std::shared_ptr<Gate> take(uint64_t secret);

  // The NIC of this name, from now on for as long as the fabric.
  std::shared_ptr<Nic> nic(const std::string& device);
  // Both ends of the gate are known. False: one of its NICs is down.
  bool join(const std::shared_ptr<Gate>& gate);
  // The NIC is down: its links end on both sides. Not while a gate's mutex is held.
  void cut(Nic& nic);
  // A NIC has carried so many pages; cuts it where that was the plan. Not while a gate's mutex is held.
  void carried(Nic& nic, uint32_t pages);
  // One side ends the link: the other is told.
  static void close(Gate& gate, int side);

 private:
  const uint64_t token_;
  std::atomic<uint64_t> next_domain_{0};
  std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<Gate>> offered_;
  std::map<std::string, std::shared_ptr<Nic>> nics_;
};

}  // namespace kvc::sim
