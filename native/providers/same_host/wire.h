// The bytes that two domains of one machine exchange, whatever their lane: the messages on their socket, and the
// handshake. channel.h has the words in shared memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <type_traits>

#include "base/random.h"
#include "lane/domain.h"

namespace kvc::same_host {

enum class MessageKind : uint32_t {
  kNone,     // never sent
  kHello,    // acceptor to offerer, first: `secret`; descriptors: segment, board of the acceptor
  kWelcome,  // offerer to acceptor, the answer; descriptor: board of the offerer
  // host: a memfd with regions. `memory` is its name from now on, `bytes` its size; descriptor: the memfd.
  // nvlink: the next piece of the region that the sender's board has at `memory`, of key `key`. `bytes` is its size;
  // descriptor: the piece. No descriptor and 0 bytes: the owner failed to export a piece, and no other piece follows.
  kMemory,
  kForget,  // `memory` backs no region any more
  kWake,    // look at the rings: the receiver of this message was asleep
};

// One packet on the link's socket, with the descriptors that its kind names.
struct Message {
  MessageKind kind = MessageKind::kNone;
  uint32_t memory = 0;
  uint64_t bytes = 0;
  Secret secret{};
  uint64_t key = 0;
};
static_assert(std::is_trivially_copyable_v<Message> && sizeof(Message) == 40);

// The beginning of each lane's offer. The handshake travels in native byte order: a process that can use it runs under
// the same kernel.
struct Invitation {
  uint32_t magic = 0;
  uint32_t version = 0;
  std::array<char, 36> boot_id{};  // /proc/sys/kernel/random/boot_id, which identifies the running kernel
  std::array<char, 28> socket{};   // the abstract name of the listening socket, filled with zeros
  Secret secret{};                 // valid for one connection
};
static_assert(std::is_trivially_copyable_v<Invitation> && sizeof(Invitation) == 88);

template <typename T>
Bytes to_bytes(const T& value) {
  const auto* first = reinterpret_cast<const std::byte*>(&value);
  return Bytes(first, first + sizeof(value));
}

// Returns the bytes of a peer as a T, or nothing if the length or the magic is wrong.
template <typename T>
std::optional<T> from_bytes(std::span<const std::byte> bytes, uint32_t magic) {
  T value;
  if (bytes.size() != sizeof(value)) return std::nullopt;
  std::memcpy(&value, bytes.data(), sizeof(value));
  return value.magic == magic ? std::optional(value) : std::nullopt;
}

}  // namespace kvc::same_host
