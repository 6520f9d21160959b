// Links: a domain's links, by their id and by the numbers of their queue pairs.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>

#include "providers/verbs/link.h"

namespace kvc::verbs {

// Used on the domain's thread only.
class Links {
 public:
  Link& add(std::unique_ptr<Link> added) {
    Link& link = *added;
    for (const uint32_t number : link.numbers()) by_number_[number] = &link;
    by_id_.emplace(link.id(), std::move(added));
    return link;
  }
  // Returns null for an unknown link, and once nothing is left of it.
  Link* find(LinkId id) const noexcept {
    const auto found = by_id_.find(id);
    return found == by_id_.end() ? nullptr : found->second.get();
  }
  Link* by_number(uint32_t queue_pair) const noexcept {
    const auto found = by_number_.find(queue_pair);
    return found == by_number_.end() ? nullptr : found->second;
  }
  void erase(const Link& link) {
    for (const uint32_t number : link.numbers()) {
      // A link that is over may stay here longer than its queue pairs exist. Their numbers may belong to another link
      // by now.
      if (by_number(number) == &link) by_number_.erase(number);
    }
    by_id_.erase(link.id());
  }
  // Calls `use(Link&)` for each link.
  template <typename Use>
  void each(Use&& use) const {
    for (const auto& [id, link] : by_id_) use(*link);
  }
  size_t size() const noexcept { return by_id_.size(); }

 private:
  std::unordered_map<LinkId, std::unique_ptr<Link>> by_id_;
  std::unordered_map<uint32_t, Link*> by_number_;
};

}  // namespace kvc::verbs
