#pragma once

namespace kvc::gpu_bench {

// Each of methods.h: how long a small batch takes, how fast a large one is, and what both cost whoever else uses the GPU.
// `only`: that method; null: all, each in a process of its own. Returns how many of them failed.
int latency(const char* only);

}  // namespace kvc::gpu_bench
