// LinkContext: the state that the links of one domain share.
#pragma once

#include "lane/control_queue.h"
#include "providers/verbs/completions.h"
#include "providers/verbs/queues.h"
#include "providers/verbs/remainder.h"
#include "providers/verbs/send_queue.h"
#include "providers/verbs/write_chain.h"

namespace kvc::verbs {

// Used on the domain's thread only.
struct LinkContext {
  LinkContext(Queues& its_queues, ControlQueue& its_control)
      : queues(its_queues), control(its_control), completions(its_queues), credits(its_queues.credits) {}

  Queues& queues;
  ControlQueue& control;
  Completions completions;
  Credits credits;
  WriteChain chain{};
  Remainder posting{};  // the batch that is being posted
};

}  // namespace kvc::verbs
