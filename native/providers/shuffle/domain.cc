#include "providers/shuffle/domain.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>

#include "lane/immediate.h"

namespace kvc::shuffle {
namespace {

// The most batches without a completion. 64 batches of 64 pages are enough to mix, and few enough that tests reach
// kBusy.
constexpr size_t kMaxBatches = 64;
// The most pieces posted and immediates reported in one poll(). Each takes 0.2 us.
constexpr int kPiecesPerPoll = 256;
// Time after which a piece is offered again if the inner domain had no room.
constexpr std::chrono::microseconds kBusyPause{20};

}  // namespace

Result<std::unique_ptr<ShuffleDomain>> ShuffleDomain::open(const DomainConfig& config, std::unique_ptr<Domain> inner) {
  std::unique_ptr<ShuffleDomain> domain(new ShuffleDomain(config, std::move(inner)));
  Result<TimerFd> timer = TimerFd::create("shuffle");
  if (!timer) return timer.error();
  domain->timer_ = std::move(timer.value());
  domain->epoll_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
  if (!domain->epoll_) return system_error("shuffle", "open", errno);
  for (const int fd : {domain->timer_.fd(), domain->inner_->fd()}) {
    epoll_event readable{.events = EPOLLIN, .data = {.fd = fd}};
    if (::epoll_ctl(domain->epoll_.get(), EPOLL_CTL_ADD, fd, &readable) != 0) {
      return system_error("shuffle", "epoll_ctl", errno);
    }
  }
  return domain;
}

bool ShuffleDomain::fence(LinkId link) {
  drop_all(link, Error{ErrorCode::kPeerDown, "shuffle", {}, "write", "the link was fenced on this side"});
  const bool fenced = inner_->fence(link);
  listen();
  if (fenced) tell_all(link);  // includes what the inner domain reported last
  return fenced;
}

// --- Out

ShuffleDomain::Due ShuffleDomain::draw() {
  const auto delay = std::chrono::microseconds(random_() % (uint64_t{max_delay_us_} + 1));
  return {Clock::now() + delay, random_()};
}

uint64_t ShuffleDomain::own(Work work) {
  const uint64_t owner = next_id_++;
  if (!work.message) ++batches_;
  works_.emplace(owner, std::move(work));
  return owner;
}

Posted ShuffleDomain::post(LinkId link, const WriteBatch& batch) {
  if (batches_ >= kMaxBatches) return Posted::kBusy;
  // An immediate alone is not split: it has no pages to wait for.
  const bool whole = batch.page_bytes == 0;
  const uint64_t owner = own({link, batch.work, whole ? 1 : batch.pages.size()});
  if (whole) {
    // The pages themselves are not used. The immediate contains their number.
    pieces_.emplace(draw(), HeldPage{owner, link, batch, {}, {}});
    return Posted::kYes;
  }
  for (const PageWrite& page : batch.pages) {
    HeldPage piece{owner, link, batch, page, {}};
    if (batch.counted) piece.batch.immediate = Immediate::with_multiplicity(batch.immediate, 1);
    pieces_.emplace(draw(), std::move(piece));
  }
  return Posted::kYes;
}

Posted ShuffleDomain::send(LinkId link, WorkId work, std::span<const std::byte> message) {
  const auto untaken = std::count_if(works_.begin(), works_.end(), [link](const auto& entry) {
    return entry.second.message && entry.second.link == link;
  });
  if (untaken >= kMessageSlots) return Posted::kBusy;
  HeldPage piece{own({link, work, 1, true}), link, {}, {}, Bytes(message.begin(), message.end())};
  pieces_.emplace(draw(), std::move(piece));
  return Posted::kYes;
}

bool ShuffleDomain::post_due(Clock::time_point now) {
  bool any = false;
  for (int i = 0; i < kPiecesPerPoll && !pieces_.empty() && pieces_.begin()->first.first <= now; ++i) {
    auto node = pieces_.extract(pieces_.begin());
    HeldPage& piece = node.mapped();
    const WorkId id = next_id_++;
    Posted posted = Posted::kYes;
    if (piece.message.empty()) {
      // The multiplicity of an immediate alone is the number of its pages.
      const std::vector<PageWrite> pages(
          piece.batch.page_bytes == 0 ? Immediate::decode(piece.batch.immediate).multiplicity : 1, piece.page);
      piece.batch.work = id;
      piece.batch.pages = pages;
      posted = inner_->post(piece.link, piece.batch);
    } else {
      posted = inner_->send(piece.link, id, piece.message);
    }
    if (posted == Posted::kYes) {
      posted_.emplace(id, piece.owner);
      any = true;
      continue;
    }
    node.key().first = now + kBusyPause;
    pieces_.insert(std::move(node));
  }
  return any;
}

void ShuffleDomain::end_piece(uint64_t owner, const Error* error) {
  const auto found = works_.find(owner);
  if (found == works_.end()) return;
  Work& work = found->second;
  if (error != nullptr && !work.error) {
    work.error = *error;
    work.error->provider = "shuffle";
  }
  if (--work.left > 0) return;
  const Work ended = std::move(work);
  works_.erase(found);
  if (!ended.message) --batches_;
  if (ended.error) {
    completions_.failed(ended.work, *ended.error);
  } else {
    completions_.done(ended.work);
  }
}

void ShuffleDomain::drop_all(LinkId link, const Error& error) {
  std::vector<uint64_t> owners;
  std::erase_if(pieces_, [&](const auto& entry) {
    if (entry.second.link != link) return false;
    owners.push_back(entry.second.owner);
    return true;
  });
  for (const uint64_t owner : owners) end_piece(owner, &error);
}

// --- In

bool ShuffleDomain::listen() {
  return inner_->completions().drain([this](Completion& completion) { hear(completion); });
}

void ShuffleDomain::hear(Completion& completion) {
  switch (completion.kind) {
    case Completion::Kind::kWork: {
      const auto node = posted_.extract(completion.work());
      if (!node.empty()) end_piece(node.mapped(), completion.error());
      return;
    }
    case Completion::Kind::kImmediate:
      landed_.emplace(draw(), Landed{completion.link, completion.immediate()});
      return;
    case Completion::Kind::kMessage:
      return completions_.put(std::move(completion));  // its sender has shuffled it
    case Completion::Kind::kLinkDown:
      completion.detail->error.provider = "shuffle";
      drop_all(completion.link, completion.detail->error);
      tell_all(completion.link);
      return completions_.put(std::move(completion));
  }
}

bool ShuffleDomain::tell_due(Clock::time_point now) {
  bool any = false;
  for (int i = 0; i < kPiecesPerPoll && !landed_.empty() && landed_.begin()->first.first <= now; ++i) {
    const Landed landed = landed_.extract(landed_.begin()).mapped();
    completions_.immediate(landed.link, landed.immediate);
    any = true;
  }
  return any;
}

void ShuffleDomain::tell_all(LinkId link) {
  std::vector<uint32_t> immediates;
  std::erase_if(landed_, [&](const auto& entry) {
    if (entry.second.link != link) return false;
    immediates.push_back(entry.second.immediate);
    return true;
  });
  for (const uint32_t immediate : immediates) completions_.immediate(link, immediate);
}

// --- The thread's turn

bool ShuffleDomain::poll() {
  const Clock::time_point now = Clock::now();
  bool any = post_due(now);
  any |= inner_->poll();
  any |= listen();
  any |= tell_due(now);
  return any;
}

bool ShuffleDomain::prepare_sleep() {
  std::optional<Clock::time_point> due;
  if (!pieces_.empty()) due = pieces_.begin()->first.first;
  if (!landed_.empty() && (!due || landed_.begin()->first.first < *due)) due = landed_.begin()->first.first;
  if (due && *due <= Clock::now()) return false;
  timer_.arm(due);
  return inner_->prepare_sleep() && inner_->completions().empty();
}

}  // namespace kvc::shuffle
