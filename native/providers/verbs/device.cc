#include "providers/verbs/device.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <limits>
#include <utility>

namespace kvc::verbs {

namespace {

Error invalid(std::string message) { return verbs_error(ErrorCode::kInvalidArgument, "open", std::move(message)); }

// Parses a number within 0..max, decimal or with 0x.
std::optional<uint32_t> number(std::string_view text, uint32_t max) {
  const bool hex = text.substr(0, 2) == "0x";
  if (hex) text.remove_prefix(2);
  uint32_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, hex ? 16 : 10);
  if (error != std::errc() || end != text.data() + text.size() || value > max) return std::nullopt;
  return value;
}

const char* gid_type_name(uint32_t type) {
  switch (type) {
    case abi::IBV_GID_TYPE_ROCE_V1:
      return "RoCE v1";
    case abi::IBV_GID_TYPE_ROCE_V2:
      return "RoCE v2";
    default:
      return "InfiniBand";
  }
}

// Whether the first 64 bits, the InfiniBand subnet, are equal.
bool same_subnet(const Gid& left, const Gid& right) {
  return std::equal(left.begin(), left.begin() + 8, right.begin());
}

// Returns the structure around the context if the library has thread domains; null in older ones.
const abi::verbs_context* extended(const abi::ibv_context* context) {
  if (context->abi_compat != reinterpret_cast<void*>(std::numeric_limits<uintptr_t>::max())) return nullptr;
  const auto* const before = reinterpret_cast<const abi::verbs_context*>(reinterpret_cast<const std::byte*>(context) -
                                                                         offsetof(abi::verbs_context, context));
  return before->sz >= sizeof(abi::verbs_context) ? before : nullptr;
}

}  // namespace

Result<DeviceSpec> DeviceSpec::parse(std::string_view text) {
  DeviceSpec spec;
  const auto wrong = [&](std::string_view part) {
    return invalid("device '" + std::string(text) + "': cannot read '" + std::string(part) +
                   "'; write NAME[:PORT][,gid=INDEX][,tc=0-255][,sl=0-15][,pkey=0x1-0xffff]");
  };
  std::string_view rest = text;
  const auto next_part = [&rest] {
    const size_t comma = std::min(rest.find(','), rest.size());
    const std::string_view part = rest.substr(0, comma);
    rest.remove_prefix(std::min(comma + 1, rest.size()));
    return part;
  };
  const std::string_view port = next_part();
  const size_t colon = std::min(port.find(':'), port.size());
  spec.name = port.substr(0, colon);
  if (colon < port.size()) {
    const auto value = number(port.substr(colon + 1), 255);
    if (!value || *value == 0) return wrong(port);
    spec.port = static_cast<uint8_t>(*value);
  }
  while (!rest.empty()) {
    const std::string_view part = next_part();
    const size_t equals = std::min(part.find('='), part.size());
    const std::string_view key = part.substr(0, equals);
    const std::string_view value = equals < part.size() ? part.substr(equals + 1) : std::string_view{};
    if (key == "gid") {
      spec.gid_index = number(value, 255);
      if (!spec.gid_index) return wrong(part);
    } else if (key == "tc" || key == "sl") {
      const auto given = number(value, key == "tc" ? 255 : 15);
      if (!given) return wrong(part);
      (key == "tc" ? spec.traffic_class : spec.service_level) = static_cast<uint8_t>(*given);
    } else if (key == "pkey") {
      const auto given = number(value, 0xFFFF);
      if (!given || *given == 0) return wrong(part);
      spec.pkey = static_cast<uint16_t>(*given);
    } else {
      return wrong(part);
    }
  }
  return spec;
}

const GidEntry* choose_gid(const std::vector<GidEntry>& entries, const Address* peer) noexcept {
  const auto rank = [](const GidEntry& entry) {
    if (entry.type != abi::IBV_GID_TYPE_ROCE_V2) return 3;
    if (is_ipv4(entry.gid)) return 0;
    return is_link_local(entry.gid) ? 2 : 1;
  };
  const GidEntry* best = nullptr;
  for (const GidEntry& entry : entries) {
    if (peer != nullptr && (entry.type != peer->gid_type || is_ipv4(entry.gid) != is_ipv4(peer->gid) ||
                            is_link_local(entry.gid) != is_link_local(peer->gid))) {
      continue;
    }
    if (best == nullptr || rank(entry) < rank(*best)) best = &entry;
  }
  return best;
}

// --- Opening

Device::Device(const Library& library)
    : library_(library),
      context_(nullptr, library.close_device),
      pd_(nullptr, library.dealloc_pd),
      td_(nullptr, nullptr),
      parent_(nullptr, library.dealloc_pd) {}

Device::~Device() = default;

