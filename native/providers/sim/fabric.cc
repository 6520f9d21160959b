#include "providers/sim/fabric.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/random.h"

namespace kvc::sim {

void Inbox::wake() {
  signalled_ = true;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(fd_.get(), &one, sizeof(one));
}

void Inbox::take(std::vector<Message>& messages) {
  const std::lock_guard lock(mutex_);
  sleeping_ = false;
  if (signalled_) {
    signalled_ = false;
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = read(fd_.get(), &count, sizeof(count));
  }
  messages_.swap(messages);
}

bool Inbox::prepare_sleep() {
  const std::lock_guard lock(mutex_);
  sleeping_ = messages_.empty();
  return sleeping_;
}

void Inbox::close() {
  std::vector<Message> untaken;  // destroyed after the lock is released: the last message may end this inbox
  const std::lock_guard lock(mutex_);
  closed_ = true;
  untaken = std::exchange(messages_, {});
}

std::shared_ptr<Fabric> Fabric::get(const std::string& name) {
  static std::mutex mutex;
  static std::map<std::string, std::weak_ptr<Fabric>> fabrics;
  const std::lock_guard lock(mutex);
  std::shared_ptr<Fabric> fabric = fabrics[name].lock();
  if (fabric == nullptr) fabrics[name] = fabric = std::make_shared<Fabric>();
  return fabric;
}

Fabric::Fabric() : token_(random_key()) {}

void Fabric::publish(uint64_t secret, std::shared_ptr<Gate> gate) {
  const std::lock_guard lock(mutex_);
  offered_.emplace(secret, std::move(gate));
}

std::shared_ptr<Gate> Fabric::take(uint64_t secret) {
  const std::lock_guard lock(mutex_);
  const auto found = offered_.find(secret);
  if (found == offered_.end()) return nullptr;
  std::shared_ptr<Gate> gate = std::move(found->second);
  offered_.erase(found);
  return gate;
}

std::shared_ptr<Nic> Fabric::nic(const std::string& device) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<Nic>& nic = nics_[device];
  if (nic == nullptr) {
    nic = std::make_shared<Nic>();
    nic->device = device;
  }
  return nic;
}

bool Fabric::join(const std::shared_ptr<Gate>& gate) {
  const std::lock_guard lock(mutex_);
  for (const auto& nic : gate->nic) {
    if (!nic->up.load()) return false;
  }
  for (const auto& nic : gate->nic) {
    std::erase_if(nic->gates, [](const auto& other) { return other.expired(); });
    nic->gates.push_back(gate);
  }
  return true;
}

void Fabric::cut(Nic& nic) {
  std::vector<std::weak_ptr<Gate>> gates;
  {
    const std::lock_guard lock(mutex_);
    nic.up.store(false);
    nic.pages_to_cut.store(0);
    gates = std::exchange(nic.gates, {});
  }
  for (const std::weak_ptr<Gate>& weak : gates) {
    const std::shared_ptr<Gate> gate = weak.lock();
    if (gate == nullptr) continue;
    {
      const std::lock_guard lock(gate->mutex);
      if (!gate->open) continue;
      gate->open = false;
      gate->cut.store(true);
    }
    // Both sides of the gate were set before join().
    for (size_t side = 0; side < 2; ++side) gate->inbox[side]->put(LinkClosed{gate->link[side]});
  }
}

void Fabric::close(Gate& gate, int side) {
  const auto other = static_cast<size_t>(1 - side);
  std::shared_ptr<Inbox> inbox;
  LinkId link = 0;
  {
    const std::lock_guard lock(gate.mutex);
    if (!std::exchange(gate.open, false)) return;
    inbox = gate.inbox[other];
    link = gate.link[other];
  }
  if (inbox != nullptr) inbox->put(LinkClosed{link});
}

void Fabric::carried(Nic& nic, uint32_t pages) {
  int64_t left = nic.pages_to_cut.load(std::memory_order_relaxed);
  while (left > 0 && !nic.pages_to_cut.compare_exchange_weak(left, std::max<int64_t>(left - pages, 0))) {
  }
  if (left > 0 && left <= pages) cut(nic);
}

}  // namespace kvc::sim
