#include "providers/verbs/queue_pair.h"

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "base/random.h"

namespace kvc::verbs {

namespace {

constexpr uint32_t kPsnMask = 0xFFFFFF;
// Limit for routers on the path: the value that IP uses.
constexpr uint8_t kHopLimit = 64;

}  // namespace

QueuePair::QueuePair(const DomainResources& resources, Owned<abi::ibv_qp> qp, const abi::ibv_qp_cap& cap)
    : resources_(resources),
      qp_(std::move(qp)),
      number_(qp_->qp_num),
      psn_(static_cast<uint32_t>(random_key()) & kPsnMask),
      slots_(cap.max_send_wr),
      inline_bytes_(std::min(cap.max_inline_data, resources.tuning.inline_bytes)) {}

Result<std::shared_ptr<QueuePair>> QueuePair::create(const DomainResources& resources, const ReceiveQueue& receives,
                                                     uint32_t slots, unsigned access) {
  const Device& device = *resources.device;
  const Library& library = device.library();
  abi::ibv_qp_init_attr attr{};
  attr.send_cq = resources.completions.get();
  attr.recv_cq = resources.completions.get();
  attr.srq = receives.srq();
  attr.qp_type = abi::IBV_QPT_RC;
  attr.cap.max_send_wr = std::min(slots, static_cast<uint32_t>(device.limits().max_qp_wr));
  attr.cap.max_send_sge = 1;
  attr.cap.max_inline_data = resources.tuning.inline_bytes;
  abi::ibv_qp* created = library.create_qp(device.queue_pair_pd(), &attr);
  if (created == nullptr && errno == EINVAL) {  // a device that copies nothing into its requests
    attr.cap.max_inline_data = 0;
    created = library.create_qp(device.queue_pair_pd(), &attr);
  }
  if (created == nullptr) return verbs_error(ErrorCode::kResources, "connect", "ibv_create_qp", errno);
  std::shared_ptr<QueuePair> pair(new QueuePair(resources, owned(created, library.destroy_qp), attr.cap));
  abi::ibv_qp_attr init{};
  init.qp_state = abi::IBV_QPS_INIT;
  init.pkey_index = device.pkey_index();
  init.port_num = device.spec().port;
  init.qp_access_flags = access;
  Status initialized = pair->modify(
      init, abi::IBV_QP_STATE | abi::IBV_QP_PKEY_INDEX | abi::IBV_QP_PORT | abi::IBV_QP_ACCESS_FLAGS, "INIT");
  if (!initialized) return initialized.error();
  return pair;
}

Status QueuePair::modify(abi::ibv_qp_attr& attr, int mask, const char* to) {
  const int error = resources_.device->library().modify_qp(qp_.get(), &attr, mask);
  if (error == 0) return {};
  return verbs_error(ErrorCode::kSystem, "connect", std::string("queue pair to ") + to, error);
}

Status QueuePair::connect(const Path& path, const QueueEnd& peer) {
  const DeviceSpec& spec = resources_.device->spec();
  abi::ibv_qp_attr receive{};
  receive.qp_state = abi::IBV_QPS_RTR;
  receive.path_mtu = path.mtu;
  receive.dest_qp_num = peer.number;
  receive.rq_psn = peer.psn;
  receive.max_dest_rd_atomic = 1;  // this side reads nothing, but some devices refuse 0
  receive.min_rnr_timer = resources_.tuning.min_rnr_timer;
  receive.ah_attr.port_num = spec.port;
  receive.ah_attr.dlid = path.peer.lid;
  receive.ah_attr.sl = spec.service_level;
  if (path.global) {
    receive.ah_attr.is_global = 1;
    std::copy(path.peer.gid.begin(), path.peer.gid.end(), std::begin(receive.ah_attr.grh.dgid.raw));
    receive.ah_attr.grh.sgid_index = static_cast<uint8_t>(path.gid_index);
    receive.ah_attr.grh.hop_limit = kHopLimit;
    receive.ah_attr.grh.traffic_class = spec.traffic_class;
  }
  Status receives = modify(receive,
                           abi::IBV_QP_STATE | abi::IBV_QP_AV | abi::IBV_QP_PATH_MTU | abi::IBV_QP_DEST_QPN |
                               abi::IBV_QP_RQ_PSN | abi::IBV_QP_MAX_DEST_RD_ATOMIC | abi::IBV_QP_MIN_RNR_TIMER,
                           "RTR");
  if (!receives) return receives;

  abi::ibv_qp_attr send{};
  send.qp_state = abi::IBV_QPS_RTS;
  send.sq_psn = psn_;
  send.timeout = resources_.tuning.timeout;
  send.retry_cnt = resources_.tuning.retry_count;
  send.rnr_retry = resources_.tuning.rnr_retry;
  send.max_rd_atomic = 1;
  return modify(send,
                abi::IBV_QP_STATE | abi::IBV_QP_SQ_PSN | abi::IBV_QP_TIMEOUT | abi::IBV_QP_RETRY_CNT |
                    abi::IBV_QP_RNR_RETRY | abi::IBV_QP_MAX_QP_RD_ATOMIC,
                "RTS");
}

void QueuePair::stop() noexcept {
  abi::ibv_qp_attr attr{};
  attr.qp_state = abi::IBV_QPS_ERR;
  // An error here changes nothing: the queue pair is destroyed next, which always stops it.
  (void)resources_.device->library().modify_qp(qp_.get(), &attr, abi::IBV_QP_STATE);
  stopped_.store(true, std::memory_order_release);
}

void QueuePair::destroy() noexcept {
  qp_.reset();
  destroyed_.store(true, std::memory_order_release);
}

}  // namespace kvc::verbs
