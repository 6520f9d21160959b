#include "providers/shuffle/domain.h"

#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "engine/immediate.h"

namespace kvc::shuffle {
namespace {

// Batches and messages without a completion: 64 batches of 64 pages are enough to mix, and tests meet kBusy.
constexpr size_t kMaxWorks = 64;
// Pieces posted and immediates told in one poll(): 0.2 us each.
constexpr int kPiecesPerPoll = 256;
// A piece that the inner domain has no room for is offered again after this long.
constexpr std::chrono::microseconds kBusyPause{20};

Error shuffle_error(ErrorCode code, const char* operation, const char* message) {
  return Error{code, "shuffle", {}, operation, message};
}

}  // namespace

Result<std::unique_ptr<ShuffleDomain>> ShuffleDomain::open(const DomainConfig& config, DomainSink& sink) {
  std::unique_ptr<ShuffleDomain> domain(new ShuffleDomain(config, sink));
  DomainConfig inner = config;
  const size_t colon = config.device.find(':');
  inner.provider = config.device.empty() ? "tcp" : config.device.substr(0, colon);
  inner.device = colon == std::string::npos ? "" : config.device.substr(colon + 1);
  if (inner.provider == "shuffle") {
    return Error{ErrorCode::kInvalidArgument, "shuffle", {}, "open", "shuffled once is shuffled"};
  }
  Result<std::unique_ptr<Domain>> opened = renamed(open_domain(inner, *domain));
  if (!opened) return opened.error();
  domain->inner_ = std::move(opened.value());
  domain->epoll_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
  domain->timer_ = UniqueFd(::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC));
  if (!domain->epoll_ || !domain->timer_) return system_error("shuffle", "open", errno);
  for (const int fd : {domain->timer_.get(), domain->inner_->fd()}) {
    epoll_event readable{.events = EPOLLIN, .data = {.fd = fd}};
    if (::epoll_ctl(domain->epoll_.get(), EPOLL_CTL_ADD, fd, &readable) != 0) {
      return system_error("shuffle", "epoll_ctl", errno);
    }
  }
  return domain;
}

Result<uint64_t> ShuffleDomain::register_region(std::byte* base, uint64_t bytes, int memfd, uint64_t memfd_offset) {
  return renamed(inner_->register_region(base, bytes, memfd, memfd_offset));
}

Result<Bytes> ShuffleDomain::accept(LinkId link, std::span<const std::byte> offer) {
  return renamed(inner_->accept(link, offer));
}

Status ShuffleDomain::complete(LinkId link, std::span<const std::byte> answer) {
  return renamed(inner_->complete(link, answer));
}

bool ShuffleDomain::fence(LinkId link) {
  drop_all(link, shuffle_error(ErrorCode::kPeerDown, "write", "the link was fenced on this side"));
  const bool fenced = inner_->fence(link);
  tell_all(link);  // what the inner domain reported last included
  return fenced;
}

// --- Out

ShuffleDomain::Due ShuffleDomain::draw() {
  const auto delay = std::chrono::microseconds(random_() % (uint64_t{max_delay_us_} + 1));
  return {Clock::now() + delay, random_()};
}

uint64_t ShuffleDomain::own(LinkId link, WorkId work, size_t pieces) {
  const uint64_t owner = next_id_++;
  works_.emplace(owner, Work{link, work, pieces, {}});
  return owner;
}

Posted ShuffleDomain::post(LinkId link, const WriteBatch& batch) {
  if (works_.size() >= kMaxWorks) return Posted::kBusy;
  if (batch.pages.empty()) {
    const Error error = shuffle_error(ErrorCode::kInvalidArgument, "write", "a batch has 1 to 64 pages");
    sink_.on_complete(batch.work, &error);
    return Posted::kYes;
  }
  // An immediate alone stays one: there are no pages that it has to wait for.
  const bool whole = batch.page_bytes == 0;
  const uint64_t owner = own(link, batch.work, whole ? 1 : batch.pages.size());
  if (whole) {
    // Nothing of a page is looked at: only how many there are, which the immediate says as well.
    pieces_.emplace(draw(), Piece{owner, link, batch, {}, {}});
    return Posted::kYes;
  }
  for (const PageWrite& page : batch.pages) {
    Piece piece{owner, link, batch, page, {}};
    if (batch.counted) piece.batch.immediate = Immediate::with_multiplicity(batch.immediate, 1);
    pieces_.emplace(draw(), std::move(piece));
  }
  return Posted::kYes;
}

