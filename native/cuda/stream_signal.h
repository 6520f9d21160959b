// StreamSignal: a LayerSignal whose word a CUDA stream writes, in order with the stream's other work.
//
// The word lies in page-locked host memory. The GPU makes all earlier work of the stream visible, then writes the word.
// The transfer thread watches the word while writes are armed on it, and posts the layer's pages. No thread waits for
// the stream.
//
// Steps and graphs: values only grow. Step s of an engine with L layers uses the values s*L+1 to s*L+L.
//  - Eager execution, and piecewise CUDA graphs (hooks run between the pieces): store_on_stream(stream, s*L+k) after
//    layer k.
//  - Inside a captured graph a value cannot be chosen. advance_on_stream() captures a kernel that adds one, so that each
//    replay moves the word through the values of that step.
//  - A graph without either (vLLM's full graphs run no hooks): store_on_stream(stream, s*L+L) after the replay.
// The methods can be mixed, because every step ends at s*L+L. Two steps enqueued at once (async scheduling) and the
// chunks of a prompt are in order on one stream, and so are their values.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "cuda/driver.h"
#include "lane/layer_signal.h"

namespace kvc::cuda {

class StreamSignal final : public LayerSignal {
 public:
  // Creates a signal. Call it on a thread whose current context is the context of the streams (with PyTorch: after
  // torch.cuda.init(), with the device set). kRefused: no driver, or no current context.
  static Result<std::shared_ptr<StreamSignal>> create(std::function<void()> wake);
  ~StreamSignal() override;

  // Enqueues a store of `value` that runs after all work enqueued on `stream` before. Any thread with the stream's context
  // current. Never blocks, and takes 1 to 2 us. `stream` is a CUstream (or cudaStream_t).
  Status store_on_stream(Stream stream, uint64_t value) noexcept;
  // Like store_on_stream(), with the word's current value plus one. A CUDA graph can capture it. Only for words that no
  // other stream writes.
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