Result<std::unique_ptr<Device>> Device::open(const Library& library, const DeviceSpec& spec) {
  int count = 0;
  errno = 0;
  abi::ibv_device** const list = library.get_device_list(&count);
  if (list == nullptr) {
    return verbs_error(ErrorCode::kRefused, "open", "no RDMA support in this kernel (ibv_get_device_list)",
                       errno == 0 ? ENOSYS : errno);
  }
  std::string reasons;
  std::unique_ptr<Device> opened;
  for (int i = 0; i < count && !opened; ++i) {
    const std::string name = library.get_device_name(list[i]);
    if (!spec.name.empty() && spec.name != name) {
      reasons += (reasons.empty() ? "" : "; ") + name + ": not the configured device";
      continue;
    }
    std::unique_ptr<Device> device(new Device(library));
    device->spec_ = spec;
    device->spec_.name = name;
    Status status = device->open_context(list[i]);
    if (status.ok()) {
      opened = std::move(device);
    } else {
      reasons += (reasons.empty() ? "" : "; ") + name + ": " + status.error().message;
    }
  }
  library.free_device_list(list);
  if (opened) return opened;
  return verbs_error(
      ErrorCode::kRefused, "open",
      count == 0 ? "this machine has no RDMA device (ibv_devices lists none): a NIC with its driver, or "
                   "a software one (rdma link add rxe0 type rxe netdev eth0), is needed"
                 : "no usable RDMA device" + (spec.name.empty() ? "" : " '" + spec.name + "'") + " (" + reasons + ")");
}

Status Device::open_context(abi::ibv_device* device) {
  if (device->transport_type == abi::IBV_TRANSPORT_IWARP) {
    return verbs_error(ErrorCode::kRefused, "open", "iWARP carries no immediates");
  }
  context_.reset(library_.open_device(device));
  if (!context_) return verbs_error(ErrorCode::kRefused, "open", "ibv_open_device", errno);
  if (const int error = library_.query_device(context_.get(), &limits_); error != 0) {
    return verbs_error(ErrorCode::kSystem, "open", "ibv_query_device", error);
  }
  if (Status chosen = choose_port(); !chosen) return chosen;
  if (Status read = read_gids(); !read) return read;
  if (Status chosen = choose_pkey(); !chosen) return chosen;
  return make_domains();
}

Status Device::choose_port() {
  if (spec_.port != 0) return usable_port(spec_.port);
  std::string reasons;
  for (uint8_t number = 1; number <= limits_.phys_port_cnt; ++number) {
    Status usable = usable_port(number);
    if (usable.ok()) {
      spec_.port = number;
      return {};
    }
    reasons += (reasons.empty() ? "" : ", ") + usable.error().message;
  }
  return verbs_error(ErrorCode::kRefused, "open", reasons.empty() ? "has no port" : reasons);
}

Status Device::usable_port(uint8_t number) {
  port_ = {};
  if (const int error = library_.query_port(context_.get(), number, &port_); error != 0) {
    return verbs_error(ErrorCode::kRefused, "open", "port " + std::to_string(number), error);
  }
  if (port_.state != abi::IBV_PORT_ACTIVE) {
    return verbs_error(ErrorCode::kRefused, "open",
                       "port " + std::to_string(number) + " is not active (is its cable in, its interface up?)");
  }
  return {};
}

Status Device::read_gids() {
  for (uint32_t index = 0; std::cmp_less(index, port_.gid_tbl_len); ++index) {
    abi::ibv_gid_entry entry{};
    // Empty entries of the table are reported as errors.
    if (library_.query_gid_ex(context_.get(), spec_.port, index, &entry, 0, sizeof(entry)) != 0) continue;
    GidEntry& added = gids_.emplace_back(GidEntry{index, entry.gid_type, {}});
    std::copy(std::begin(entry.gid.raw), std::end(entry.gid.raw), added.gid.begin());
  }
  const GidEntry* const gid = gid_for(nullptr);
  if (gid == nullptr) {
    return verbs_error(ErrorCode::kRefused, "open",
                       spec_.gid_index ? "its GID table has nothing at index " + std::to_string(*spec_.gid_index)
                                       : "its GID table is empty (has its interface an address?)");
  }
  address_ = address_with(gid);
  return {};
}

const GidEntry* Device::gid_for(const Address* peer) const noexcept {
  if (!spec_.gid_index) {
    // On InfiniBand, the first entry has the port's subnet.
    if (port_.link_layer == abi::IBV_LINK_LAYER_INFINIBAND) return gids_.empty() ? nullptr : gids_.data();
    return choose_gid(gids_, peer);
  }
  const auto found =
      std::find_if(gids_.begin(), gids_.end(), [&](const GidEntry& entry) { return entry.index == *spec_.gid_index; });
  if (found == gids_.end()) return nullptr;
  return peer == nullptr ? &*found : choose_gid({*found}, peer) != nullptr ? &*found : nullptr;
}

