// Offers: how two engines come to their first link, on the control thread.
//
// One link is offered for each lane: the acceptor takes the first lane that leads here, and of its domains one that works.
// The other links of a peer are made over this one, when there is use for them (LinkKeeper).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/lanes.h"
#include "engine/transfer_engine.h"
#include "lane/domain.h"

namespace kvc {

// Unique in the process, never reused. Any thread.
LinkId next_link_id();

// A first link, ready to be its domain's.
struct FirstLink {
  Lane* lane = nullptr;
  uint32_t local_domain = 0;    // places in the lane,
  uint32_t remote_domain = 0;   // here and there
  uint32_t remote_domains = 0;  // how many the peer has in this lane
  LinkId id = 0;
  std::unique_ptr<LinkEnd> end;
};

class Offers {
 public:
  Offers(const EngineConfig& config, Lanes& lanes) : config_(config), lanes_(lanes) {}

  // The bytes for the peer. The offer stays open until complete() or withdraw(). `without`: providers to leave out, where
  // kNotReachable says that no other is configured.
  Result<Bytes> make(PeerId peer, std::span<const std::string> without);

  struct Accepted {
    FirstLink link;
    std::string offerer;  // what it calls itself
    Bytes answer;
    std::vector<std::string> passed_over;
  };
  // `name`: what the peer is called in errors; empty: as it calls itself.
  Result<Accepted> accept(const std::string& name, std::span<const std::byte> offer);

  // Uses the offer up, whatever comes of it.
  Result<FirstLink> complete(PeerId peer, std::span<const std::byte> answer);
  // Idempotent.
  void withdraw(PeerId peer);

 private:
  struct OfferedLink {
    Lane* lane = nullptr;
    uint32_t local_domain = 0;
    LinkId id = 0;
  };
  Result<OfferedLink> offer_link(Lane& lane, Bytes& bytes);

  const EngineConfig& config_;
  Lanes& lanes_;
  std::unordered_map<PeerId, std::vector<OfferedLink>> offers_;
};

}  // namespace kvc
