// LayerSignal: a 64-bit word that says how far a forward pass has come.
//
// The engine that computes stores a growing value after each layer; the worker thread posts what was armed for it
// (TransferEngine::arm). On a CPU engine the layer hook stores it; on a GPU the stream does (cuda/stream_signal.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <utility>

namespace kvc {

class LayerSignal {
 public:
  // `wake` is called after a store while the worker sleeps; it must be callable from any thread and not block.
  explicit LayerSignal(std::function<void()> wake) : LayerSignal(std::move(wake), nullptr) {}
  LayerSignal(const LayerSignal&) = delete;
  LayerSignal& operator=(const LayerSignal&) = delete;
  virtual ~LayerSignal() = default;

  // Publishes that everything up to `value` is computed: bytes written before this call may be read by the fabric
  // after it. Values must not shrink. Any thread; never blocks; about 100 ns, plus a wake-up if the worker sleeps.
  void store(uint64_t value) noexcept {
    // Sequentially consistent, and not just release: the wake below reads the worker's sleeping flag, and a
    // processor may let that read overtake a plain store. The worker would then sleep over this value.
    word_->store(value, std::memory_order_seq_cst);
    wake_();
  }
  uint64_t load() const noexcept { return word_->load(std::memory_order_seq_cst); }

  // Somebody who can wake nobody writes the word (a GPU): the worker does not sleep while something is armed on it.
  bool polled() const noexcept { return word_ != &own_; }

 protected:
  // `word` outlives the signal; null: the signal's own.
  LayerSignal(std::function<void()> wake, std::atomic<uint64_t>* word)
      : word_(word != nullptr ? word : &own_), wake_(std::move(wake)) {}

 private:
  alignas(64) std::atomic<uint64_t> own_{0};  // its own cache line: the worker polls it
  alignas(64) std::atomic<uint64_t>* const word_;
  const std::function<void()> wake_;
};

}  // namespace kvc
