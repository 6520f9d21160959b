// LibfabricDomain: one device, its regions, and the links to peers. No thread of its own and no blocking call:
// everything happens in poll(). (Providers that make progress by themselves have a thread; none of it is ours.)
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/domain.h"
#include "engine/unique_fd.h"
#include "providers/libfabric/device.h"
#include "providers/libfabric/link.h"

namespace kvc::libfabric {

class LibfabricDomain final : public Domain {
 public:
  static Result<std::unique_ptr<LibfabricDomain>> open(const DomainConfig& config, DomainSink& sink,
                                                       const Tuning& tuning = {});
  ~LibfabricDomain() override;

  std::string description() const override;
  uint64_t bits_per_second() const override { return device_->bits_per_second(); }
  Result<uint64_t> register_region(std::byte* base, uint64_t bytes, int memfd, uint64_t memfd_offset) override;
  bool deregister_region(uint64_t rkey) override;
  Result<Bytes> offer(LinkId id) override;
  Result<Bytes> accept(LinkId id, std::span<const std::byte> offer) override;
  Status complete(LinkId id, std::span<const std::byte> answer) override;
  bool fence(LinkId id) override;
  Posted post(LinkId id, const WriteBatch& batch) override;
  Posted send(LinkId id, WorkId work, std::span<const std::byte> message) override;
  bool poll() override;
  int fd() const override { return epoll_.get(); }
  bool prepare_sleep() override;

 private:
  LibfabricDomain(std::unique_ptr<Device> device, DomainSink& sink, const Tuning& tuning)
      : device_(std::move(device)), shared_{.sink = sink, .device = *device_, .tuning = tuning} {}
  Status start();

  Link* find(LinkId id) noexcept;
  Result<Link*> make_link(LinkId id, uint64_t secret);
  // Whether this device leads to the peer's: kRefused or kNotReachable if not.
  Status check(std::string_view operation, const Card& peer) const;
  // Takes the link out and closes it; it is freed by the next poll().
  void remove(LinkId id, const Error& error);
  void watch(int fd);
  void unwatch(int fd);
  bool poll_links();
  void look_after();

  std::unique_ptr<Device> device_;
  Shared shared_;
  UniqueFd epoll_;
  UniqueFd timer_;
  std::map<LinkId, std::unique_ptr<Link>> links_;
  std::vector<std::unique_ptr<Link>> closed_;
  LinkId next_ = 0;     // the link that the next poll() begins with
  bool slept_ = false;  // since the last poll()
  Clock::time_point last_look_;
  Clock::time_point idle_since_;  // nothing has happened since
};

}  // namespace kvc::libfabric
