// A stand-in for libibverbs: ports, queue pairs and completion queues in this process, with the rules that a NIC keeps
// (states, packet sequence numbers, receives that are used up) and the faults that a real one cannot be made to show.
// One thread. What is posted is carried out at once, or when its receiver can take it.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
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

struct Channel : abi::ibv_comp_channel {};

struct Cq {
  Channel* channel = nullptr;
  int capacity = 0;
  bool armed = false;
  std::deque<abi::ibv_wc> entries;
};

struct Srq {
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
  std::deque<Sent> waiting;  // for a receive at the peer
  uint32_t outstanding = 0;  // slots taken and not freed by a signalled completion
  uint32_t unsignalled = 0;
  uint32_t inflight_inline = 0;
};

struct Mr : abi::ibv_mr {
  unsigned access = 0;
};

class Fabric {
 public:
  Fabric() {
    current = this;
    int pipe[2];
    EXPECT_EQ(::pipe2(pipe, O_NONBLOCK | O_CLOEXEC), 0);
    never_[0] = pipe[0];
    never_[1] = pipe[1];
  }
  ~Fabric() {
    EXPECT_TRUE(queue_pairs.empty()) << "queue pairs left";
    EXPECT_TRUE(regions.empty()) << "memory regions left";
    EXPECT_EQ(objects, 0) << "domains, queues or channels left";
    ::close(never_[0]);
    ::close(never_[1]);
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
  // A RoCE device as rxe makes it: a link-local GID, then an IPv4 one.
  Device& add_roce(std::string name, uint8_t last) {
    return add(
        std::move(name),
        {Port{.gids = {{abi::IBV_GID_TYPE_ROCE_V2, link_local(last)}, {abi::IBV_GID_TYPE_ROCE_V2, ipv4(last)}}}});
  }

  static const Library& library();

  std::list<Device> devices;
  std::list<std::unique_ptr<Qp>> queue_pairs;
  std::list<std::unique_ptr<Mr>> regions;
  std::deque<abi::ibv_async_event> events;
  std::vector<Sent> log;  // everything that was posted
  std::vector<abi::ibv_qp_attr> rtr_log, rts_log;
  int objects = 0;  // contexts, domains, queues, channels
  int cq_overruns = 0;
  int posts_before_ready = 0;  // requests that found no queue pair ready for them

  // Faults. The next request to be carried out fails like this; what its completion says beside the id is noise.
  std::optional<int> fail_next;
  // post_send takes this many requests more, then says ENOMEM once.
  std::optional<uint32_t> memory_for;
  // Nothing is carried out: the peer's NIC is slow.
  bool stalled = false;

  Qp* find(uint32_t number) {
    for (auto& qp : queue_pairs) {
      if (qp->qp_num == number) return qp.get();
    }
    return nullptr;
  }
  void run() {
    for (auto& qp : queue_pairs) drain(*qp);
  }
  void error(Qp& qp) {
    if (qp.state == abi::IBV_QPS_ERR) return;
    qp.state = abi::IBV_QPS_ERR;
    for (const Sent& sent : std::exchange(qp.waiting, {})) complete(qp, sent, abi::IBV_WC_WR_FLUSH_ERR, true);
  }

  static inline Fabric* current = nullptr;

 private:
  friend struct Functions;

  void push(Cq& cq, const abi::ibv_wc& entry) {
    cq.entries.push_back(entry);
    if (std::cmp_greater(cq.entries.size(), cq.capacity)) ++cq_overruns;
    if (!std::exchange(cq.armed, false)) return;
    const uint64_t one = 1;
    EXPECT_EQ(::write(cq.channel->fd, &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));
  }

  void complete(Qp& qp, const Sent& sent, int status, bool always) {
    ++qp.unsignalled;
    if ((sent.request.send_flags & abi::IBV_SEND_SIGNALED) == 0 && !always) return;
    qp.outstanding -= std::exchange(qp.unsignalled, 0);
    abi::ibv_wc entry{};
    entry.wr_id = sent.request.wr_id;
    entry.status = status;
    entry.qp_num = qp.qp_num;
    if (status != abi::IBV_WC_SUCCESS) {  // the noise that ibv_poll_cq(3) allows
      entry.opcode = abi::IBV_WC_RECV_RDMA_WITH_IMM;
      entry.wc_flags = abi::IBV_WC_WITH_IMM;
      entry.imm_data = 0xDEADBEEF;
      entry.byte_len = 0x7FFFFFFF;
      entry.vendor_err = 0x88;
    }
    push(*reinterpret_cast<Cq*>(qp.send_cq), entry);
  }

  void drain(Qp& qp) {
    while (!stalled && qp.state == abi::IBV_QPS_RTS && !qp.waiting.empty()) {
      const std::optional<int> status = carry_out(qp, qp.waiting.front());
      if (!status) return;  // the receiver is not ready: try again
      const Sent sent = std::move(qp.waiting.front());
      qp.waiting.pop_front();
      complete(qp, sent, *status, *status != abi::IBV_WC_SUCCESS);
      if (*status != abi::IBV_WC_SUCCESS) error(qp);
    }
  }

  std::optional<int> carry_out(Qp& qp, const Sent& sent) {
    if (fail_next) return std::exchange(fail_next, std::nullopt);
    Qp* const peer = find(qp.rtr.dest_qp_num);
    const bool ready = peer != nullptr && (peer->state == abi::IBV_QPS_RTR || peer->state == abi::IBV_QPS_RTS);
    if (!ready || peer->rtr.dest_qp_num != qp.qp_num || peer->rtr.rq_psn != qp.rts.sq_psn) {
      ++posts_before_ready;
      return abi::IBV_WC_RETRY_EXC_ERR;
    }
    const abi::ibv_send_wr& request = sent.request;
    const std::byte* source =
        sent.copied.empty() ? reinterpret_cast<const std::byte*>(sent.piece.addr) : sent.copied.data();
    const uint32_t bytes = request.num_sge == 0 ? 0 : sent.piece.length;
    const bool write = request.opcode == abi::IBV_WR_RDMA_WRITE || request.opcode == abi::IBV_WR_RDMA_WRITE_WITH_IMM;
    if (write && bytes > 0) {
      Mr* const mr = region_of(request.wr.rdma.remote_addr, bytes, request.wr.rdma.rkey);
      if (mr == nullptr || (peer->init.qp_access_flags & abi::IBV_ACCESS_REMOTE_WRITE) == 0) {
        events.push_back({{.qp = peer}, abi::IBV_EVENT_QP_ACCESS_ERR});
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

  int never_[2];
  uint32_t last_qp_ = 100;
  uint32_t last_key_ = 0x1000;
};

struct Context : abi::ibv_context {
  Device* nic = nullptr;
};

struct Functions {
  static Fabric& fabric() { return *Fabric::current; }

  static abi::ibv_device** get_device_list(int* count) {
    auto& devices = fabric().devices;
    auto** const list = new abi::ibv_device*[devices.size() + 1];
    size_t i = 0;
    for (Device& device : devices) list[i++] = &device.device;
    list[i] = nullptr;
    *count = static_cast<int>(devices.size());
    return list;
  }
  static void free_device_list(abi::ibv_device** list) { delete[] list; }
  static Device& nic(abi::ibv_device* device) {
    return *std::find_if(fabric().devices.begin(), fabric().devices.end(),
                         [&](Device& candidate) { return &candidate.device == device; });
  }
  static const char* get_device_name(abi::ibv_device* device) { return nic(device).name.c_str(); }

  static abi::ibv_context* open_device(abi::ibv_device* device) {
    auto* const context = new Context{};
    context->device = device;
    context->nic = &nic(device);
    context->async_fd = fabric().never_[0];
    context->num_comp_vectors = 1;
    context->ops.poll_cq = poll_cq;
    context->ops.req_notify_cq = req_notify_cq;
    context->ops.post_srq_recv = post_srq_recv;
    context->ops.post_send = post_send;
    ++fabric().objects;
    return context;
  }
  static int close_device(abi::ibv_context* context) {
    delete static_cast<Context*>(context);
    --fabric().objects;
    return 0;
  }
  static int query_device(abi::ibv_context* context, abi::ibv_device_attr* attr) {
    *attr = {};
    attr->phys_port_cnt = static_cast<uint8_t>(static_cast<Context*>(context)->nic->ports.size());
    attr->max_qp_wr = 1 << 14;
    attr->max_srq_wr = 1 << 14;
    attr->max_cqe = static_cast<Context*>(context)->nic->max_cqe;
    return 0;
  }
  static const Port& port(abi::ibv_context* context, uint32_t number) {
    return static_cast<Context*>(context)->nic->ports.at(number - 1);
  }
  static int query_port(abi::ibv_context* context, uint8_t number, abi::ibv_port_attr* attr) {
    if (number == 0 || number > static_cast<Context*>(context)->nic->ports.size()) return EINVAL;
    const Port& port = Functions::port(context, number);
    *attr = {};
    attr->state = port.state;
    attr->active_mtu = port.mtu;
    attr->max_mtu = port.mtu;
    attr->link_layer = port.link_layer;
    attr->lid = port.lid;
    attr->gid_tbl_len = static_cast<int>(port.gids.size());
    attr->pkey_tbl_len = static_cast<uint16_t>(port.pkeys.size());
    attr->max_msg_sz = static_cast<Context*>(context)->nic->max_message;
    attr->active_speed = 64;
    attr->active_width = 2;
    return 0;
  }
  static int query_gid_ex(abi::ibv_context* context, uint32_t number, uint32_t index, abi::ibv_gid_entry* entry,
                          uint32_t /*flags*/, size_t /*size*/) {
    const auto& [type, gid] = port(context, number).gids.at(index);
    if (gid == Gid{}) return ENODATA;
    *entry = {};
    entry->gid_type = type;
    entry->gid_index = index;
    std::copy(gid.begin(), gid.end(), std::begin(entry->gid.raw));
    return 0;
  }
  static int query_pkey(abi::ibv_context* context, uint8_t number, int index, uint16_t* pkey) {
    *pkey = big_endian(port(context, number).pkeys.at(static_cast<size_t>(index)));
    return 0;
  }

  static abi::ibv_pd* alloc_pd(abi::ibv_context* /*context*/) {
    ++fabric().objects;
    return reinterpret_cast<abi::ibv_pd*>(new int(0));
  }
  static int dealloc_pd(abi::ibv_pd* pd) {
    delete reinterpret_cast<int*>(pd);
    --fabric().objects;
    return 0;
  }
  static abi::ibv_mr* reg_mr(abi::ibv_pd* /*pd*/, void* address, size_t bytes, uint64_t /*iova*/, unsigned access) {
    auto& mr = fabric().regions.emplace_back(std::make_unique<Mr>());
    mr->addr = address;
    mr->length = bytes;
    mr->access = access;
    mr->lkey = mr->rkey = ++fabric().last_key_;
    return mr.get();
  }
  static int dereg_mr(abi::ibv_mr* mr) {
    fabric().regions.remove_if([&](const auto& region) { return region.get() == mr; });
    return 0;
  }

  static abi::ibv_comp_channel* create_comp_channel(abi::ibv_context* /*context*/) {
    auto* const channel = new Channel{};
    channel->fd = ::eventfd(0, EFD_CLOEXEC);
    ++fabric().objects;
    return channel;
  }
  static int destroy_comp_channel(abi::ibv_comp_channel* channel) {
    ::close(channel->fd);
    delete static_cast<Channel*>(channel);
    --fabric().objects;
    return 0;
  }
  static abi::ibv_cq* create_cq(abi::ibv_context* context, int capacity, void* /*cq_context*/,
                                abi::ibv_comp_channel* channel, int /*vector*/) {
    if (capacity > static_cast<Context*>(context)->nic->max_cqe) {
      errno = EINVAL;
      return nullptr;
    }
    auto* const cq = new Cq{};
    cq->capacity = capacity;
    cq->channel = static_cast<Channel*>(channel);
    ++fabric().objects;
    return reinterpret_cast<abi::ibv_cq*>(cq);
  }
  static int destroy_cq(abi::ibv_cq* cq) {
    delete reinterpret_cast<Cq*>(cq);
    --fabric().objects;
    return 0;
  }
  static int get_cq_event(abi::ibv_comp_channel* channel, abi::ibv_cq** /*cq*/, void** /*context*/) {
    uint64_t count = 0;
    return ::read(channel->fd, &count, sizeof(count)) == sizeof(count) ? 0 : -1;
  }
  static void ack_cq_events(abi::ibv_cq* /*cq*/, unsigned /*events*/) {}
  static int poll_cq(abi::ibv_cq* raw, int room, abi::ibv_wc* out) {
    fabric().run();
    auto& entries = reinterpret_cast<Cq*>(raw)->entries;
    int count = 0;
    for (; count < room && !entries.empty(); ++count) {
      out[count] = entries.front();
      entries.pop_front();
    }
    return count;
  }
  static int req_notify_cq(abi::ibv_cq* cq, int /*solicited*/) {
    reinterpret_cast<Cq*>(cq)->armed = true;
    return 0;
  }

  static abi::ibv_srq* create_srq(abi::ibv_pd* /*pd*/, abi::ibv_srq_init_attr* attr) {
    auto* const srq = new Srq{};
    srq->capacity = attr->attr.max_wr;
    ++fabric().objects;
    return reinterpret_cast<abi::ibv_srq*>(srq);
  }
  static int destroy_srq(abi::ibv_srq* srq) {
    delete reinterpret_cast<Srq*>(srq);
    --fabric().objects;
    return 0;
  }
  static int post_srq_recv(abi::ibv_srq* raw, abi::ibv_recv_wr* request, abi::ibv_recv_wr** bad) {
    auto& srq = *reinterpret_cast<Srq*>(raw);
    for (; request != nullptr; request = request->next) {
      if (srq.receives.size() >= srq.capacity) {
        *bad = request;
        return ENOMEM;
      }
      srq.receives.emplace_back(request->wr_id, request->num_sge > 0 ? std::optional(*request->sg_list) : std::nullopt);
    }
    return 0;
  }

  static abi::ibv_qp* create_qp(abi::ibv_pd* /*pd*/, abi::ibv_qp_init_attr* attr) {
    auto& qp = fabric().queue_pairs.emplace_back(std::make_unique<Qp>());
    qp->qp_num = ++fabric().last_qp_;
    qp->send_cq = attr->send_cq;
    qp->recv_cq = attr->recv_cq;
    qp->srq = attr->srq;
    qp->cap = attr->cap;
    return qp.get();
  }
  static int modify_qp(abi::ibv_qp* raw, abi::ibv_qp_attr* attr, int mask) {
    auto& qp = *static_cast<Qp*>(raw);
    if ((mask & abi::IBV_QP_STATE) == 0) return EINVAL;
    if (attr->qp_state == abi::IBV_QPS_ERR) {
      fabric().error(qp);
      return 0;
    }
    // Each state comes from the one before it.
    if (attr->qp_state != qp.state + 1) return EINVAL;
    qp.state = attr->qp_state;
    if (qp.state == abi::IBV_QPS_INIT) qp.init = *attr;
    if (qp.state == abi::IBV_QPS_RTR) fabric().rtr_log.push_back(qp.rtr = *attr);
    if (qp.state == abi::IBV_QPS_RTS) fabric().rts_log.push_back(qp.rts = *attr);
    return 0;
  }
  static int destroy_qp(abi::ibv_qp* qp) {
    // As mlx5 does: the queue pair's completions leave the queue with it.
    for (abi::ibv_cq* const raw : {qp->send_cq, qp->recv_cq}) {
      std::erase_if(reinterpret_cast<Cq*>(raw)->entries,
                    [&](const abi::ibv_wc& entry) { return entry.qp_num == qp->qp_num; });
    }
    fabric().queue_pairs.remove_if([&](const auto& candidate) { return candidate.get() == qp; });
    return 0;
  }
  static int post_send(abi::ibv_qp* raw, abi::ibv_send_wr* request, abi::ibv_send_wr** bad) {
    auto& qp = *static_cast<Qp*>(raw);
    for (; request != nullptr; request = request->next) {
      *bad = request;
      if (qp.state != abi::IBV_QPS_RTS && qp.state != abi::IBV_QPS_ERR) return EINVAL;
      if (fabric().memory_for && (*fabric().memory_for)-- == 0) {
        fabric().memory_for.reset();
        return ENOMEM;
      }
      EXPECT_LT(qp.outstanding, qp.cap.max_send_wr) << "posted beyond the queue";
      ++qp.outstanding;
      Sent sent{*request, {}, {}};
      if (request->num_sge > 0) {
        sent.piece = *request->sg_list;
        if ((request->send_flags & abi::IBV_SEND_INLINE) != 0) {
          EXPECT_LE(sent.piece.length, qp.cap.max_inline_data);
          const auto* const data = reinterpret_cast<const std::byte*>(sent.piece.addr);
          sent.copied.assign(data, data + sent.piece.length);
        } else {
          EXPECT_TRUE(fabric().region_of(sent.piece.addr, sent.piece.length, sent.piece.lkey) != nullptr)
              << "a source without memory region";
        }
      }
      fabric().log.push_back(sent);
      if (qp.state == abi::IBV_QPS_ERR) {
        fabric().complete(qp, sent, abi::IBV_WC_WR_FLUSH_ERR, true);
      } else {
        qp.waiting.push_back(sent);
      }
    }
    fabric().run();
    return 0;
  }

  static int get_async_event(abi::ibv_context* /*context*/, abi::ibv_async_event* event) {
    if (fabric().events.empty()) return -1;
    *event = fabric().events.front();
    fabric().events.pop_front();
    return 0;
  }
  static void ack_async_event(abi::ibv_async_event* /*event*/) {}
  static const char* event_type_str(int /*type*/) { return "an event of the device"; }
  static const char* wc_status_str(int status) {
    return status == abi::IBV_WC_REM_ACCESS_ERR ? "remote access error" : "some error";
  }
  static int fork_init() { return 0; }
};

inline const Library& Fabric::library() {
  static const Library library{
      .get_device_list = Functions::get_device_list,
      .free_device_list = Functions::free_device_list,
      .get_device_name = Functions::get_device_name,
      .open_device = Functions::open_device,
      .close_device = Functions::close_device,
      .query_device = Functions::query_device,
      .query_port = Functions::query_port,
      .query_gid_ex = Functions::query_gid_ex,
      .query_pkey = Functions::query_pkey,
      .alloc_pd = Functions::alloc_pd,
      .dealloc_pd = Functions::dealloc_pd,
      .reg_mr_iova2 = Functions::reg_mr,
      .dereg_mr = Functions::dereg_mr,
      .create_comp_channel = Functions::create_comp_channel,
      .destroy_comp_channel = Functions::destroy_comp_channel,
      .create_cq = Functions::create_cq,
      .destroy_cq = Functions::destroy_cq,
      .get_cq_event = Functions::get_cq_event,
      .ack_cq_events = Functions::ack_cq_events,
      .create_srq = Functions::create_srq,
      .destroy_srq = Functions::destroy_srq,
      .create_qp = Functions::create_qp,
      .modify_qp = Functions::modify_qp,
      .destroy_qp = Functions::destroy_qp,
      .get_async_event = Functions::get_async_event,
      .ack_async_event = Functions::ack_async_event,
      .event_type_str = Functions::event_type_str,
      .wc_status_str = Functions::wc_status_str,
      .fork_init = Functions::fork_init,
      .reg_dmabuf_mr = nullptr,
  };
  return library;
}

}  // namespace kvc::verbs::fake
