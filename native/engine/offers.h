// Offers: how two transfer engines make their first link. Runs on the control thread.
//
// One link is offered for each lane. The acceptor takes the first lane that leads to the offerer, and the first of its
// domains that works. The LinkKeeper makes the other links over this one when they are needed.
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

// Returns an id that is unique in the process and never reused. Any thread.
LinkId next_link_id();

// The first link to a peer, ready for its domain.
struct FirstLink {
  Lane* lane = nullptr;
  uint32_t local_domain = 0;    // index in the lane on this side
  uint32_t remote_domain = 0;   // index in the lane at the peer
  uint32_t remote_domains = 0;  // number of the peer's domains in this lane
  LinkId id = 0;
  std::unique_ptr<LinkEnd> end;
};

class Offers {
 public:
  Offers(const EngineConfig& config, Lanes& lanes) : config_(config), lanes_(lanes) {}

  // Returns the bytes for the peer. The offer stays open until complete() or withdraw(). `without` names providers to
  // leave out. kNotReachable: no other provider is configured.
  Result<Bytes> make(PeerId peer, std::span<const std::string> without);

  struct Accepted {
    FirstLink link;
    std::string offerer;  // the offerer's name for itself
    Bytes answer;
    std::vector<std::string> passed_over;
  };
  // `name` is the peer's name in errors. Empty: the name that the offerer gives itself.
  Result<Accepted> accept(const std::string& name, std::span<const std::byte> offer);

  // Consumes the offer, whatever the outcome.
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
