#include "engine/offers.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include "engine/handshake.h"

namespace kvc {

namespace {

std::string join(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

}  // namespace

LinkId next_link_id() {
  static std::atomic<LinkId> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

// Offers a link over the first domain of the lane that works, so that a dead domain does not block the others.
Result<Offers::OfferedLink> Offers::offer_link(Lane& lane, Bytes& bytes) {
  std::optional<Error> why;
  for (uint32_t local = 0; local < lane.domains.size(); ++local) {
    const LinkId id = next_link_id();
    Result<Bytes> offered = lane.domains[local].connector->offer(id);
    if (offered) {
      bytes = std::move(offered.value());
      return OfferedLink{&lane, local, id};
    }
    if (!why) why = std::move(offered.error());
  }
  return *std::move(why);
}

Result<Bytes> Offers::make(PeerId peer, std::span<const std::string> without) {
  Offer offer{config_.name, {}};
  std::optional<Error> why;
  for (Lane& lane : lanes_.all()) {
    if (std::find(without.begin(), without.end(), lane.provider) != without.end()) continue;
    Bytes bytes;
    Result<OfferedLink> link = offer_link(lane, bytes);
    if (!link) {
      if (!why) why = std::move(link.error());
      if (config_.allow_fallback) continue;
      withdraw(peer);
      return *std::move(why);
    }
    offers_[peer].push_back(link.value());
    offer.lanes.push_back(
        {lane.provider, static_cast<uint32_t>(lane.domains.size()), link.value().local_domain, std::move(bytes)});
  }
  if (offer.lanes.empty() && !why) {
    why = Error{ErrorCode::kNotReachable,
                {},
                {},
                "offer",
                "no other lane is configured here: add a provider that reaches the peer"};
  }
  if (offer.lanes.empty()) return *std::move(why);
  return encode(offer);
}

Result<Offers::Accepted> Offers::accept(const std::string& name, std::span<const std::byte> bytes) {
  const std::optional<Offer> offer = decode_offer(bytes);
  if (!offer) {
    Error error = invalid("accept", "the bytes are not an offer of this version: run one release on both sides");
    error.peer = name;
    return error;
  }
  const std::string peer = name.empty() ? offer->engine : name;
  std::vector<std::string> passed_over;
  std::vector<std::string> offered;
  for (const LaneOffer& lane_offer : offer->lanes) {
    offered.push_back(lane_offer.provider);
    Lane* const lane = lanes_.find(lane_offer.provider);
    if (lane == nullptr) {
      passed_over.push_back(lane_offer.provider + ": not configured here");
      continue;
    }
    const auto count = static_cast<uint32_t>(lane->domains.size());
    std::optional<Error> why;
    // The domain opposite the offered one, or otherwise any domain that works.
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t local = (lane_offer.domain + i) % count;
      const LinkId id = next_link_id();
      Result<Connector::Accepted> accepted = lane->domains[local].connector->accept(id, lane_offer.link);
      if (!accepted) {
        if (!why) why = std::move(accepted.error());
        continue;
      }
      return Accepted{{lane, local, lane_offer.domain, lane_offer.domains, id, std::move(accepted.value().end)},
                      offer->engine,
                      encode(Answer{config_.name, lane->provider, count, local, std::move(accepted.value().answer)}),
                      std::move(passed_over)};
    }
    why->peer = peer;
    if (why->code != ErrorCode::kNotReachable && !config_.allow_fallback) return *std::move(why);
    passed_over.push_back(lane_offer.provider + ": " + why->to_string());
  }
  std::vector<std::string> configured;
  for (const Lane& lane : lanes_.all()) configured.push_back(lane.provider);
  return Error{ErrorCode::kNotReachable,
               {},
               peer,
               "accept",
               "no common lane: the peer offers " + join(offered) + "; configured here: " + join(configured) +
                   (passed_over.empty() ? "" : " (" + join(passed_over) + ")")};
}

Result<FirstLink> Offers::complete(PeerId peer, std::span<const std::byte> bytes) {
  constexpr const char* kOperation = "complete";
  const auto open = offers_.find(peer);
  if (open == offers_.end()) return invalid(kOperation, "this peer has no open offer: it was completed or withdrawn");
  std::vector<OfferedLink> links = std::move(open->second);
  offers_.erase(open);
  const auto drop = [&links] {
    for (const OfferedLink& link : links) link.lane->domains[link.local_domain].connector->withdraw(link.id);
  };
  const std::optional<Answer> answer = decode_answer(bytes);
  const auto found = !answer ? links.end() : std::find_if(links.begin(), links.end(), [&](const OfferedLink& link) {
    return link.lane->provider == answer->provider;
  });
  if (found == links.end()) {
    drop();
    return invalid(kOperation, answer ? "the answer names a lane that was not offered: " + answer->provider
                                      : "the bytes are not an answer of this version: run one release on both sides");
  }
  const OfferedLink link = *found;
  links.erase(found);
  Result<std::unique_ptr<LinkEnd>> end =
      link.lane->domains[link.local_domain].connector->complete(link.id, answer->link);
  drop();
  if (!end) return end.error();
  return FirstLink{link.lane, link.local_domain, answer->domain, answer->domains, link.id, std::move(end.value())};
}

void Offers::withdraw(PeerId peer) {
  const auto node = offers_.extract(peer);
  if (node.empty()) return;
  for (const OfferedLink& link : node.mapped()) link.lane->domains[link.local_domain].connector->withdraw(link.id);
}

}  // namespace kvc
