#include "providers/host/domain.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <utility>

#include "cuda/gpu_memory.h"
#include "providers/host/remote_write.h"

namespace kvc::host {

using same_host::Connection;
using same_host::from_bytes;
using same_host::to_bytes;

HostDomain::~HostDomain() = default;

Status HostDomain::open() {
  if (Status opened = rendezvous_.open(); !opened) return opened;
  sleep_.attach(board().sleep);
  if (Status random = same_host::fill_random(std::as_writable_bytes(std::span(&probe_word_, 1))); !random) {
    return kLane.named(random.error());
  }
  probe_word_ |= 1;
  return {};
}

std::string HostDomain::description() const { return "host pid " + std::to_string(getpid()); }

// --- Memory

Result<uint64_t> HostDomain::register_region(std::byte* base, uint64_t bytes, int memfd, uint64_t memfd_offset) {
  if (Status possible = keys_.check(base, bytes); !possible) return possible.error();
  if (Status possible = cuda::refuse_gpu_memory(kLane.name, base); !possible) return possible.error();
  Result<uint64_t> taken = keys_.take();
  if (!taken) return taken;
  const uint64_t rkey = taken.value();

  uint32_t memory = 0;
  if (memfd >= 0) {
    Result<uint32_t> shared = share(memfd, memfd_offset, bytes);
    if (!shared) {
      keys_.give_back(rkey);
      return kLane.named(shared.error());
    }
    memory = shared.value();
  } else if (private_regions_++ == 0) {
    allow_peers_to_write();
  }

  RegionEntry& entry = board().regions[keys_.place(rkey)];
  entry.base.store(reinterpret_cast<uint64_t>(base), std::memory_order_relaxed);
  entry.length.store(bytes, std::memory_order_relaxed);
  entry.memory.store(memory, std::memory_order_relaxed);
  entry.memory_offset.store(memfd_offset, std::memory_order_relaxed);
  entry.rkey.store(rkey, std::memory_order_release);
  regions_[rkey].memory = memory;
  return rkey;
}

// The number of the memfd that a region lies in, new or known; peers learn of a new one before anybody learns of a key
// in it. Errors name no provider.
Result<uint32_t> HostDomain::share(int memfd, uint64_t offset, uint64_t bytes_of_region) {
  if (Status sealed = same_host::seal_against_shrinking(memfd, offset, bytes_of_region); !sealed) return sealed.error();
  struct stat status{};
  if (fstat(memfd, &status) != 0) return same_host::kernel_error("register_region", "fstat of the memfd", errno);
  const auto bytes = static_cast<uint64_t>(status.st_size);
  for (auto& [name, memory] : memories_) {
    if (memory.device == status.st_dev && memory.inode == status.st_ino && memory.bytes == bytes) {
      ++memory.regions;
      return name;
    }
  }
  UniqueFd fd(fcntl(memfd, F_DUPFD_CLOEXEC, 0));
  if (!fd) return same_host::kernel_error("register_region", "dup of the memfd", errno);
  const uint32_t name = ++last_memory_;
  const Memory& memory =
      memories_.emplace(name, Memory{std::move(fd), status.st_dev, status.st_ino, bytes, 1}).first->second;
  for (auto& [id, link] : links_) {
    if (link->attached()) link->send(Message{MessageKind::kMemory, name, memory.bytes}, {memory.fd.get()});
  }
  return name;
}

void HostDomain::unshare(uint32_t memory) {
  const auto found = memories_.find(memory);
  if (--found->second.regions > 0) return;
  memories_.erase(found);
  for (auto& [id, link] : links_) {
    if (link->attached()) link->send(Message{MessageKind::kForget, memory});
  }
}

void HostDomain::send_memories(Link& link) {
  for (const auto& [name, memory] : memories_) {
    link.send(Message{MessageKind::kMemory, name, memory.bytes}, {memory.fd.get()});
  }
}

bool HostDomain::deregister_region(uint64_t rkey) {
  const auto found = regions_.find(rkey);
  if (found == regions_.end()) return true;
  Region& region = found->second;
  if (!region.revoked) {
    region.revoked = true;
    board().regions[keys_.place(rkey)].rkey.store(0, std::memory_order_seq_cst);
    for (const auto& [id, link] : links_) {
      if (const uint64_t gate = link->gate(); gate % 2 != 0) region.inside.emplace_back(id, gate);
    }
  }
  std::erase_if(region.inside, [this](const auto& entry) {
    const Link* link = find(entry.first);
    return link == nullptr || link->left_gate(entry.second);
  });
  if (!region.inside.empty()) return false;
  if (region.memory != 0) {
    unshare(region.memory);
  } else {
    --private_regions_;
  }
  regions_.erase(found);
  keys_.give_back(rkey);
  return true;
}

// --- Links

Probe HostDomain::probe() const noexcept {
  return {reinterpret_cast<uint64_t>(&probe_word_), probe_word_, private_regions_ > 0 ? 1U : 0U};
}

Link* HostDomain::find(LinkId link) noexcept {
  const auto found = links_.find(link);
  return found == links_.end() ? nullptr : found->second.get();
}

Result<Bytes> HostDomain::offer(LinkId link) {
  if (find(link) != nullptr) return kLane.error(ErrorCode::kInvalidArgument, "offer", "this link exists");
  const Result<same_host::Invitation> invitation = rendezvous_.invite();
  if (!invitation) return invitation.error();
  auto created = std::make_unique<Link>(link, sink_, rendezvous_.epoll());
  created->connection().expect(invitation.value().secret);
  links_.emplace(link, std::move(created));
  return to_bytes(Offer{invitation.value(), probe()});
}

Result<Bytes> HostDomain::accept(LinkId id, std::span<const std::byte> bytes) {
  constexpr std::string_view kOperation = "accept";
  if (find(id) != nullptr) return kLane.error(ErrorCode::kInvalidArgument, kOperation, "this link exists");
  const std::optional<Offer> offer = from_bytes<Offer>(bytes, kMagic);
  if (!offer) return kLane.error(ErrorCode::kInvalidArgument, kOperation, "malformed offer");
  if (Status fits = rendezvous_.check(*offer); !fits) return fits.error();
  Result<same_host::PeerSocket> peer = rendezvous_.dial(*offer);
  if (!peer) return peer.error();
  if (offer->probe.private_regions != 0) {
    if (Status allowed = try_probe(kOperation, peer.value().pid, offer->probe); !allowed) return allowed.error();
  }

  Result<same_host::Mapping> segment = rendezvous_.say_hello(peer.value(), offer->secret);
  if (!segment) return segment.error();
  auto link = std::make_unique<Link>(id, sink_, rendezvous_.epoll());
  if (Status attached = link->attach(std::move(peer.value()), std::move(segment.value()), Connection::Role::kAcceptor);
      !attached) {
    return attached.error();
  }
  send_memories(*link);
  links_.emplace(id, std::move(link));
  Answer answer;
  answer.probe = probe();
  return to_bytes(answer);
}

Status HostDomain::complete(LinkId id, std::span<const std::byte> bytes) {
  constexpr std::string_view kOperation = "complete";
  Link* link = find(id);
  if (link == nullptr) return kLane.error(ErrorCode::kInvalidArgument, kOperation, "no such offer");
  const std::optional<Answer> answer = from_bytes<Answer>(bytes, kMagic);
  if (!answer) return kLane.error(ErrorCode::kInvalidArgument, kOperation, "malformed answer");
  if (Status fits = kLane.check_version(kOperation, answer->version); !fits) return fits;
  if (!link->attached()) rendezvous_.hear_all();
  if (!link->attached() || link->closed()) {
    return kLane.error(ErrorCode::kPeerDown, kOperation, "the peer answered, but its connection is gone");
  }
  return answer->probe.private_regions != 0 ? try_probe(kOperation, link->connection().pid(), answer->probe) : Status{};
}

bool HostDomain::fence(LinkId id) {
  Link* link = find(id);
  if (link == nullptr) return true;
  link->close(kLane.error(ErrorCode::kPeerDown, "fence", "the link was fenced on this side"));
  return link->fenced();
}

// Makes the newcomer the peer of the link whose secret it knows, if there is one.
void HostDomain::welcome(same_host::Newcomer newcomer) {
  const auto found = std::find_if(links_.begin(), links_.end(), [&newcomer](const auto& entry) {
    return entry.second->connection().admit(newcomer.secret);
  });
  if (found == links_.end()) return;
  Link& link = *found->second;
  if (Status attached = link.attach(std::move(newcomer.peer), std::move(newcomer.segment), Connection::Role::kOfferer);
      !attached) {
    link.close(attached.error());
    return;
  }
  link.connection().meet(std::move(newcomer.board));
  link.send(Message{MessageKind::kWelcome}, {rendezvous_.board_fd()});
  send_memories(link);
  link.service();  // the peer's memory is announced behind its hello
}

// --- Data path

Posted HostDomain::post(LinkId id, const WriteBatch& batch) {
  if (Link* link = find(id)) return link->post(batch);
  const Error error = kLane.error(ErrorCode::kPeerDown, "post", "no such link, or it was fenced");
  sink_.on_complete(batch.work, &error);
  return Posted::kYes;
}

Posted HostDomain::send(LinkId id, WorkId work, std::span<const std::byte> message) {
  Error error;
  if (message.empty() || message.size() > kMaxMessageBytes) {
    error = kLane.error(ErrorCode::kInvalidArgument, "send",
                        "a message has 1 to " + std::to_string(kMaxMessageBytes) + " bytes");
  } else if (Link* link = find(id)) {
    return link->post_message(work, message);
  } else {
    error = kLane.error(ErrorCode::kPeerDown, "send", "no such link, or it was fenced");
  }
  sink_.on_complete(work, &error);
  return Posted::kYes;
}

bool HostDomain::poll() {
  reap();
  sleep_.end();

  bool happened = false;
  for (const auto& [id, link] : links_) happened |= link->receive();

  // One chunk in all, beginning behind the link that was served last, so that everyone has a turn.
  uint64_t spent = 0;
  auto next = links_.upper_bound(last_served_);
  for (size_t i = links_.size(); i > 0 && spent < kChunkBytes; --i, ++next) {
    if (next == links_.end()) next = links_.begin();
    if (const uint64_t bytes = next->second->progress(kChunkBytes - spent); bytes > 0) {
      spent += bytes;
      last_served_ = next->first;
    }
  }
  happened |= spent > 0;

  if (sleep_.look_due(happened)) {
    happened |= rendezvous_.serve([this](LinkId id, bool process) { on_event(id, process); });
  }
  return happened;
}

void HostDomain::on_event(LinkId id, bool process) {
  Link* link = find(id);
  if (link == nullptr) return;
  if (process) {
    link->process_ended();
  } else {
    link->service();
  }
}

bool HostDomain::prepare_sleep() {
  sleep_.announce();
  if (std::none_of(links_.begin(), links_.end(), [](const auto& entry) { return entry.second->has_work(); })) {
    return true;
  }
  sleep_.end();
  return false;
}

// Forgets links that are through. Not where they end: that may be in the middle of their own work.
void HostDomain::reap() {
  std::erase_if(links_, [](const auto& entry) { return entry.second->closed() && entry.second->fenced(); });
}

}  // namespace kvc::host
