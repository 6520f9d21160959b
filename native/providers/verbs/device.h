// Device: one opened port of one NIC, with its context, protection domain, address and limits.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "providers/verbs/handle.h"
#include "providers/verbs/library.h"
#include "providers/verbs/wire.h"

namespace kvc::verbs {

// The port to use, and its options: "mlx5_0", "mlx5_0:1", "mlx5_0:1,gid=3,tc=106,sl=3,pkey=0x8001". Options that are
// not given are chosen from the machine's state.
struct DeviceSpec {
  std::string name;                   // empty: the first usable NIC
  uint8_t port = 0;                   // 0: the first active port
  std::optional<uint32_t> gid_index;  // RoCE
  std::optional<uint16_t> pkey;       // empty: the first full-member pkey
  uint8_t traffic_class = 0;          // RoCE: DSCP and ECN bits, as the network's lossless class requires
  uint8_t service_level = 0;          // InfiniBand

  static Result<DeviceSpec> parse(std::string_view text);
};

// An entry of a port's GID table.
struct GidEntry {
  uint32_t index = 0;
  uint32_t type = 0;  // IBV_GID_TYPE_*
  Gid gid{};
};

// Returns the entry to use: RoCE v2 before v1, and within a version IPv4 before IPv6 before link-local addresses. With
// a `peer`, only entries of its type and family can reach it. Null: there is no such entry.
const GidEntry* choose_gid(const std::vector<GidEntry>& entries, const Address* peer = nullptr) noexcept;

// The way from our port to a peer's port.
struct Path {
  Address peer;
  uint32_t gid_index = 0;
  uint8_t mtu = 0;
  bool global = false;  // whether packets have a routing header: always on Ethernet, between subnets on InfiniBand
};

// Immutable once opened.
class Device {
 public:
  // Opens the port that `spec` names, or the first usable one. An error lists each device with the reason against it.
  static Result<std::unique_ptr<Device>> open(const Library& library, const DeviceSpec& spec);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const Library& library() const noexcept { return library_; }
  abi::ibv_context* context() const noexcept { return context_.get(); }
  // Memory regions and shared receive queues belong to shared_pd(). If the device has thread domains, queue pairs
  // belong to a protection domain that is bound to one: its driver takes no locks for posts on them. A shared receive
  // queue needs its lock, because destroying a queue pair on another thread reaches into it (mlx5_free_srq_wqe).
  abi::ibv_pd* shared_pd() const noexcept { return pd_.get(); }
  abi::ibv_pd* queue_pair_pd() const noexcept { return parent_ ? parent_.get() : pd_.get(); }
  const abi::ibv_device_attr& limits() const noexcept { return limits_; }
  const DeviceSpec& spec() const noexcept { return spec_; }  // with the choices filled in
  uint16_t pkey_index() const noexcept { return pkey_index_; }
  uint64_t max_message() const noexcept { return port_.max_msg_sz; }
  uint64_t bits_per_second() const noexcept;
  std::string description() const;  // "rxe0:1 RoCE v2 10.77.0.1 (gid 1)"

  // address() is the port's address for peers in general, address_for() the address for one peer. kNotReachable: the
  // peer's network is of another kind.
  const Address& address() const noexcept { return address_; }
  Result<Address> address_for(const Address& peer) const;
  // Returns the path to this peer from the address that address() or address_for() gave it.
  Result<Path> path_to(const Address& peer) const;

 private:
  explicit Device(const Library& library);
  Status open_context(abi::ibv_device* device);
  Status choose_port();
  Status usable_port(uint8_t number);
  Status read_gids();
  Status choose_pkey();
  Status make_domains();
  const GidEntry* gid_for(const Address* peer) const noexcept;
  Address address_with(const GidEntry* gid) const noexcept;

  const Library& library_;
  DeviceSpec spec_;
  Owned<abi::ibv_context> context_;
  Owned<abi::ibv_pd> pd_;
  Owned<abi::ibv_td> td_;
  Owned<abi::ibv_pd> parent_;  // destroyed before td_ and pd_
  abi::ibv_device_attr limits_{};
  abi::ibv_port_attr port_{};
  uint16_t pkey_index_ = 0;
  std::vector<GidEntry> gids_;
  Address address_;
};

}  // namespace kvc::verbs
