// A stand-in for NICs and their network: ports, queue pairs and completion queues in this process. It has the rules of
// a NIC: states, packet sequence numbers, receives that are used up, and the way in which mlx5 ends a queue pair. It also
// has faults that a real NIC cannot be made to show. Posted requests are carried out at once, or when the receiver can
// take them. verbs_fake_library.h is libibverbs over it, for any thread. Tests may read and set its fields while no other
// thread calls it.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "providers/verbs/library.h"
#include "providers/verbs/wire.h"

namespace kvc::verbs::fake {

struct Port {
  int state = abi::IBV_PORT_ACTIVE;
  uint8_t link_layer = abi::IBV_LINK_LAYER_ETHERNET;
  int mtu = abi::IBV_MTU_4096;
  uint16_t lid = 0;
  std::vector<std::pair<uint32_t, Gid>> gids;  // type and value
  std::vector<uint16_t> pkeys = {0xFFFF};
};

inline Gid ipv4(uint8_t last) { return {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 10, 77, 0, last}; }
inline Gid ipv6(uint8_t last) { return {0xFD, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last}; }
inline Gid link_local(uint8_t last) { return {0xFE, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last}; }

struct Device {
  abi::ibv_device device{};
  std::string name;
  std::vector<Port> ports;
  uint32_t max_message = 1 << 30;
  int max_cqe = 1 << 20;
};

struct Context : abi::verbs_context {
  Device* nic = nullptr;
  std::deque<abi::ibv_async_event> events;

  static Context& of(abi::ibv_context* context) {
    auto* const before = reinterpret_cast<std::byte*>(context) - offsetof(abi::verbs_context, context);
    return *static_cast<Context*>(reinterpret_cast<abi::verbs_context*>(before));
  }
};

struct Pd {
  Context* context = nullptr;
  bool of_one_thread = false;  // bound to a thread domain: no locks
};

struct Channel : abi::ibv_comp_channel {};

struct Cq {
  Context* context = nullptr;
  Channel* channel = nullptr;
  int capacity = 0;
  bool armed = false;
  std::deque<abi::ibv_wc> entries;
};

struct Srq {
  Context* context = nullptr;
  uint32_t capacity = 0;
  std::deque<std::pair<uint64_t, std::optional<abi::ibv_sge>>> receives;  // wr_id and its buffer
};

struct Sent {  // a work request as the NIC saw it
  abi::ibv_send_wr request{};
  abi::ibv_sge piece{};
  Bytes copied;  // inline
};

struct Qp : abi::ibv_qp {
  int state = abi::IBV_QPS_RESET;
  abi::ibv_qp_attr rtr{}, rts{}, init{};
  abi::ibv_qp_cap cap{};
  std::deque<Sent> waiting;  // waiting for a receive at the peer
  std::deque<Sent> unheard;  // carried out, but the acknowledgement was lost
  uint32_t outstanding = 0;  // slots in use that no signalled completion has freed
  uint32_t unsignalled = 0;
  std::optional<uint64_t> half_arrived;  // the receive of a message whose first packet has arrived
  std::optional<uint64_t> flushed_at;    // in ERR: the time at which its posted work will be flushed
  unsigned unacknowledged = 0;           // events about it
  bool stopped = false;                  // by its owner
  std::optional<std::thread::id> poster;
};

struct Mr : abi::ibv_mr {
  unsigned access = 0;
};

class Fabric {
 public:
  Fabric() { current = this; }
  ~Fabric() {
    EXPECT_TRUE(queue_pairs.empty()) << "queue pairs left";
    EXPECT_TRUE(regions.empty()) << "memory regions left";
    EXPECT_EQ(objects, 0) << "domains, queues or channels left";
    current = nullptr;
  }
  Fabric(const Fabric&) = delete;
  Fabric& operator=(const Fabric&) = delete;

  Device& add(std::string name, std::vector<Port> ports) {
    Device& device = devices.emplace_back();
    device.name = std::move(name);
    device.ports = std::move(ports);
    return device;
  }
  // A RoCE device like rxe's: a link-local GID, then an IPv4 one.
  Device& add_roce(std::string name, uint8_t last) {
    return add(
        std::move(name),
        {Port{.gids = {{abi::IBV_GID_TYPE_ROCE_V2, link_local(last)}, {abi::IBV_GID_TYPE_ROCE_V2, ipv4(last)}}}});
  }

  static const Library& library();  // verbs_fake_library.h

  std::list<Device> devices;
  std::list<Context*> contexts;
  std::list<std::unique_ptr<Qp>> queue_pairs;
  std::list<std::unique_ptr<Mr>> regions;
  std::list<Srq*> srqs;
  std::list<Cq*> cqs;
  std::vector<Sent> log;  // all posted requests
  int objects = 0;        // contexts, domains, queues, channels
  int cq_overruns = 0;
  int posts_before_ready = 0;  // requests that found no queue pair ready for them
  int lost_receives = 0;       // lost with a queue pair, without a report to the thread that posted them

