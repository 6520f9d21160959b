#include "providers/host/connector.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "base/process.h"
#include "base/random.h"
#include "cuda/gpu_memory.h"
#include "providers/host/remote_write.h"

namespace kvc::host {

using same_host::Connection;
using same_host::to_bytes;

Status HostConnector::open() {
  probe_word_ = random_key();
  return rendezvous_.open();
}

std::string HostConnector::description() const { return "host pid " + std::to_string(getpid()); }

// --- Memory

Result<std::unique_ptr<Registration>> HostConnector::register_memory(const MemoryRange& range) {
  if (Status possible = keys_.check(); !possible) return possible.error();
  if (Status possible = cuda::refuse_gpu_memory(kLane.name, range.base); !possible) return possible.error();
  if (range.memfd < 0 && probe().private_regions == 0) allow_peers_to_write();
  Result<std::shared_ptr<Memory>> memory = range.memfd < 0 ? private_memory_ : share(range);
  if (!memory) return kLane.named(memory.error());
  return std::unique_ptr<Registration>(std::make_unique<Region>(range, keys_, std::move(memory.value())));
}

// Returns the Memory of the memfd behind `range`, new or known. Errors name no provider.
Result<std::shared_ptr<Memory>> HostConnector::share(const MemoryRange& range) {
  if (Status sealed = same_host::seal_against_shrinking(range.memfd, range.memfd_offset, range.bytes); !sealed) {
    return sealed.error();
  }
  struct stat status{};
  if (fstat(range.memfd, &status) != 0) {
    return same_host::kernel_error("register_memory", "fstat of the memfd", errno);
  }
  const auto bytes = static_cast<uint64_t>(status.st_size);
  std::erase_if(memfds_, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<Memory>& known = memfds_[{status.st_dev, status.st_ino}];
  std::shared_ptr<Memory> memory = known.lock();
  if (memory != nullptr && memory->bytes == bytes) return memory;  // otherwise the memfd has grown
  UniqueFd fd(fcntl(range.memfd, F_DUPFD_CLOEXEC, 0));
  if (!fd) return same_host::kernel_error("register_memory", "dup of the memfd", errno);
  known = memory = std::make_shared<Memory>(Memory{std::move(fd), bytes});
  return memory;
}

// --- Links

Probe HostConnector::probe() const noexcept {
  const bool private_regions = private_memory_.use_count() > 1;
  return {.address = reinterpret_cast<uint64_t>(&probe_word_),
          .value = probe_word_,
          .pid_namespace = own_namespace("pid"),
          .user_namespace = own_namespace("user"),
          .mount_namespace = own_namespace("mnt"),
          .private_regions = private_regions ? 1U : 0U};
}

Result<Bytes> HostConnector::offer(LinkId link) {
  const Result<same_host::Invitation> invitation = rendezvous_.invite(link);
  if (!invitation) return invitation.error();
  return to_bytes(Offer{invitation.value(), probe()});
}

Result<Connector::Accepted> HostConnector::accept(LinkId, std::span<const std::byte> bytes) {
  const Result<Offer> offer = rendezvous_.read_offer<Offer>(bytes);
  if (!offer) return offer.error();
  Result<same_host::PeerSocket> peer = rendezvous_.dial(offer.value());
  if (!peer) return peer.error();
  if (Status allowed = try_probe("accept", peer.value().pid, offer.value().probe); !allowed) return allowed.error();
  if (Status back = check_way_back(peer.value().pid, offer.value().probe, probe()); !back) return back.error();
  Result<std::unique_ptr<Connection>> connection = rendezvous_.say_hello(std::move(peer.value()), offer.value().secret);
  if (!connection) return connection.error();
  Answer answer;
  answer.probe = probe();
  return Accepted{to_bytes(answer), std::move(connection.value())};
}

Result<std::unique_ptr<LinkEnd>> HostConnector::complete(LinkId link, std::span<const std::byte> bytes) {
  const Result<Answer> answer = kLane.read_answer<Answer>(bytes);
  if (!answer) {
    withdraw(link);
    return answer.error();
  }
  Result<std::unique_ptr<Connection>> connection = rendezvous_.admit(link);
  if (!connection) return connection.error();
  if (Status allowed = try_probe("complete", connection.value()->pid(), answer.value().probe); !allowed) {
    return allowed.error();
  }
  return std::unique_ptr<LinkEnd>(std::move(connection.value()));
}

}  // namespace kvc::host
