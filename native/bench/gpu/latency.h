#pragma once

namespace kvc::gpu_bench {

// What decides how the Copier copies small batches: how long they take by its kernel, by the copy engines and by itself,
// idle and beside kernels that fill the GPU, and what it costs those.
void latency();

}  // namespace kvc::gpu_bench