Address Device::address_with(const GidEntry* gid) const noexcept {
  return Address{.link_layer = port_.link_layer,
                 .mtu = static_cast<uint8_t>(port_.active_mtu),
                 .gid_type = static_cast<uint8_t>(gid->type),
                 .lid = port_.lid,
                 .gid = gid->gid};
}

Status Device::choose_pkey() {
  for (uint16_t index = 0; index < port_.pkey_tbl_len; ++index) {
    uint16_t raw = 0;
    if (library_.query_pkey(context_.get(), spec_.port, index, &raw) != 0) continue;
    const uint16_t pkey = big_endian(raw);
    // The highest bit marks a full member. Limited members cannot communicate with each other.
    if (spec_.pkey ? pkey == *spec_.pkey : (pkey & 0x8000) != 0) {
      spec_.pkey = pkey;
      pkey_index_ = index;
      return {};
    }
  }
  return verbs_error(ErrorCode::kRefused, "open",
                     spec_.pkey ? "the configured pkey is not in its table" : "no full-member pkey in its table");
}

Status Device::make_domains() {
  pd_.reset(library_.alloc_pd(context_.get()));
  if (!pd_) return verbs_error(ErrorCode::kResources, "open", "ibv_alloc_pd", errno);
  const abi::verbs_context* const more = extended(context_.get());
  if (more == nullptr || more->alloc_td == nullptr || more->alloc_parent_domain == nullptr) return {};
  abi::ibv_td_init_attr none{};
  td_ = owned(more->alloc_td(context_.get(), &none), more->dealloc_td);
  if (!td_) return {};  // this device has no thread domains (rxe, for one)
  abi::ibv_parent_domain_init_attr attr{};
  attr.pd = pd_.get();
  attr.td = td_.get();
  parent_.reset(more->alloc_parent_domain(context_.get(), &attr));
  return {};
}

// --- Addresses

uint64_t Device::bits_per_second() const noexcept {
  // The speed of one lane in units of 100 Mb/s after coding, by the code of the InfiniBand specification; 0: unknown.
  const auto lane = [](uint8_t speed) -> uint64_t {
    switch (speed) {
      case 1:
        return 20;
      case 2:
        return 40;
      case 4:
        return 80;
      case 8:
        return 100;
      case 16:
        return 140;
      case 32:
        return 250;
      case 64:
        return 500;
      case 128:
        return 1000;
      default:
        return 0;
    }
  };
  const auto lanes = [](uint8_t width) -> uint64_t {
    switch (width) {
      case 1:
        return 1;
      case 2:
        return 4;
      case 4:
        return 8;
      case 8:
        return 12;
      case 16:
        return 2;
      default:
        return 0;
    }
  };
  return lane(port_.active_speed) * lanes(port_.active_width) * 100'000'000ULL;
}

std::string Device::description() const {
  const std::string port = spec_.name + ":" + std::to_string(spec_.port);
  if (address_.link_layer == abi::IBV_LINK_LAYER_INFINIBAND) {
    return port + " InfiniBand lid " + std::to_string(address_.lid);
  }
  return port + " " + gid_type_name(address_.gid_type) + " " + to_string(address_.gid) + " (gid " +
         std::to_string(gid_for(nullptr)->index) + ")";
}

Result<Address> Device::address_for(const Address& peer) const {
  if (peer.link_layer != address_.link_layer) {
    return verbs_error(ErrorCode::kNotReachable, "accept", "one of the two ports is InfiniBand, the other Ethernet");
  }
  if (peer.link_layer == abi::IBV_LINK_LAYER_INFINIBAND) return address_;
  const GidEntry* const gid = gid_for(&peer);
  if (gid == nullptr) {
    return verbs_error(ErrorCode::kNotReachable, "accept",
                       spec_.name + " has no " + gid_type_name(peer.gid_type) +
                           " address of the same kind as the peer's " + to_string(peer.gid));
  }
  return address_with(gid);
}

Result<Path> Device::path_to(const Address& peer) const {
  Result<Address> ours = address_for(peer);
  if (!ours) return ours.error();
  Path path;
  path.peer = peer;
  path.mtu = std::min(peer.mtu, ours.value().mtu);
  const GidEntry* const gid = gid_for(peer.link_layer == abi::IBV_LINK_LAYER_INFINIBAND ? nullptr : &peer);
  path.gid_index = gid->index;
  path.global = peer.link_layer == abi::IBV_LINK_LAYER_ETHERNET || !same_subnet(peer.gid, gid->gid);
  return path;
}

}  // namespace kvc::verbs
