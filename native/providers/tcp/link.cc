#include "providers/tcp/link.h"

#include <algorithm>

namespace kvc::tcp {

Link::Link(Shared& shared, LinkId id, uint16_t connections) : id_(id) {
  for (uint16_t index = 0; index < connections; ++index) {
    connections_.push_back(std::make_unique<Connection>(shared, *this, index));
  }
}

bool Link::up() const noexcept {
  return std::all_of(connections_.begin(), connections_.end(), [](const auto& connection) { return connection->up(); });
}

void Link::expect(const Secret& dialer, const Secret& listener) {
  dialer_ = dialer;
  listener_ = listener;
  offered_ = true;
}

void Link::limit(uint16_t connections) { connections_.resize(connections); }

Connection* Link::admit(const Hello& hello) noexcept {
  const bool proved = offered_ && hello.secret.equals(dialer_);
  if (!proved || hello.index >= connections_.size() || !connections_[hello.index]->vacant()) return nullptr;
  return connections_[hello.index].get();
}

Welcome Link::welcome(uint16_t index) const noexcept {
  Welcome welcome;
  welcome.index = index;
  welcome.secret = listener_;
  return welcome;
}

Connection& Link::least_loaded() const noexcept {
  const auto least = std::min_element(
      connections_.begin(), connections_.end(),
      [](const auto& left, const auto& right) { return left->queued_bytes() < right->queued_bytes(); });
  return **least;
}

Posted Link::post(const WriteBatch& batch) { return least_loaded().post(batch) ? Posted::kYes : Posted::kBusy; }

Posted Link::send(WorkId work, std::span<const std::byte> message) {
  if (least_loaded().send(work, message)) return Posted::kYes;
  const bool sent = std::any_of(connections_.begin(), connections_.end(),
                                [&](const auto& connection) { return connection->send(work, message); });
  return sent ? Posted::kYes : Posted::kBusy;
}

void Link::close(const Error& error) {
  for (const auto& connection : connections_) connection->close();
  for (const auto& connection : connections_) connection->complete_all(error);
}

}  // namespace kvc::tcp
