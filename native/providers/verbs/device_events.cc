#include "providers/verbs/device_events.h"

namespace kvc::verbs {

std::optional<DeviceEvent> next_event(const DomainResources& resources) noexcept {
  using Kind = DeviceEvent::Kind;
  const Library& library = resources.device->library();
  abi::ibv_async_event raw{};
  if (library.get_async_event(resources.device->context(), &raw) != 0) return std::nullopt;
  DeviceEvent event{.type = raw.event_type};
  switch (raw.event_type) {
    case abi::IBV_EVENT_QP_FATAL:
    case abi::IBV_EVENT_QP_REQ_ERR:
    case abi::IBV_EVENT_QP_ACCESS_ERR:
      event.kind = Kind::kQueuePairFailed;
      event.number = raw.element.qp->qp_num;
      break;
    case abi::IBV_EVENT_QP_LAST_WQE_REACHED:
      event.kind = Kind::kLastReceive;
      event.number = raw.element.qp->qp_num;
      break;
    case abi::IBV_EVENT_PORT_ERR:
    case abi::IBV_EVENT_PORT_ACTIVE:
      event.kind = raw.event_type == abi::IBV_EVENT_PORT_ERR ? Kind::kPortDown : Kind::kPortUp;
      event.number = static_cast<uint32_t>(raw.element.port_num);
      break;
    case abi::IBV_EVENT_DEVICE_FATAL:
    case abi::IBV_EVENT_CQ_ERR:
    case abi::IBV_EVENT_SRQ_ERR:
      event.kind = Kind::kDeviceFailed;
      break;
    default:
      break;
  }
  library.ack_async_event(&raw);
  return event;
}

Error event_error(const DomainResources& resources, int type) {
  return verbs_error(ErrorCode::kPeerDown, "write", resources.device->library().event_type_str(type));
}

}  // namespace kvc::verbs
