#include "providers/verbs/queue_pair.h"

#include <algorithm>
#include <cerrno>
#include <string>

namespace kvc::verbs {

namespace {

constexpr uint32_t kPsnMask = 0xFFFFFF;
// Routers on the way: what IP uses.
constexpr uint8_t kHopLimit = 64;

}  // namespace

QueuePair::QueuePair(const Device& device, const Tuning& tuning, Credits& credits, Owned<abi::ibv_qp> qp)
    : device_(&device), tuning_(&tuning), credits_(&credits), qp_(std::move(qp)), psn_(random_bits() & kPsnMask) {}

Result<QueuePair> QueuePair::create(const Device& device, const Queues& queues, const Tuning& tuning, uint32_t slots,
                                    unsigned access, Credits& credits) {
  const Library& library = device.library();
  abi::ibv_qp_init_attr attr{};
  attr.send_cq = queues.completions;
  attr.recv_cq = queues.completions;
  attr.srq = queues.receives;
  attr.qp_type = abi::IBV_QPT_RC;
  attr.cap.max_send_wr = std::min(slots, static_cast<uint32_t>(device.limits().max_qp_wr));
  attr.cap.max_send_sge = 1;
  attr.cap.max_inline_data = tuning.inline_bytes;
  abi::ibv_qp* created = library.create_qp(device.queue_pd(), &attr);
  if (created == nullptr && errno == EINVAL) {  // a device that copies nothing into its requests
    attr.cap.max_inline_data = 0;
    created = library.create_qp(device.queue_pd(), &attr);
  }
  if (created == nullptr) return verbs_error(ErrorCode::kResources, "connect", "ibv_create_qp", errno);
  QueuePair queue(device, tuning, credits, owned(created, library.destroy_qp));
  queue.slots_ = attr.cap.max_send_wr;  // the device rounds up
  queue.inline_bytes_ = std::min(attr.cap.max_inline_data, tuning.inline_bytes);
  abi::ibv_qp_attr init{};
  init.qp_state = abi::IBV_QPS_INIT;
  init.pkey_index = device.pkey_index();
  init.port_num = device.spec().port;
  init.qp_access_flags = access;
  Status initialized = queue.modify(
      init, abi::IBV_QP_STATE | abi::IBV_QP_PKEY_INDEX | abi::IBV_QP_PORT | abi::IBV_QP_ACCESS_FLAGS, "INIT");
  if (!initialized) return initialized.error();
  return queue;
}

Status QueuePair::modify(abi::ibv_qp_attr& attr, int mask, const char* to) {
  const int error = device_->library().modify_qp(qp_.get(), &attr, mask);
  if (error == 0) return {};
  return verbs_error(ErrorCode::kSystem, "connect", std::string("queue pair to ") + to, error);
}

Status QueuePair::receive_from(const Path& path, const QueueEnd& peer) {
  abi::ibv_qp_attr attr{};
  attr.qp_state = abi::IBV_QPS_RTR;
  attr.path_mtu = path.mtu;
  attr.dest_qp_num = peer.number;
  attr.rq_psn = peer.psn;
  attr.max_dest_rd_atomic = 1;  // we read nothing, but some devices refuse 0
  attr.min_rnr_timer = tuning_->min_rnr_timer;
  attr.ah_attr.port_num = device_->spec().port;
  attr.ah_attr.dlid = path.peer.lid;
  attr.ah_attr.sl = device_->spec().service_level;
  if (path.global) {
    attr.ah_attr.is_global = 1;
    std::copy(path.peer.gid.begin(), path.peer.gid.end(), std::begin(attr.ah_attr.grh.dgid.raw));
    attr.ah_attr.grh.sgid_index = static_cast<uint8_t>(path.gid_index);
    attr.ah_attr.grh.hop_limit = kHopLimit;
    attr.ah_attr.grh.traffic_class = device_->spec().traffic_class;
  }
  return modify(attr,
                abi::IBV_QP_STATE | abi::IBV_QP_AV | abi::IBV_QP_PATH_MTU | abi::IBV_QP_DEST_QPN | abi::IBV_QP_RQ_PSN |
                    abi::IBV_QP_MAX_DEST_RD_ATOMIC | abi::IBV_QP_MIN_RNR_TIMER,
                "RTR");
}

Status QueuePair::start_sending() {
  abi::ibv_qp_attr attr{};
  attr.qp_state = abi::IBV_QPS_RTS;
  attr.sq_psn = psn_;
  attr.timeout = tuning_->timeout;
  attr.retry_cnt = tuning_->retry_count;
  attr.rnr_retry = tuning_->rnr_retry;
  attr.max_rd_atomic = 1;
  return modify(attr,
                abi::IBV_QP_STATE | abi::IBV_QP_SQ_PSN | abi::IBV_QP_TIMEOUT | abi::IBV_QP_RETRY_CNT |
                    abi::IBV_QP_RNR_RETRY | abi::IBV_QP_MAX_QP_RD_ATOMIC,
                "RTS");
}

void QueuePair::stop() noexcept {
  abi::ibv_qp_attr attr{};
  attr.qp_state = abi::IBV_QPS_ERR;
  // A refusal changes nothing: what follows is its destruction, which no queue pair survives.
  (void)device_->library().modify_qp(qp_.get(), &attr, abi::IBV_QP_STATE);
}

Result<uint32_t> QueuePair::post(abi::ibv_send_wr* first, uint32_t count, Sent sent) {
  abi::ibv_send_wr* refused = nullptr;
  const int error = device_->context()->ops.post_send(qp_.get(), first, &refused);
  uint32_t taken = count;
  if (error != 0) {
    taken = 0;
    for (const abi::ibv_send_wr* request = first; request != refused && request != nullptr; request = request->next) {
      ++taken;
    }
    if (refused == nullptr) taken = 0;
  }
  used_ += taken;
  *credits_ -= taken;
  sent.sequence = sequence_;
  sequence_ = (sequence_ + 1) & WorkRequestId::kSequenceMask;
  if (taken == count) {
    sent.slots = taken + std::exchange(unsignalled_, 0);
    posted_.push_back(sent);
    return taken;
  }
  unsignalled_ += taken;
  // Some libraries return -1 and set errno, some the error itself.
  if (const int number = error < 0 ? errno : error; number != ENOMEM && number != EAGAIN) {
    return verbs_error(ErrorCode::kPeerDown, "write", "ibv_post_send", number);
  }
  return taken;
}

std::optional<Sent> QueuePair::completed(uint32_t sequence) {
  if (posted_.empty() || posted_.front().sequence != sequence) return std::nullopt;
  const Sent sent = posted_.front();
  posted_.pop_front();
  used_ -= sent.slots;
  *credits_ += sent.slots;
  return sent;
}

std::deque<Sent> QueuePair::destroy() {
  qp_.reset();
  *credits_ += std::exchange(used_, 0);
  return std::exchange(posted_, {});
}

}  // namespace kvc::verbs
