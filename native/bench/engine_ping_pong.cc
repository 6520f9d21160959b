#include "bench/engine_ping_pong.h"

#include <atomic>
#include <chrono>
#include <mutex>
#include <semaphore>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "bench/checked.h"

namespace kvc::bench {
namespace {

using Clock = std::chrono::steady_clock;

double half_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count() / 2;
}

}  // namespace

// The object by which callbacks on the transfer thread report to the waiting thread. It is shared with the callbacks,
// which may outlive a failed run.
class EnginePingPong::Completion {
 public:
  void signal() noexcept { semaphore_.release(); }
  void fail(const Error& error) {
    {
      const std::lock_guard lock(mutex_);
      if (error_.empty()) error_ = error.to_string();
    }
    signal();
  }
  // Blocks until one signal. Throws the error that was passed to fail().
  void wait() {
    const bool signalled = semaphore_.try_acquire_for(kPatience);
    const std::lock_guard lock(mutex_);
    if (!error_.empty()) throw std::runtime_error(error_);
    if (!signalled) throw std::runtime_error("ping-pong: no answer in 30 s");
  }

 private:
  std::counting_semaphore<> semaphore_{0};
  std::mutex mutex_;
  std::string error_;
};

std::vector<uint32_t> EnginePingPong::prepare(uint32_t iterations) {
  release_counters();
  std::vector<uint32_t> immediates;
  for (uint32_t i = 0; i < iterations; ++i) {
    counters_.push_back(checked(engine_->alloc_counters(1)));
    immediates.push_back(counters_.back().immediates.front());
  }
  return immediates;
}

void EnginePingPong::release_counters() {
  for (const CounterSet& set : counters_) checked(engine_->release_counters(set.id));
  counters_.clear();
}

void EnginePingPong::write(uint32_t immediate, uint64_t bytes, const std::shared_ptr<Completion>& completion,
                           bool signal_end) {
  const auto on_end = [=](const Event& event) {
    if (event.error) {
      completion->fail(*event.error);
    } else if (signal_end) {
      completion->signal();
    }
  };
  const auto posted = engine_->write_one(peer_, region_, 0, remote_, 0, bytes, immediate, on_end);
  if (!posted.ok()) completion->fail(posted.error());
}

std::vector<double> EnginePingPong::ping(Face face, const std::vector<uint32_t>& peer_immediates, uint64_t bytes,
                                         uint32_t pause_us) {
  const auto completion = std::make_shared<Completion>();
  const size_t n = peer_immediates.size();
  if (n != counters_.size())
    throw std::runtime_error("ping-pong: both sides must prepare the same number of iterations");
  // Shared with the callbacks. Each message hands `start` over, so that no two threads use it at once.
  struct Run {
    std::vector<double> halves;
    Clock::time_point start;
  };
  const auto run = std::make_shared<Run>();
  run->halves.resize(n);
  const auto send = [=, this](size_t i) {
    run->start = Clock::now();
    write(peer_immediates[i], bytes, completion, false);
  };

  const bool back_to_back = face == Face::kWorker && pause_us == 0;
  for (size_t i = 0; i < n; ++i) {
    EventCallback answered;
    if (face == Face::kWorker) {
      answered = [=](const Event&) {
        run->halves[i] = half_since(run->start);
        if (back_to_back && i + 1 < n) {
          send(i + 1);
        } else {
          completion->signal();
        }
      };
    }
    checked(engine_->expect(counters_[i].id, {1}, std::move(answered)));
  }

  if (back_to_back) {
    send(0);
    completion->wait();
    return run->halves;
  }
  for (size_t i = 0; i < n; ++i) {
    if (pause_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(pause_us));
    send(i);
    if (face == Face::kWorker) {
      completion->wait();
    } else {
      checked(engine_->wait_counters(counters_[i].id, kPatience));
      run->halves[i] = half_since(run->start);
    }
  }
  return run->halves;
}

void EnginePingPong::pong(Face face, const std::vector<uint32_t>& peer_immediates, uint64_t bytes) {
  const auto completion = std::make_shared<Completion>();
  const size_t n = peer_immediates.size();
  if (n != counters_.size())
    throw std::runtime_error("ping-pong: both sides must prepare the same number of iterations");
  const auto answer = [=, this](size_t i) { write(peer_immediates[i], bytes, completion, true); };
  for (size_t i = 0; i < n; ++i) {
    EventCallback asked;
    if (face == Face::kWorker) asked = [=](const Event&) { answer(i); };
    checked(engine_->expect(counters_[i].id, {1}, std::move(asked)));
  }
  if (face == Face::kThread) {
    for (size_t i = 0; i < n; ++i) {
      checked(engine_->wait_counters(counters_[i].id, kPatience));
      answer(i);
    }
  }
  // The caller may end this process now. The last answer must have left it before.
  for (size_t i = 0; i < n; ++i) completion->wait();
}

}  // namespace kvc::bench
