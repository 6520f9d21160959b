#include "engine/domain_proxy.h"

#include <algorithm>
#include <utility>

namespace kvc {

// --- The side of the scheduling thread

void DomainProxy::ask(Request request) {
  request.after = passage_->batches.puts();
  passage_->requests.push(std::make_unique<Request>(std::move(request)));
  wake_();
}

DomainProxy::~DomainProxy() { close_(); }

void DomainProxy::publish(Registration& region) {
  publishing_.insert(&region);
  ask({.kind = Request::Kind::kPublish, .region = &region});
}

bool DomainProxy::withdraw(Registration& region) {
  if (withdrawing_.try_emplace(&region, false).second) ask({.kind = Request::Kind::kWithdraw, .region = &region});
  listen();
  const auto asked = withdrawing_.find(&region);
  if (!asked->second) return false;
  withdrawing_.erase(asked);
  return true;
}

void DomainProxy::attach(LinkId link, std::unique_ptr<LinkEnd> end) {
  links_.try_emplace(link);
  ask({.kind = Request::Kind::kAttach, .link = link, .end = std::move(end)});
}

bool DomainProxy::fence(LinkId link) {
  const auto found = links_.find(link);
  if (found == links_.end()) return true;
  if (!std::exchange(found->second.fencing, true)) ask({.kind = Request::Kind::kFence, .link = link});
  listen();
  return !links_.contains(link);
}

bool DomainProxy::has_room(LinkId link) {
  return passage_->busy_of(link).load(std::memory_order_seq_cst) == 0 && passage_->batches.vacant() != nullptr;
}

Posted DomainProxy::post(LinkId link, const WriteBatch& batch) {
  if (!has_room(link)) {
    // The flag is set first, then the room is checked again: either there is room now, or the other thread sees the
    // flag.
    passage_->refused.store(true, std::memory_order_seq_cst);
    refused_ = !has_room(link);
    if (refused_) return Posted::kBusy;
  }
  DomainPassage::Batch& slot = *passage_->batches.vacant();
  slot.link = link;
  slot.write = batch;
  std::copy(batch.pages.begin(), batch.pages.end(), slot.pages.begin());
  passage_->batches.put();
  wake_();
  return Posted::kYes;
}

Posted DomainProxy::send(LinkId link, WorkId work, std::span<const std::byte> message) {
  if (const auto found = links_.find(link); found != links_.end()) {
    if (found->second.messages >= kMessageSlots) return Posted::kBusy;
    ++found->second.messages;
    messages_.emplace(work, link);
  }
  ask({.kind = Request::Kind::kSend, .link = link, .value = work, .message = Bytes(message.begin(), message.end())});
  return Posted::kYes;
}

void DomainProxy::take(LinkId link, uint32_t slot) { ask({.kind = Request::Kind::kTake, .link = link, .value = slot}); }

bool DomainProxy::room_again() {
  if (!refused_ || passage_->refused.load(std::memory_order_seq_cst)) return false;
  refused_ = false;
  return true;
}

bool DomainProxy::poll() {
  if (std::exchange(announced_, false)) passage_->scheduler->awake();
  const bool heard = listen();
  return room_again() || heard;
}

bool DomainProxy::prepare_sleep() {
  announced_ = true;
  passage_->scheduler->announce_sleep();
  return passage_->told.ready() == passage_->told.taken() && !room_again();
}

bool DomainProxy::listen() {
  const uint64_t until = passage_->told.ready();
  const bool any = passage_->told.taken() != until;
  while (passage_->told.taken() != until) {
    hear(passage_->told.front());
    passage_->told.pop();
  }
  return any;
}

void DomainProxy::hear(DomainPassage::Told& told) {
  switch (told.kind) {
    case DomainPassage::Told::Kind::kFenced:
      links_.erase(told.link);
      return;
    case DomainPassage::Told::Kind::kPublished:
      publishing_.erase(told.region);
      return;
    case DomainPassage::Told::Kind::kWithdrawn:
      withdrawing_[told.region] = true;
      return;
    case DomainPassage::Told::Kind::kCompletion:
      if (told.completion.kind == Completion::Kind::kWork && !messages_.empty()) {
        if (const auto node = messages_.extract(told.completion.work()); !node.empty())
          --links_[node.mapped()].messages;
      }
      return completions_.put(std::move(told.completion));
  }
}

// --- The side of the domain's thread

DrivenDomain::~DrivenDomain() {
  // Links that were never attached go to the domain, which knows where to end them.
  passage_->requests.drain([this](std::unique_ptr<Request> request) {
    if (request->kind == Request::Kind::kAttach) domain_->attach(request->link, std::move(request->end));
  });
}

bool DrivenDomain::turn() {
  const uint64_t told = passage_->told.puts();
  // Read before the requests, so that the link of each batch is attached before the batch is posted.
  const uint64_t until = passage_->batches.ready();
  bool any = passage_->requests.drain([this](std::unique_ptr<Request> request) { begin(std::move(request)); });
  any |= post_until(until);
  any |= retry();
  any |= std::erase_if(steps_, [this](const auto& request) { return step(*request); }) > 0;
  if (untold_.empty()) any |= domain_->poll();
  any |= tell_completions();
  // Also counts events that are not new: events for which the ring had no room, and events of an unfinished fence.
  any |= passage_->told.puts() != told;
  if (any) passage_->scheduler->wake();
  return any;
}

bool DrivenDomain::prepare_sleep() {
  return passage_->requests.empty() && passage_->batches.ready() == passage_->batches.taken() && untold_.empty() &&
         domain_->completions().empty() && domain_->prepare_sleep();
}

void DrivenDomain::begin(std::unique_ptr<Request> request) {
  switch (request->kind) {
    case Request::Kind::kPublish:
      domain_->publish(*request->region);
      return tell({.kind = DomainPassage::Told::Kind::kPublished, .completion = {}, .region = request->region});
    case Request::Kind::kAttach:
      return domain_->attach(request->link, std::move(request->end));
    case Request::Kind::kTake:
      return domain_->take(request->link, static_cast<uint32_t>(request->value));
    case Request::Kind::kSend:
      if (domain_->send(request->link, request->value, request->message) == Posted::kBusy) {
        waiting_[request->link].messages.push_back(std::move(request));
      }
      return;
    case Request::Kind::kWithdraw:
    case Request::Kind::kFence:
      steps_.push_back(std::move(request));
      return;
  }
}

bool DrivenDomain::post_until(uint64_t until) {
  const bool any = passage_->batches.taken() < until;
  while (passage_->batches.taken() < until) {
    Batch& batch = passage_->batches.front();
    const auto found = waiting_.find(batch.link);
    const bool others = found != waiting_.end() && !found->second.batches.empty();
    if (others || !post(batch)) {
      std::deque<Batch>& waiting = waiting_[batch.link].batches;
      if (waiting.empty()) passage_->busy_of(batch.link).fetch_add(1, std::memory_order_seq_cst);
      waiting.push_back(batch);
    }
    passage_->batches.pop();
  }
  if (any) passage_->refused.store(false, std::memory_order_seq_cst);
  return any;
}

bool DrivenDomain::post(Batch& batch) {
  batch.write.pages = std::span(batch.pages).first(batch.write.pages.size());
  return domain_->post(batch.link, batch.write) == Posted::kYes;
}

bool DrivenDomain::retry() {
  bool any = false;
  for (auto entry = waiting_.begin(); entry != waiting_.end();) {
    auto& [link, waiting] = *entry;
    while (!waiting.messages.empty()) {
      const Request& oldest = *waiting.messages.front();
      if (domain_->send(link, oldest.value, oldest.message) == Posted::kBusy) break;
      waiting.messages.pop_front();
      any = true;
    }
    const bool batches = !waiting.batches.empty();
    while (!waiting.batches.empty() && post(waiting.batches.front())) {
      waiting.batches.pop_front();
      any = true;
    }
    if (batches && waiting.batches.empty()) {
      passage_->busy_of(link).fetch_sub(1, std::memory_order_seq_cst);
      passage_->refused.store(false, std::memory_order_seq_cst);
    }
    entry = waiting.batches.empty() && waiting.messages.empty() ? waiting_.erase(entry) : std::next(entry);
  }
  return any;
}

bool DrivenDomain::step(Request& request) {
  post_until(request.after);
  if (request.kind == Request::Kind::kFence) {
    drop(request.link);
    const bool fenced = domain_->fence(request.link);
    tell_completions();
    if (fenced) tell({.kind = DomainPassage::Told::Kind::kFenced, .completion = {}, .link = request.link});
    return fenced;
  }
  const bool waits = std::any_of(waiting_.begin(), waiting_.end(), [&](const auto& entry) {
    return std::any_of(entry.second.batches.begin(), entry.second.batches.end(),
                       [&](const Batch& batch) { return batch.write.source == request.region; });
  });
  if (waits || !domain_->withdraw(*request.region)) return false;
  tell({.kind = DomainPassage::Told::Kind::kWithdrawn, .completion = {}, .region = request.region});
  return true;
}

// Fails the work that waits for room on a link that is being fenced.
void DrivenDomain::drop(LinkId link) {
  const auto node = waiting_.extract(link);
  if (node.empty()) return;
  const Error fenced{ErrorCode::kPeerDown, {}, {}, "write", "the link was fenced on this side"};
  for (const auto& message : node.mapped().messages) domain_->completions().failed(message->value, fenced);
  for (const Batch& batch : node.mapped().batches) domain_->completions().failed(batch.write.work, fenced);
  if (!node.mapped().batches.empty()) passage_->busy_of(link).fetch_sub(1, std::memory_order_seq_cst);
}

bool DrivenDomain::tell_completions() {
  while (!untold_.empty()) {
    DomainPassage::Told* const slot = passage_->told.vacant();
    if (slot == nullptr) break;
    *slot = std::move(untold_.front());
    untold_.pop_front();
    passage_->told.put();
  }
  return domain_->completions().drain([this](Completion& completion) { tell({.completion = std::move(completion)}); });
}

void DrivenDomain::tell(DomainPassage::Told told) {
  DomainPassage::Told* const slot = untold_.empty() ? passage_->told.vacant() : nullptr;
  if (slot == nullptr) return untold_.push_back(std::move(told));
  *slot = std::move(told);
  passage_->told.put();
}

}  // namespace kvc
