// Large pages by the copy engines and by the kernel: GB/s by their length and by how they are handed over.
#pragma once

namespace kvc::gpu_bench {

void large();

}  // namespace kvc::gpu_bench
