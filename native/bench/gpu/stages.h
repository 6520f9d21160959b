#pragma once

#include "bench/gpu/two_processes.h"

namespace kvc::gpu_bench {

// Measures the time of each stage of a small batch through two TransferEngines, from the call to the receiver's count.
void stages(const Pipe& pipe);

}  // namespace kvc::gpu_bench
