#pragma once

namespace kvc::gpu_bench {

// Measures what decides how the Copier copies small batches. It takes the time of a batch by the kernel, by the copy
// engines and by the Copier's own choice, idle and beside kernels that fill the GPU. It also takes the slowdown of
// those kernels.
void latency();

}  // namespace kvc::gpu_bench
