// LayerSignal: a 64-bit word that reports the progress of a forward pass.
//
// The model runner stores a growing value after each layer, and the transfer thread posts the writes that were armed
// for that value (TransferEngine::arm). On a CPU engine the layer hook stores it. On a GPU the stream does
// (cuda/stream_signal.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <utility>

namespace kvc {

class LayerSignal {
 public:
  // `wake` is called after a store while the transfer thread sleeps. Any thread must be able to call it, and it must
  // not block.
  explicit LayerSignal(std::function<void()> wake) : LayerSignal(std::move(wake), nullptr) {}
  LayerSignal(const LayerSignal&) = delete;
  LayerSignal& operator=(const LayerSignal&) = delete;
  virtual ~LayerSignal() = default;

  // Publishes that everything up to `value` is computed: the fabric may read bytes written before this call. Values
  // must not shrink. Any thread. Never blocks. Takes about 100 ns, plus a wake-up if the transfer thread sleeps.
  void store(uint64_t value) noexcept {
    // Sequentially consistent, not just release: `wake_` reads the sleeping flag of the transfer thread, and a
    // processor may move that read before a plain store. The transfer thread would then sleep although the value is
    // there.
    word_->store(value, std::memory_order_seq_cst);
    wake_();
  }
  uint64_t load() const noexcept { return word_->load(std::memory_order_seq_cst); }

  // True if the writer of the word cannot wake the transfer thread (a GPU). That thread does not sleep while writes are
  // armed on the signal.
  bool polled() const noexcept { return word_ != &own_; }

 protected:
  // `word` must outlive the signal. Null: the signal uses its own word.
  LayerSignal(std::function<void()> wake, std::atomic<uint64_t>* word)
      : word_(word != nullptr ? word : &own_), wake_(std::move(wake)) {}

 private:
  // Its own cache line, because the transfer thread polls it.
  alignas(64) std::atomic<uint64_t> own_{0};
  alignas(64) std::atomic<uint64_t>* const word_;
  const std::function<void()> wake_;
};

}  // namespace kvc
