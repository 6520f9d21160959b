// Large pages by the copy engines and by the kernel: GB/s by page length and by the size of the launches.
#pragma once

namespace kvc::gpu_bench {

void large();

}  // namespace kvc::gpu_bench
