#pragma once

#include "bench/gpu/two_processes.h"

namespace kvc::gpu_bench {

// Where the time of a small batch through two TransferEngines goes, from the call to the receiver's count.
void stages(const Pipe& pipe);

}  // namespace kvc::gpu_bench