  // How a queue pair ends. With mlx5, an event reports that its receives are flushed, and its destruction removes its
  // entries from the completion queue. rxe of Linux 6.1 does neither, and flushes at the latest before it is gone.
  bool says_last_receive = true;
  bool purges = true;
  // Turns of poll_cq() from ERR until everything is flushed.
  uint64_t flush_lag = 1;

  // Faults. The next request fails with this status. All fields of its completion but the id are noise.
  std::optional<int> fail_next;
  // post_send takes this many more requests, then returns ENOMEM once.
  std::optional<uint32_t> memory_for;
  // Nothing is carried out, as with a slow NIC at the peer.
  bool stalled = false;
  // Writes arrive, but their sender gets no acknowledgement.
  bool write_acknowledgements_lost = false;
  // Each queue pair that enters ERR has the first packet of a message, and a receive for it.
  bool messages_half_arrived = false;
  // Calls that may block are refused on this thread.
  std::optional<std::thread::id> may_not_block;

  // Two for each existing end of a link. Any thread.
  size_t live_queue_pairs() {
    const std::lock_guard lock(mutex_);
    return queue_pairs.size();
  }
  Qp* find(uint32_t number) {
    for (auto& qp : queue_pairs) {
      if (qp->qp_num == number) return qp.get();
    }
    return nullptr;
  }
  void run() {
    for (auto& qp : queue_pairs) {
      flush(*qp);
      drain(*qp);
    }
  }
  void error(Qp& qp) {
    if (qp.state == abi::IBV_QPS_ERR) return;
    qp.state = abi::IBV_QPS_ERR;
    auto& receives = reinterpret_cast<Srq*>(qp.srq)->receives;
    if (messages_half_arrived && !receives.empty()) {
      qp.half_arrived = receives.front().first;
      receives.pop_front();
    }
    qp.flushed_at = turn_ + flush_lag;
  }
  // Raises the event for each context of this NIC.
  void raise(const std::string& nic, const abi::ibv_async_event& event) {
    for (Context* context : contexts) {
      if (context->nic->name == nic) raise(*context, event);
    }
  }
  bool events_left() const {
    return std::any_of(contexts.begin(), contexts.end(),
                       [](const Context* context) { return !context->events.empty(); });
  }
  // Number of entries in this NIC's completion queues.
  size_t entries(const std::string& nic) const {
    size_t entries = 0;
    for (const Cq* cq : cqs) entries += cq->context->nic->name == nic ? cq->entries.size() : 0;
    return entries;
  }
  // Numbers of receives posted on this NIC: for writes, then for messages.
  std::vector<size_t> posted_receives(const std::string& nic) const {
    std::vector<size_t> posted;
    for (const Srq* srq : srqs) {
      if (srq->context->nic->name == nic) posted.push_back(srq->receives.size());
    }
    return posted;
  }

  static inline Fabric* current = nullptr;

 private:
  friend struct Functions;

  void raise(Context& context, const abi::ibv_async_event& event) {
    context.events.push_back(event);
    const uint64_t one = 1;
    EXPECT_EQ(::write(context.context.async_fd, &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));
  }

  void push(Cq& cq, const abi::ibv_wc& entry) {
    cq.entries.push_back(entry);
    if (std::cmp_greater(cq.entries.size(), cq.capacity)) ++cq_overruns;
    if (!std::exchange(cq.armed, false)) return;
    const uint64_t one = 1;
    EXPECT_EQ(::write(cq.channel->fd, &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));
  }

  // The noise that ibv_poll_cq(3) allows in a failed completion.
  static abi::ibv_wc failed(uint64_t id, int status, uint32_t number) {
    abi::ibv_wc entry{};
    entry.wr_id = id;
    entry.status = status;
    entry.qp_num = number;
    entry.opcode = abi::IBV_WC_RECV_RDMA_WITH_IMM;
    entry.wc_flags = abi::IBV_WC_WITH_IMM;
    entry.imm_data = 0xDEADBEEF;
    entry.byte_len = 0x7FFFFFFF;
    entry.vendor_err = 0x88;
    return entry;
  }

  void complete(Qp& qp, const Sent& sent, int status, bool always) {
    ++qp.unsignalled;
    if ((sent.request.send_flags & abi::IBV_SEND_SIGNALED) == 0 && !always) return;
    qp.outstanding -= std::exchange(qp.unsignalled, 0);
    abi::ibv_wc entry{};
    entry.wr_id = sent.request.wr_id;
    entry.qp_num = qp.qp_num;
    if (status != abi::IBV_WC_SUCCESS) entry = failed(sent.request.wr_id, status, qp.qp_num);
    push(*reinterpret_cast<Cq*>(qp.send_cq), entry);
  }

  void flush(Qp& qp, bool now = false) {
    if (!qp.flushed_at || (turn_ < *qp.flushed_at && !now)) return;
    qp.flushed_at.reset();
    for (const Sent& sent : std::exchange(qp.unheard, {})) complete(qp, sent, abi::IBV_WC_WR_FLUSH_ERR, true);
    for (const Sent& sent : std::exchange(qp.waiting, {})) complete(qp, sent, abi::IBV_WC_WR_FLUSH_ERR, true);
    if (qp.half_arrived) {
      push(*reinterpret_cast<Cq*>(qp.recv_cq), failed(*qp.half_arrived, abi::IBV_WC_WR_FLUSH_ERR, qp.qp_num));
      qp.half_arrived.reset();
    }
    if (says_last_receive) raise(Context::of(qp.context), {{.qp = &qp}, abi::IBV_EVENT_QP_LAST_WQE_REACHED});
  }

