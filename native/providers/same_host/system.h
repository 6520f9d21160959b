// The system calls of the same-machine lanes: sealed shared memory, and sockets that carry descriptors. Any thread may
// use them. Nothing here blocks except unmapping a large mapping. Errors name no provider: Lane::named() adds it.
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

// Returns the error of a failed `what` with `error_number`.
Error kernel_error(std::string_view operation, std::string_view what, int error_number);

// --- Memory

// A mapping that unmaps itself. Unmapping tens of GiB that were touched takes seconds, so a domain leaves it to the
// control thread.
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

// A memfd of this process with a fixed size, mapped writable here.
struct SealedMemory {
  UniqueFd fd;
  Mapping mapping;
};
enum class Others : uint8_t { kWrite, kRead };  // the access that peers have
Result<SealedMemory> create_sealed_memory(const char* name, size_t bytes, Others others);

// Seals the caller's memfd against shrinking, and checks that it holds [offset, offset+bytes).
Status seal_against_shrinking(int memfd, uint64_t offset, uint64_t bytes);

// Maps `bytes` of a peer's memfd. Refuses a memfd that is smaller or could shrink: touching it would raise SIGBUS.
Result<Mapping> map_peer_memory(int memfd, uint64_t bytes, Others access);

// --- Sockets (SOCK_SEQPACKET, close-on-exec, non-blocking)

// Dials that may wait to be accepted. The kernel's own limit, net.core.somaxconn, is the same. Accepting all of them
// takes 20 ms.
constexpr int kMaxDials = 4096;

// Listens on the abstract name. Such a name leaves no file behind when a process is killed, and containers need no
// common directory. It belongs to the network namespace: containers that share that namespace (a pod, --network host)
// find each other.
Result<UniqueFd> listen_on(std::string_view name);
// Returns kNotReachable if no process listens there.
Result<UniqueFd> connect_to(std::string_view name);

// The process at the other end; on the connecting side, the process that listens. `pid` is 0 if that process lies
// outside our pid namespace.
struct PeerProcess {
  pid_t pid = 0;
  uid_t uid = 0;
};
Result<PeerProcess> peer_process(int socket);

constexpr size_t kMaxDescriptors = 2;  // per message

enum class Sent : uint8_t { kYes, kLater, kBroken };
Sent send_message(int socket, const Message& message, std::span<const int> descriptors);

enum class Received : uint8_t {
  kMessage,
  kNothing,   // no message is there now
  kClosed,    // the peer has closed its end, or is gone
  kMalformed  // not a message of this protocol
};
Received receive_message(int socket, Message& message, std::array<UniqueFd, kMaxDescriptors>& descriptors);

}  // namespace kvc::same_host
