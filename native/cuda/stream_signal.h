// StreamSignal: a LayerSignal whose word a CUDA stream writes, in the order of the stream's other work.
//
// The word lies in page-locked host memory. The GPU makes everything that the stream did before visible, then writes it;
// the worker, which watches the word while something is armed on it, posts that layer's pages. No thread waits for the
// stream anywhere.
//
// Steps and graphs. Values only grow: step s of an engine with L layers takes s*L+1 to s*L+L.
//  - Eager, and piecewise CUDA graphs (the hooks run between the pieces): store_on_stream(stream, s*L+k) after layer k.
//  - Inside a captured graph a value cannot be chosen: there advance_on_stream() captures a kernel that adds one, so that
//    each replay takes the word through its own step's values.
//  - A graph without either (vLLM's full graphs run no hooks): store_on_stream(stream, s*L+L) behind the replay.
// They mix, because whatever a step used, it ends at s*L+L. Two steps enqueued at once (async scheduling) and the chunks
// of a prompt follow each other on one stream, and so do their values.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "cuda/driver.h"
#include "lane/layer_signal.h"

namespace kvc::cuda {

class StreamSignal final : public LayerSignal {
 public:
  // On a thread whose current context is the one of the streams to come (with PyTorch: after torch.cuda.init() and with
  // the device set). kRefused where there is no driver or no current context.
  static Result<std::shared_ptr<StreamSignal>> create(std::function<void()> wake);
  ~StreamSignal() override;

  // Enqueues that the word becomes `value` once all that was enqueued on `stream` before is done. Any thread with the
  // stream's context current; never blocks; 1 to 2 us. `stream` is a CUstream (or cudaStream_t).
  Status store_on_stream(Stream stream, uint64_t value) noexcept;
  // The same, with the word's value then plus one. May be captured into a CUDA graph. For words that this stream alone
  // writes.
  Status advance_on_stream(Stream stream) noexcept;

 private:
  StreamSignal(std::function<void()> wake, const Driver& driver, PinnedMemory memory, Module module, Function store,
               Function advance, ContextHandle context);
  Status launch(Function kernel, Stream stream, uint64_t value) noexcept;

  const Driver& driver_;
  PinnedMemory memory_;
  Module module_;
  Function store_;    // null: the driver writes 64-bit words itself
  Function advance_;  // null in a build without kernels
  ContextHandle context_;
};

}  // namespace kvc::cuda