  bool reaches_peer(const Qp& qp) {
    const Qp* const peer = find(qp.rtr.dest_qp_num);
    const bool ready = peer != nullptr && (peer->state == abi::IBV_QPS_RTR || peer->state == abi::IBV_QPS_RTS);
    return ready && peer->rtr.dest_qp_num == qp.qp_num && peer->rtr.rq_psn == qp.rts.sq_psn;
  }

  void drain(Qp& qp) {
    if (!write_acknowledgements_lost && qp.state == abi::IBV_QPS_RTS && !qp.unheard.empty()) {
      if (!reaches_peer(qp)) {
        complete(qp, qp.unheard.front(), abi::IBV_WC_RETRY_EXC_ERR, true);
        qp.unheard.pop_front();
        return error(qp);
      }
      for (const Sent& sent : std::exchange(qp.unheard, {})) complete(qp, sent, abi::IBV_WC_SUCCESS, false);
    }
    while (!stalled && qp.state == abi::IBV_QPS_RTS && !qp.waiting.empty()) {
      const std::optional<int> status = carry_out(qp, qp.waiting.front());
      if (!status) return;  // the receiver is not ready: try again
      const Sent sent = std::move(qp.waiting.front());
      qp.waiting.pop_front();
      const bool write = sent.request.opcode <= abi::IBV_WR_RDMA_WRITE_WITH_IMM;
      if (*status == abi::IBV_WC_SUCCESS && write && write_acknowledgements_lost) {
        qp.unheard.push_back(sent);
        continue;
      }
      complete(qp, sent, *status, *status != abi::IBV_WC_SUCCESS);
      if (*status != abi::IBV_WC_SUCCESS) error(qp);
    }
  }

  std::optional<int> carry_out(Qp& qp, const Sent& sent) {
    if (fail_next) return std::exchange(fail_next, std::nullopt);
    if (!reaches_peer(qp)) {
      ++posts_before_ready;
      return abi::IBV_WC_RETRY_EXC_ERR;
    }
    Qp* const peer = find(qp.rtr.dest_qp_num);
    const abi::ibv_send_wr& request = sent.request;
    const std::byte* source =
        sent.copied.empty() ? reinterpret_cast<const std::byte*>(sent.piece.addr) : sent.copied.data();
    const uint32_t bytes = request.num_sge == 0 ? 0 : sent.piece.length;
    const bool write = request.opcode <= abi::IBV_WR_RDMA_WRITE_WITH_IMM;
    if (write && bytes > 0) {
      Mr* const mr = region_of(request.wr.rdma.remote_addr, bytes, request.wr.rdma.rkey);
      if (mr == nullptr || (peer->init.qp_access_flags & abi::IBV_ACCESS_REMOTE_WRITE) == 0) {
        raise(Context::of(peer->context), {{.qp = peer}, abi::IBV_EVENT_QP_ACCESS_ERR});
        error(*peer);
        return abi::IBV_WC_REM_ACCESS_ERR;
      }
      std::memcpy(reinterpret_cast<void*>(request.wr.rdma.remote_addr), source, bytes);
    }
    if (request.opcode == abi::IBV_WR_RDMA_WRITE) return abi::IBV_WC_SUCCESS;
    Srq& receives = *reinterpret_cast<Srq*>(peer->srq);
    if (receives.receives.empty()) return std::nullopt;
    const auto [id, buffer] = receives.receives.front();
    receives.receives.pop_front();
    abi::ibv_wc entry{};
    entry.wr_id = id;
    entry.qp_num = peer->qp_num;
    entry.byte_len = bytes;
    entry.opcode = write ? abi::IBV_WC_RECV_RDMA_WITH_IMM : abi::IBV_WC_RECV;
    if (request.opcode != abi::IBV_WR_SEND) {
      entry.wc_flags = abi::IBV_WC_WITH_IMM;
      entry.imm_data = request.imm_data;
    }
    if (!write && bytes > 0) {
      EXPECT_TRUE(buffer && buffer->length >= bytes);
      std::memcpy(reinterpret_cast<void*>(buffer->addr), source, bytes);
    }
    push(*reinterpret_cast<Cq*>(peer->recv_cq), entry);
    return abi::IBV_WC_SUCCESS;
  }

  Mr* region_of(uint64_t address, uint64_t bytes, uint32_t rkey) {
    for (auto& mr : regions) {
      const auto base = reinterpret_cast<uint64_t>(mr->addr);
      if (mr->rkey == rkey && address >= base && address + bytes <= base + mr->length) return mr.get();
    }
    return nullptr;
  }

  std::mutex mutex_;
  std::condition_variable acknowledged_;
  uint64_t turn_ = 0;
  uint32_t last_qp_ = 100;
  uint32_t last_key_ = 0x1000;
};

}  // namespace kvc::verbs::fake
