// LinkContext: the state that the links of one domain share.
#pragma once

#include "lane/control_queue.h"
#include "providers/verbs/completions.h"
#include "providers/verbs/domain_resources.h"
#include "providers/verbs/remainder.h"
#include "providers/verbs/send_queue.h"
#include "providers/verbs/write_chain.h"

namespace kvc::verbs {

// Used on the domain's thread only.
struct LinkContext {
  LinkContext(DomainResources& its_resources, ControlQueue& its_control)
      : resources(its_resources), control(its_control), completions(its_resources), credits(its_resources.credits) {}

  DomainResources& resources;
  ControlQueue& control;
  Completions completions;
  Credits credits;
  WriteChain chain{};
  Remainder posting{};  // the batch that is being posted
};

}  // namespace kvc::verbs
