#include "providers/tcp/link.h"

#include <algorithm>
#include <utility>

namespace kvc::tcp {

Link::Link(LinkContext& context, LinkId id, uint16_t connections)
    : Watched(Kind::kArrivals), context_(context), id_(id) {
  for (uint16_t index = 0; index < connections; ++index) {
    connections_.push_back(std::make_unique<Connection>(context, *this, index));
  }
}

bool Link::up() const noexcept {
  return std::all_of(connections_.begin(), connections_.end(), [](const auto& connection) { return connection->up(); });
}

bool Link::ended() const noexcept {
  return std::all_of(connections_.begin(), connections_.end(),
                     [](const auto& connection) { return connection->ended(); });
}

Status Link::begin(TcpLinkEnd& end) {
  for (Dialled& dialled : end.dialled) {
    if (Status begun = connections_[dialled.hello.index]->dial(std::move(dialled)); !begun) return begun;
  }
  if (end.arrivals == nullptr) return {};
  arrivals_ = std::move(end.arrivals);
  return context_.epoll.add(arrivals_->fd(), EPOLLIN, *this);
}

Status Link::admit() {
  if (arrivals_ == nullptr) return {};  // released since the event was fetched
  for (Arrivals::Arrival& arrival : arrivals_->take()) {
    if (arrival.index >= connections_.size()) {  // arrived before the answer, which named fewer connections
      hang_up(arrival.socket);
      continue;
    }
    if (Status adopted = connections_[arrival.index]->adopt(std::move(arrival.socket)); !adopted) return adopted;
  }
  const bool all = std::none_of(connections_.begin(), connections_.end(),
                                [](const auto& connection) { return connection->vacant(); });
  if (all) refuse_arrivals();
  return {};
}

void Link::refuse_arrivals() {
  if (arrivals_ != nullptr) context_.epoll.remove(arrivals_->fd());
  arrivals_.reset();
}

Connection& Link::least_loaded() const noexcept {
  const auto least = std::min_element(
      connections_.begin(), connections_.end(),
      [](const auto& left, const auto& right) { return left->queued_bytes() < right->queued_bytes(); });
  return **least;
}

Posted Link::post(const WriteBatch& batch) { return least_loaded().post(batch) ? Posted::kYes : Posted::kBusy; }

Posted Link::send(WorkId work, std::span<const std::byte> message) {
  const std::optional<uint32_t> slot = messages_.put(work);
  if (!slot) return Posted::kBusy;
  least_loaded().send(*slot, message);
  return Posted::kYes;
}

void Link::take(uint32_t slot) {
  if (Connection* const bearer = std::exchange(bearers_[slot], nullptr); bearer != nullptr) bearer->take(slot);
}

bool Link::put(uint32_t slot, Connection& bearer) {
  if (bearers_[slot] != nullptr) return false;
  bearers_[slot] = &bearer;
  return true;
}

void Link::taken(uint32_t slot) {
  if (const std::optional<WorkId> work = messages_.take(slot)) context_.completions.done(*work);
}

void Link::part() {
  refuse_arrivals();
  for (const auto& connection : connections_) {
    if (connection->up()) {
      connection->part();
    } else {
      connection->end();
    }
  }
}

void Link::end(const Error& error) {
  refuse_arrivals();
  const Error& why = failure ? *failure : error;
  for (const auto& connection : connections_) connection->end();
  for (const auto& connection : connections_) connection->complete_all(why);
  messages_.clear([&](WorkId work) { context_.completions.failed(work, why); });
}

}  // namespace kvc::tcp
