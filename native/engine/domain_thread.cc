#include "engine/domain_thread.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "engine/start_thread.h"

namespace kvc {

DomainThread::~DomainThread() {
  if (!thread_.joinable()) return;
  loop_.stop();
  thread_.join();
}

Status DomainThread::start(const std::string& name, int cpu, std::chrono::microseconds spin) {
  Latch started;
  Status status;
  Status thread = start_thread(thread_, [&, this, spin] {
    status = loop_.open(name, cpu);
    const bool ok = status.ok();
    started.set_done();  // `status` and `started` belong to the starting thread and are not touched after this
    if (ok) loop_.run(*this, spin);
  });
  if (!thread) return thread;
  started.wait();
  if (!status) thread_.join();
  return status;
}

void DomainThread::call(const std::function<void()>& f) {
  Latch latch;
  auto task = std::make_unique<Task>();
  task->run = [&] {
    f();
    latch.set_done();
  };
  tasks_.push(std::move(task));
  loop_.wake();
  latch.wait();
}

Result<OpenedDomain> DomainThread::open(const DomainFactory& factory, const DomainConfig& config,
                                        ControlQueue& control) {
  Result<std::shared_ptr<Waker>> waker = Waker::create();
  if (!waker) return waker.error();
  const auto passage = std::make_shared<DomainPassage>(std::move(waker.value()));
  DrivenDomain* driven = nullptr;
  std::optional<Result<OpenedDomain>> opened;
  call([&] {
    opened.emplace(factory(config, control));
    if (!*opened) return;
    auto domain = std::make_unique<DrivenDomain>(std::move(opened->value().domain), passage);
    if (Status watched = loop_.watch(domain->fd()); !watched) {
      domain.reset();  // before its connector
      opened.emplace(watched.error());
      return;
    }
    driven = domains_.emplace_back(std::move(domain)).get();
  });
  if (!*opened) return opened->error();
  opened->value().domain = std::make_unique<DomainProxy>(
      passage, [this] { loop_.wake(); },
      [this, driven] {
        call([&] {
          loop_.forget(driven->fd());
          std::erase_if(domains_, [&](const auto& domain) { return domain.get() == driven; });
        });
      });
  return std::move(opened->value());
}

bool DomainThread::turn() {
  bool any = tasks_.drain([](std::unique_ptr<Task> task) { task->run(); });
  for (const auto& domain : domains_) any |= domain->turn();
  return any;
}

bool DomainThread::prepare_sleep() {
  return tasks_.empty() &&
         std::all_of(domains_.begin(), domains_.end(), [](const auto& d) { return d->prepare_sleep(); });
}

std::optional<std::chrono::milliseconds> DomainThread::longest_sleep() const {
  const bool retries = std::any_of(domains_.begin(), domains_.end(), [](const auto& d) { return d->retries(); });
  return retries ? std::optional(PollLoop::kRetry) : std::nullopt;
}

}  // namespace kvc