Posted ShuffleDomain::send(LinkId link, WorkId work, std::span<const std::byte> message) {
  if (works_.size() >= kMaxWorks) return Posted::kBusy;
  if (message.empty()) {
    const Error error = shuffle_error(ErrorCode::kInvalidArgument, "send", "a message has 1 byte at least");
    sink_.on_complete(work, &error);
    return Posted::kYes;
  }
  Piece piece{own(link, work, 1), link, {}, {}, Bytes(message.begin(), message.end())};
  pieces_.emplace(draw(), std::move(piece));
  return Posted::kYes;
}

bool ShuffleDomain::post_due(Clock::time_point now) {
  bool any = false;
  for (int i = 0; i < kPiecesPerPoll && !pieces_.empty() && pieces_.begin()->first.first <= now; ++i) {
    auto node = pieces_.extract(pieces_.begin());
    Piece& piece = node.mapped();
    const WorkId id = next_id_++;
    posted_.emplace(id, piece.owner);  // the completion may come before post() returns
    Posted posted = Posted::kYes;
    if (piece.message.empty()) {
      // An immediate alone has as many pages as it is counted for.
      const std::vector<PageWrite> pages(
          piece.batch.page_bytes == 0 ? Immediate::decode(piece.batch.immediate).multiplicity : 1, piece.page);
      piece.batch.work = id;
      piece.batch.pages = pages;
      posted = inner_->post(piece.link, piece.batch);
    } else {
      posted = inner_->send(piece.link, id, piece.message);
    }
    if (posted == Posted::kYes) {
      any = true;
      continue;
    }
    posted_.erase(id);
    node.key().first = now + kBusyPause;
    pieces_.insert(std::move(node));
  }
  return any;
}

void ShuffleDomain::on_complete(WorkId work, const Error* error) noexcept {
  const auto found = posted_.find(work);
  if (found == posted_.end()) return;
  const uint64_t owner = found->second;
  posted_.erase(found);
  end_piece(owner, error);
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
  sink_.on_complete(ended.work, ended.error ? &*ended.error : nullptr);
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

void ShuffleDomain::on_immediate(LinkId link, uint32_t immediate) noexcept {
  landed_.emplace(draw(), Landed{link, immediate});
}

bool ShuffleDomain::tell_due(Clock::time_point now) {
  bool any = false;
  for (int i = 0; i < kPiecesPerPoll && !landed_.empty() && landed_.begin()->first.first <= now; ++i) {
    const Landed landed = landed_.extract(landed_.begin()).mapped();
    sink_.on_immediate(landed.link, landed.immediate);
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
  for (const uint32_t immediate : immediates) sink_.on_immediate(link, immediate);
}

bool ShuffleDomain::on_message(LinkId link, std::span<const std::byte> message) noexcept {
  return sink_.on_message(link, message);  // shuffled by its sender
}

void ShuffleDomain::on_link_down(LinkId link, const Error& error, bool fenced) noexcept {
  Error renamed = error;
  renamed.provider = "shuffle";
  drop_all(link, renamed);
  tell_all(link);
  sink_.on_link_down(link, renamed, fenced);
}

// --- The worker's turn

bool ShuffleDomain::poll() {
  const Clock::time_point now = Clock::now();
  bool any = post_due(now);
  any |= inner_->poll();
  any |= tell_due(now);
  return any;
}

bool ShuffleDomain::prepare_sleep() {
  std::optional<Clock::time_point> due;
  if (!pieces_.empty()) due = pieces_.begin()->first.first;
  if (!landed_.empty() && (!due || landed_.begin()->first.first < *due)) due = landed_.begin()->first.first;
  itimerspec when{};
  if (due) {
    if (*due <= Clock::now()) return false;
    const auto since_boot = due->time_since_epoch();
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(since_boot);
    when.it_value.tv_sec = seconds.count();
    when.it_value.tv_nsec = std::chrono::nanoseconds(since_boot - seconds).count();
  }
  // Disarms it too, and makes it unreadable again.
  ::timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &when, nullptr);
  return inner_->prepare_sleep();
}

}  // namespace kvc::shuffle
