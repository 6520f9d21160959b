// The engine's hot loops, one at a time, over `sim`: what an application pays to submit, what a worker pays to post and
// to count. Run for time by `kv-connector bench micro`, for instructions by integration/benchmarks/count-instructions.
//
// Failures are exceptions (std::runtime_error with the engine's words).
#pragma once

#include <cstdint>
#include <vector>

namespace kvc::bench {

// Nanoseconds that each of `iterations` calls took, from its beginning until it returned: the request is with the worker
// then. `write`: one page on an open transfer. `write_one`: a transfer of its own, opened and sealed.
std::vector<double> submit_write(uint32_t iterations);
std::vector<double> submit_write_one(uint32_t iterations);

// Nanoseconds a page that the worker took to post `pages` pages of `page_bytes` of one request, from the first post to
// the last one, everything that it does meanwhile included; one entry for each of `iterations` requests.
std::vector<double> post_pages(uint32_t iterations, uint32_t pages, uint64_t page_bytes);

// Immediates a second that one thread counts, spread over `counters` counters whose targets are never reached.
double count_immediates(uint64_t immediates, uint32_t counters);

// What reading the clock twice costs: the floor of the figures above. Nanoseconds, the median.
double clock_cost();

}  // namespace kvc::bench
