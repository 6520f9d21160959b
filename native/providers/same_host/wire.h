// What two domains of one machine say to each other whatever their lane: the messages on their socket, and the bytes of
// a handshake. channel.h has the words in shared memory.
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
  kMemory,   // host: a memfd that regions lie in: `memory` is its name from now on, `bytes` its size; descriptor: it
             // nvlink: the next piece of the region's memory that its board has at `memory`, of key `key`: `bytes` its
             // size; descriptor: it. None and 0 bytes: its owner has failed to get one, and no other piece follows
  kForget,   // `memory` backs no region any more
  kWake,     // look at your rings: you were asleep
};

// One packet on the link's socket, with the descriptors that its kind says.
struct Message {
  MessageKind kind = MessageKind::kNone;
  uint32_t memory = 0;
  uint64_t bytes = 0;
  Secret secret{};
  uint64_t key = 0;
};
static_assert(std::is_trivially_copyable_v<Message> && sizeof(Message) == 40);

// What each lane's offer begins with. The handshake travels in native byte order: whoever reads it with sense runs
// under the same kernel.
struct Invitation {
  uint32_t magic = 0;
  uint32_t version = 0;
  std::array<char, 36> boot_id{};  // /proc/sys/kernel/random/boot_id: which running kernel
  std::array<char, 28> socket{};   // the abstract name of the listening socket, zero-filled
  Secret secret{};                 // good for one connection
};
static_assert(std::is_trivially_copyable_v<Invitation> && sizeof(Invitation) == 88);

template <typename T>
Bytes to_bytes(const T& value) {
  const auto* first = reinterpret_cast<const std::byte*>(&value);
  return Bytes(first, first + sizeof(value));
}

// The bytes of a peer as a T, if they are one by length and mark.
template <typename T>
std::optional<T> from_bytes(std::span<const std::byte> bytes, uint32_t magic) {
  T value;
  if (bytes.size() != sizeof(value)) return std::nullopt;
  std::memcpy(&value, bytes.data(), sizeof(value));
  return value.magic == magic ? std::optional(value) : std::nullopt;
}

}  // namespace kvc::same_host
