// TransferEngine: peer groups and scatters.
#include <set>
#include <string>
#include <utility>

#include "engine/engine_impl.h"

namespace kvc {

namespace {

Error no_scatter(const char* operation, ScatterId id) {
  return invalid(operation, "no prepared scatter " + std::to_string(id) + ": it was released or never prepared");
}

}  // namespace

Result<PeerGroupId> TransferEngine::add_peer_group(const std::vector<PeerId>& members) {
  auto group = std::make_shared<PeerGroup>();
  for (const PeerId id : members) {
    Result<std::shared_ptr<Peer>> peer = impl_->find_connected(id, "add_peer_group");
    if (!peer) return peer.error();
    group->members.push_back(std::move(peer.value()));
  }
  if (group->members.empty()) return invalid("add_peer_group", "the group has no members: name at least one peer");
  if (std::set<PeerId>(members.begin(), members.end()).size() != members.size()) {
    return invalid("add_peer_group", "a peer is named twice: name each member once");
  }
  const PeerGroupId id = impl_->group_ids.next();
  impl_->peer_groups.insert(id, std::move(group));
  return id;
}

Status TransferEngine::remove_peer_group(PeerGroupId group) {
  if (impl_->peer_groups.erase(group)) return {};
  return invalid("remove_peer_group", "no peer group " + std::to_string(group) + ": it was removed or never added");
}

Result<std::shared_ptr<PeerGroup>> TransferEngine::Impl::find_group(PeerGroupId id, const char* operation) const {
  std::shared_ptr<PeerGroup> found = peer_groups.find(id);
  if (found == nullptr) {
    return invalid(operation, "no peer group " + std::to_string(id) + ": it was removed or never added");
  }
  return found;
}

Result<std::shared_ptr<Scatter>> TransferEngine::Impl::make_scatter(PeerGroupId group_id,
                                                                    const std::vector<PreparedSlice>& slices,
                                                                    EventCallback callback, const char* operation) {
  const Result<std::shared_ptr<PeerGroup>> found = find_group(group_id, operation);
  if (!found) return found.error();
  const std::vector<std::shared_ptr<Peer>>& members = found.value()->members;
  std::vector<Scatter::Slice> prepared;
  prepared.reserve(slices.size());
  uint32_t member = 0;
  for (size_t i = 0; i < slices.size(); ++i) {
    const PreparedSlice& slice = slices[i];
    if (slice.member >= members.size() || slice.member < member) {
      return invalid(operation, "slice " + std::to_string(i) + " is for member " + std::to_string(slice.member) +
                                    ": give members below " + std::to_string(members.size()) + ", in rising order");
    }
    member = slice.member;
    const Peer& peer = *members[member];
    Scatter::Slice& made = prepared.emplace_back(
        Scatter::Slice{{}, {}, member, slice.source_offset, slice.target_offset, slice.bytes, slice.immediate});
    if (slice.bytes == 0) continue;
    made.source = regions.find(slice.source);
    made.target = remote_regions.find(slice.target);
    if (made.source == nullptr) {
      return unknown_region(
          operation, "no local region " + std::to_string(slice.source) + ": it was deregistered or never registered");
    }
    // The regions of a fenced peer are forgotten with it, which makes it that member's failure. Otherwise the caller is
    // wrong.
    if (made.target == nullptr && peer.state.load(std::memory_order_acquire) == Peer::State::kConnected) {
      return unknown_region(operation, "no imported region " + std::to_string(slice.target) +
                                           ": it was never imported, or its peer was fenced");
    }
    if (made.target != nullptr && made.target->peer != peer.id) {
      return invalid(operation, "region " + std::to_string(slice.target) + " belongs to another peer than member " +
                                    std::to_string(member) + " (" + peer.name + ")");
    }
    if (!fits(slice.source_offset, slice.bytes, made.source->bytes) ||
        (made.target != nullptr && !fits(slice.target_offset, slice.bytes, made.target->bytes))) {
      return Error{ErrorCode::kOutOfRange,
                   {},
                   peer.name,
                   operation,
                   std::to_string(slice.bytes) + " bytes from source offset " + std::to_string(slice.source_offset) +
                       " to target offset " + std::to_string(slice.target_offset) + " lie outside a region"};
    }
  }
  const ScatterId id = scatter_ids.next();
  auto scatter = std::make_shared<Scatter>(id, members, std::move(prepared), std::move(callback),
                                           [this, id] { scatters.erase(id); });
  scatters.insert(id, scatter);
  return scatter;
}

Result<TransferId> TransferEngine::Impl::submit(const std::shared_ptr<Scatter>& scatter,
                                                std::span<const ScatterUpdate> updates) {
  const TransferId id = transfer_ids.next();
  ScatterRun* const run = scatter->take(id);
  if (run == nullptr) {
    if (scatter->released()) return no_scatter("submit_scatter", scatter->id());
    return Error{ErrorCode::kResources,
                 {},
                 {},
                 "submit_scatter",
                 "too many submissions of this scatter are in flight: wait for the end of one of them"};
  }
  run->fill(updates);
  transfer_thread.submit<StartScatter>(run);
  return id;
}

Result<TransferId> TransferEngine::Impl::submit_once(const Result<std::shared_ptr<Scatter>>& scatter,
                                                     std::span<const ScatterUpdate> updates) {
  if (!scatter) return scatter.error();
  const Result<TransferId> submitted = submit(scatter.value(), updates);
  scatter.value()->release();
  return submitted;
}

Result<ScatterId> TransferEngine::prepare_scatter(PeerGroupId group, const std::vector<PreparedSlice>& slices,
                                                  EventCallback callback) {
  const Result<std::shared_ptr<Scatter>> made =
      impl_->make_scatter(group, slices, std::move(callback), "prepare_scatter");
  if (!made) return made.error();
  return made.value()->id();
}

Result<TransferId> TransferEngine::submit_scatter(ScatterId id, std::span<const ScatterUpdate> updates) {
  const std::shared_ptr<Scatter> scatter = impl_->scatters.find(id);
  if (scatter == nullptr) return no_scatter("submit_scatter", id);
  if (std::optional<Error> wrong = scatter->check(updates)) return *std::move(wrong);
  return impl_->submit(scatter, updates);
}

Status TransferEngine::release_scatter(ScatterId id) {
  const std::shared_ptr<Scatter> scatter = impl_->scatters.find(id);
  if (scatter != nullptr && scatter->release()) return {};
  return no_scatter("release_scatter", id);
}

Result<TransferId> TransferEngine::scatter(PeerGroupId group, RegionId source, const std::vector<ScatterSlice>& slices,
                                           EventCallback callback) {
  std::vector<PreparedSlice> prepared;
  std::vector<ScatterUpdate> updates;
  for (uint32_t i = 0; i < slices.size(); ++i) {
    const ScatterSlice& slice = slices[i];
    prepared.push_back(
        {i, source, slice.source_offset, slice.target, slice.target_offset, slice.bytes, slice.immediate});
    updates.push_back({.bytes = slice.bytes});
  }
  if (Status status = impl_->check_members(group, slices.size(), "scatter"); !status) return status.error();
  return impl_->submit_once(impl_->make_scatter(group, prepared, std::move(callback), "scatter"), updates);
}

Result<TransferId> TransferEngine::barrier(PeerGroupId group, const std::vector<uint32_t>& immediates,
                                           EventCallback callback) {
  std::vector<PreparedSlice> prepared;
  prepared.reserve(immediates.size());
  for (uint32_t i = 0; i < immediates.size(); ++i) prepared.push_back({.member = i, .immediate = immediates[i]});
  if (Status status = impl_->check_members(group, immediates.size(), "barrier"); !status) return status.error();
  return impl_->submit_once(impl_->make_scatter(group, prepared, std::move(callback), "barrier"),
                            std::vector<ScatterUpdate>(immediates.size()));
}

Status TransferEngine::Impl::check_members(PeerGroupId id, size_t given, const char* operation) const {
  const Result<std::shared_ptr<PeerGroup>> found = find_group(id, operation);
  if (!found) return found.error();
  if (found.value()->members.size() == given) return {};
  return invalid(operation, std::to_string(given) + " given for a group of " +
                                std::to_string(found.value()->members.size()) +
                                " members: give one for each, in their order");
}

}  // namespace kvc
