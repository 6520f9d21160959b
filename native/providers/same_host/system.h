// The system calls of the lanes of one machine: sealed shared memory, and sockets that carry descriptors. Any thread;
// nothing here blocks but the end of a large mapping. Errors name no provider: Lane::named() does.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/unique_fd.h"
#include "providers/same_host/wire.h"

namespace kvc::same_host {

// `what` failed with `error_number`.
Error kernel_error(std::string_view operation, std::string_view what, int error_number);

// --- Memory

// A mapping that unmaps itself: tens of GiB that were touched take seconds, so a domain leaves it to the control thread.
class Mapping {
 public:
  Mapping() = default;
  Mapping(std::byte* data, size_t bytes) noexcept : data_(data), bytes_(bytes) {}
  Mapping(Mapping&& other) noexcept { *this = std::move(other); }
  Mapping& operator=(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  std::byte* data() const noexcept { return data_; }
  size_t size() const noexcept { return bytes_; }
  explicit operator bool() const noexcept { return data_ != nullptr; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

// A memfd of ours, mapped writable here and of fixed size for ever.
struct SealedMemory {
  UniqueFd fd;
  Mapping mapping;
};
enum class Others : uint8_t { kWrite, kRead };  // what peers may do with it
Result<SealedMemory> create_sealed_memory(const char* name, size_t bytes, Others others);

// Forbids that the caller's memfd shrinks, and checks that [offset, offset+bytes) lies in it.
Status seal_against_shrinking(int memfd, uint64_t offset, uint64_t bytes);

// Maps `bytes` of a peer's memfd. Refuses one that is smaller or could shrink: touching it would be SIGBUS.
Result<Mapping> map_peer_memory(int memfd, uint64_t bytes, Others access);

// --- Sockets (SOCK_SEQPACKET, close-on-exec, non-blocking)

// Peers that may dial before the first of them is let in; the kernel's own limit, net.core.somaxconn, is the same. To let
// them all in takes 20 ms.
constexpr int kMaxDials = 4096;

// Listens on the abstract name: no file that a killed process leaves behind, no directory that two containers must
// share. It lives in the network namespace: containers that share that (a pod, --network host) find each other.
Result<UniqueFd> listen_on(std::string_view name);
// kNotReachable if nobody listens there.
Result<UniqueFd> connect_to(std::string_view name);

// Who is at the other end: for a connecting socket the process that listens. `pid` is 0 where that process lies
// outside our pid namespace.
struct PeerProcess {
  pid_t pid = 0;
  uid_t uid = 0;
};
Result<PeerProcess> peer_process(int socket);

constexpr size_t kMaxDescriptors = 2;  // of one message

enum class Sent : uint8_t { kYes, kLater, kBroken };
Sent send_message(int socket, const Message& message, std::span<const int> descriptors);

enum class Received : uint8_t {
  kMessage,
  kNothing,   // not now
  kClosed,    // the peer has closed its end, or is gone
  kMalformed  // not one of ours
};
Received receive_message(int socket, Message& message, std::array<UniqueFd, kMaxDescriptors>& descriptors);

}  // namespace kvc::same_host
