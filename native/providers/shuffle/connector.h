// ShuffleConnector: the inner lane's connector under the name of the shuffle lane.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "lane/domain.h"

namespace kvc::shuffle {

// Returns the inner lane's result, with the shuffle lane's name in its error.
template <typename T>
T renamed(T result) {
  if (!result.ok()) result.error().provider = "shuffle";
  return result;
}

class ShuffleConnector final : public Connector {
 public:
  explicit ShuffleConnector(std::unique_ptr<Connector> inner) : inner_(std::move(inner)) {}

  std::string description() const override { return "shuffle over " + inner_->description(); }
  uint64_t bits_per_second() const override { return inner_->bits_per_second(); }
  DomainLimits limits() const override { return inner_->limits(); }
  Result<std::unique_ptr<Registration>> register_memory(const MemoryRange& range) override {
    return renamed(inner_->register_memory(range));
  }
  Result<Bytes> offer(LinkId link) override { return renamed(inner_->offer(link)); }
  Result<Accepted> accept(LinkId link, std::span<const std::byte> offer) override {
    return renamed(inner_->accept(link, offer));
  }
  Result<std::unique_ptr<LinkEnd>> complete(LinkId link, std::span<const std::byte> answer) override {
    return renamed(inner_->complete(link, answer));
  }
  void withdraw(LinkId link) override { inner_->withdraw(link); }
  int fd() const override { return inner_->fd(); }
  void serve() override { inner_->serve(); }

 private:
  const std::unique_ptr<Connector> inner_;
};

}  // namespace kvc::shuffle
