// The functions of libibverbs over the stand-in of verbs_fake.h.
#pragma once

#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "tests/verbs_fake.h"

namespace kvc::verbs::fake {

struct Functions {
  static Fabric& fabric() { return *Fabric::current; }
  static std::unique_lock<std::mutex> lock() { return std::unique_lock(fabric().mutex_); }
  // The lock for calls that may block.
  static std::unique_lock<std::mutex> lock_blocking() {
    std::unique_lock guard = lock();
    EXPECT_NE(fabric().may_not_block, std::this_thread::get_id()) << "blocks the thread that polls";
    return guard;
  }

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
  static Device& nic(abi::ibv_context* context) { return *Context::of(context).nic; }
  static const char* get_device_name(abi::ibv_device* device) { return nic(device).name.c_str(); }

  static abi::ibv_context* open_device(abi::ibv_device* device) {
    const auto guard = lock_blocking();
    auto* const opened = new Context{};
    opened->nic = &nic(device);
    opened->sz = sizeof(abi::verbs_context);
    opened->alloc_td = alloc_td;
    opened->dealloc_td = dealloc_td;
    opened->alloc_parent_domain = alloc_parent_domain;
    abi::ibv_context& context = opened->context;
    context.device = device;
    context.async_fd = ::eventfd(0, EFD_CLOEXEC);
    context.num_comp_vectors = 1;
    context.abi_compat = reinterpret_cast<void*>(UINTPTR_MAX);
    context.ops.poll_cq = poll_cq;
    context.ops.req_notify_cq = req_notify_cq;
    context.ops.post_srq_recv = post_srq_recv;
    context.ops.post_send = post_send;
    fabric().contexts.push_back(opened);
    ++fabric().objects;
    return &context;
  }
  static int close_device(abi::ibv_context* context) {
    const auto guard = lock_blocking();
    Context* const closed = &Context::of(context);
    ::close(context->async_fd);
    fabric().contexts.remove(closed);
    delete closed;
    --fabric().objects;
    return 0;
  }
  static int query_device(abi::ibv_context* context, abi::ibv_device_attr* attr) {
    *attr = {};
    attr->phys_port_cnt = static_cast<uint8_t>(nic(context).ports.size());
    attr->max_qp_wr = 1 << 14;
    attr->max_srq_wr = 1 << 14;
    attr->max_cqe = nic(context).max_cqe;
    return 0;
  }
  static const Port& port(abi::ibv_context* context, uint32_t number) { return nic(context).ports.at(number - 1); }
  static int query_port(abi::ibv_context* context, uint8_t number, abi::ibv_port_attr* attr) {
    if (number == 0 || number > nic(context).ports.size()) return EINVAL;
    const Port& port = Functions::port(context, number);
    *attr = {};
    attr->state = port.state;
    attr->active_mtu = port.mtu;
    attr->max_mtu = port.mtu;
    attr->link_layer = port.link_layer;
    attr->lid = port.lid;
    attr->gid_tbl_len = static_cast<int>(port.gids.size());
    attr->pkey_tbl_len = static_cast<uint16_t>(port.pkeys.size());
    attr->max_msg_sz = nic(context).max_message;
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

  static abi::ibv_pd* alloc_pd(abi::ibv_context* context) {
    const auto guard = lock_blocking();
    ++fabric().objects;
    return reinterpret_cast<abi::ibv_pd*>(new Pd{&Context::of(context)});
  }
  static int dealloc_pd(abi::ibv_pd* pd) {
    const auto guard = lock_blocking();
    delete reinterpret_cast<Pd*>(pd);
    --fabric().objects;
    return 0;
  }
  static abi::ibv_td* alloc_td(abi::ibv_context* /*context*/, abi::ibv_td_init_attr* /*attr*/) {
    const auto guard = lock_blocking();
    ++fabric().objects;
    return reinterpret_cast<abi::ibv_td*>(new int(0));
  }
  static int dealloc_td(abi::ibv_td* td) {
    const auto guard = lock_blocking();
    delete reinterpret_cast<int*>(td);
    --fabric().objects;
    return 0;
  }
  static abi::ibv_pd* alloc_parent_domain(abi::ibv_context* context, abi::ibv_parent_domain_init_attr* attr) {
    const auto guard = lock_blocking();
    EXPECT_NE(attr->td, nullptr);
    ++fabric().objects;
    return reinterpret_cast<abi::ibv_pd*>(new Pd{&Context::of(context), true});
  }
  static abi::ibv_mr* reg_mr(abi::ibv_pd* pd, void* address, size_t bytes, uint64_t /*iova*/, unsigned access) {
    const auto guard = lock_blocking();
    EXPECT_FALSE(reinterpret_cast<Pd*>(pd)->of_one_thread);
    auto& mr = fabric().regions.emplace_back(std::make_unique<Mr>());
    mr->addr = address;
    mr->length = bytes;
    mr->access = access;
    mr->lkey = mr->rkey = ++fabric().last_key_;
    return mr.get();
  }
  static int dereg_mr(abi::ibv_mr* mr) {
    const auto guard = lock_blocking();
    fabric().regions.remove_if([&](const auto& region) { return region.get() == mr; });
    return 0;
  }

  static abi::ibv_comp_channel* create_comp_channel(abi::ibv_context* /*context*/) {
    const auto guard = lock_blocking();
    auto* const channel = new Channel{};
    channel->fd = ::eventfd(0, EFD_CLOEXEC);
    ++fabric().objects;
    return channel;
  }
  static int destroy_comp_channel(abi::ibv_comp_channel* channel) {
    const auto guard = lock_blocking();
    ::close(channel->fd);
    delete static_cast<Channel*>(channel);
    --fabric().objects;
    return 0;
  }
  static abi::ibv_cq* create_cq(abi::ibv_context* context, int capacity, void* /*cq_context*/,
                                abi::ibv_comp_channel* channel, int /*vector*/) {
    const auto guard = lock_blocking();
    if (capacity > nic(context).max_cqe) {
      errno = EINVAL;
      return nullptr;
    }
    auto* const cq = new Cq{};
    fabric().cqs.push_back(cq);
    cq->context = &Context::of(context);
    cq->capacity = capacity;
    cq->channel = static_cast<Channel*>(channel);
    ++fabric().objects;
    return reinterpret_cast<abi::ibv_cq*>(cq);
  }
  static int destroy_cq(abi::ibv_cq* cq) {
    const auto guard = lock_blocking();
    fabric().cqs.remove(reinterpret_cast<Cq*>(cq));
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
    const auto guard = lock();
    ++fabric().turn_;
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
    const auto guard = lock();
    reinterpret_cast<Cq*>(cq)->armed = true;
    return 0;
  }

  static abi::ibv_srq* create_srq(abi::ibv_pd* pd, abi::ibv_srq_init_attr* attr) {
    const auto guard = lock_blocking();
    EXPECT_FALSE(reinterpret_cast<Pd*>(pd)->of_one_thread) << "the end of a queue pair reaches into it";
    auto* const srq = new Srq{};
    srq->context = reinterpret_cast<Pd*>(pd)->context;
    srq->capacity = attr->attr.max_wr;
    fabric().srqs.push_back(srq);
    ++fabric().objects;
    return reinterpret_cast<abi::ibv_srq*>(srq);
  }
  static int destroy_srq(abi::ibv_srq* raw) {
    const auto guard = lock_blocking();
    auto* const srq = reinterpret_cast<Srq*>(raw);
    fabric().srqs.remove(srq);
    delete srq;
    --fabric().objects;
    return 0;
  }
  static int post_srq_recv(abi::ibv_srq* raw, abi::ibv_recv_wr* request, abi::ibv_recv_wr** bad) {
    const auto guard = lock();
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

  static abi::ibv_qp* create_qp(abi::ibv_pd* pd, abi::ibv_qp_init_attr* attr) {
    const auto guard = lock_blocking();
    auto& qp = fabric().queue_pairs.emplace_back(std::make_unique<Qp>());
    qp->context = &reinterpret_cast<Pd*>(pd)->context->context;
    qp->qp_num = ++fabric().last_qp_;
    qp->send_cq = attr->send_cq;
    qp->recv_cq = attr->recv_cq;
    qp->srq = attr->srq;
    qp->cap = attr->cap;
    return qp.get();
  }
  static int modify_qp(abi::ibv_qp* raw, abi::ibv_qp_attr* attr, int mask) {
    const auto guard = lock_blocking();
    auto& qp = *static_cast<Qp*>(raw);
    if ((mask & abi::IBV_QP_STATE) == 0) return EINVAL;
    if (attr->qp_state == abi::IBV_QPS_ERR) {
      qp.stopped = true;
      fabric().error(qp);
      return 0;
    }
    // Each state must follow the previous one.
    if (attr->qp_state != qp.state + 1) return EINVAL;
    qp.state = attr->qp_state;
    if (qp.state == abi::IBV_QPS_INIT) qp.init = *attr;
    if (qp.state == abi::IBV_QPS_RTR) qp.rtr = *attr;
    if (qp.state == abi::IBV_QPS_RTS) qp.rts = *attr;
    return 0;
  }
  static int destroy_qp(abi::ibv_qp* raw) {
    auto guard = lock_blocking();
    auto& qp = *static_cast<Qp*>(raw);
    std::erase_if(Context::of(qp.context).events,
                  [&](const abi::ibv_async_event& event) { return of_queue_pair(event) && event.element.qp == raw; });
    EXPECT_TRUE(fabric().acknowledged_.wait_for(guard, std::chrono::seconds(10), [&] {
      return qp.unacknowledged == 0;
    })) << "waits for ever: an event is not acknowledged";
    if (!fabric().purges && qp.flushed_at) fabric().flush(qp, true);
    fabric().lost_receives += qp.half_arrived ? 1 : 0;
    if (fabric().purges) {
      std::erase_if(reinterpret_cast<Cq*>(qp.recv_cq)->entries, [&](const abi::ibv_wc& entry) {
        if (entry.qp_num != qp.qp_num) return false;
        const WorkRequestId::Kind kind = WorkRequestId::decode(entry.wr_id).kind;
        const bool receive = kind == WorkRequestId::Kind::kWriteReceive || kind == WorkRequestId::Kind::kMessageReceive;
        fabric().lost_receives += receive ? 1 : 0;
        return true;
      });
    }
    fabric().queue_pairs.remove_if([&](const auto& candidate) { return candidate.get() == raw; });
    return 0;
  }
  static int post_send(abi::ibv_qp* raw, abi::ibv_send_wr* request, abi::ibv_send_wr** bad) {
    const auto guard = lock();
    auto& qp = *static_cast<Qp*>(raw);
    if (!qp.poster) qp.poster = std::this_thread::get_id();
    EXPECT_EQ(*qp.poster, std::this_thread::get_id()) << "of a thread domain: without locks";
    EXPECT_FALSE(qp.stopped) << "posted by one thread while another one ends it";
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
      if (qp.state == abi::IBV_QPS_ERR && !qp.flushed_at) {
        fabric().complete(qp, sent, abi::IBV_WC_WR_FLUSH_ERR, true);
      } else {
        qp.waiting.push_back(sent);
      }
    }
    fabric().run();
    return 0;
  }

  static bool of_queue_pair(const abi::ibv_async_event& event) {
    const int type = event.event_type;
    return type == abi::IBV_EVENT_QP_FATAL || type == abi::IBV_EVENT_QP_REQ_ERR ||
           type == abi::IBV_EVENT_QP_ACCESS_ERR || type == abi::IBV_EVENT_QP_LAST_WQE_REACHED;
  }
  static int get_async_event(abi::ibv_context* context, abi::ibv_async_event* event) {
    const auto guard = lock();
    auto& events = Context::of(context).events;
    if (events.empty()) return -1;
    *event = events.front();
    events.pop_front();
    if (of_queue_pair(*event)) ++static_cast<Qp*>(event->element.qp)->unacknowledged;
    uint64_t count = 0;
    if (events.empty()) (void)!::read(context->async_fd, &count, sizeof(count));
    return 0;
  }
  static void ack_async_event(abi::ibv_async_event* event) {
    const auto guard = lock();
    if (of_queue_pair(*event)) --static_cast<Qp*>(event->element.qp)->unacknowledged;
    fabric().acknowledged_.notify_all();
  }
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
