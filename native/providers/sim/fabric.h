// Fabric: connects the sim domains of one process.
//
// Threads: each domain belongs to one thread, and so does each connector. The fabric is the state that these threads
// share. The receiving domain's thread copies a page, under the link's gate. Completions travel back through the
// sender's inbox.
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

// The NIC behind a domain, with the state that faults.h changes.
struct Nic {
  std::string device;
  std::atomic<bool> up{true};
  std::atomic<int64_t> pages_to_cut{0};  // pages until the NIC is cut; 0: no cut is planned
  std::atomic<uint64_t> bits_per_second{0};
  std::vector<std::weak_ptr<struct Gate>> gates;  // gates of its links; guarded by the fabric's mutex
};

// Both ends of a link. A thread that holds the mutex and finds the gate open may copy a page. After a thread has closed
// the gate, no page lands in either direction.
struct Gate {
  std::mutex mutex;
  bool open = true;
  // set by a NIC's cut: pages in flight in either direction are lost, and completions too
  std::atomic<bool> cut{false};
  // By side: 0 is the offering side, 1 the accepting side. Set before the other side can send.
  std::array<std::shared_ptr<Inbox>, 2> inbox;
  std::array<LinkId, 2> link{};
  std::array<std::shared_ptr<Nic>, 2> nic;
  std::array<std::atomic<bool>, 2> attached{};  // whether the side's domain has the link and may be written to
};

// One posted batch, or a message. Its runs of pages are delivered one by one, in any order, and the last one reports.
// The sender's link uses the object again once no other owner holds it.
struct Batch {
  std::shared_ptr<Gate> gate;
  int sender = 0;     // the sender's side of the gate
  uint32_t slot = 0;  // slot of the sender's link
  uint64_t rkey = 0;
  uint64_t page_bytes = 0;
  bool counted = false;
  uint32_t immediate = 0;
  struct Run {
    PageRun pages;
    int64_t due_ns = 0;
  };
  std::vector<Run> runs;
  Bytes message;  // not empty if this is a message, whose one run contains its due time
  // Used by the receiving thread:
  size_t runs_left = 0;
  std::optional<Error> error;
};

struct BatchArrival {
  std::shared_ptr<Batch> batch;
};
// Sent to the sender: the batch of this slot has ended, or the message was taken.
struct WorkDone {
  LinkId link = 0;
  uint32_t slot = 0;
  bool message = false;
  std::optional<Error> error{};
};
struct LinkClosed {
  LinkId link = 0;
};
// Sent to this side: the other side has attached the link, so that posts refused as too early may be retried.
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
  // Moves all messages into `messages`, which must be empty.
  void take(std::vector<Message>& messages);
  // Returns false if messages wait.
  bool prepare_sleep();
  // Drops all messages, now and later: the domain is gone. This breaks a cycle, because messages hold their link's
  // gate, and the gate holds this inbox.
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
  // Returns the fabric of this name in this process. It lives as long as a domain holds it.
  static std::shared_ptr<Fabric> get(const std::string& name);

  Fabric();
  // A number that identifies the fabric, also among the fabrics of other processes.
  uint64_t token() const { return token_; }
  uint64_t next_domain() { return next_domain_.fetch_add(1); }

  // publish() keeps a gate under its secret from offer() on. take() removes it for accept().
  void publish(uint64_t secret, std::shared_ptr<Gate> gate);
  std::shared_ptr<Gate> take(uint64_t secret);

  // Returns the NIC of this name. It lives as long as the fabric.
  std::shared_ptr<Nic> nic(const std::string& device);
  // Adds a gate whose ends are both known to its NICs. Returns false if one of the NICs is down.
  bool join(const std::shared_ptr<Gate>& gate);
  // Takes the NIC down and ends its links on both sides. Must not be called while a gate's mutex is held.
  void cut(Nic& nic);
  // Counts pages that a NIC has carried, and cuts the NIC if a cut was planned there. Must not be called while a gate's
  // mutex is held.
  void carried(Nic& nic, uint32_t pages);
  // Ends the link for one side and notifies the other side.
  static void close(Gate& gate, int side);

 private:
  const uint64_t token_;
  std::atomic<uint64_t> next_domain_{0};
  std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<Gate>> offered_;
  std::map<std::string, std::shared_ptr<Nic>> nics_;
};

}  // namespace kvc::sim
