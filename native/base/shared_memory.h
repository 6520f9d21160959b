// SharedMemory: memory that other processes can map, backed by a memfd of this process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/unique_fd.h"

namespace kvc {

// Owns the mapping and the descriptor. The memory starts at zero. Movable. The object is not thread-safe, but any
// thread may use the memory.
class SharedMemory {
 public:
  // `name` only appears in /proc. `bytes` must be above 0. The mapping is rounded up to whole pages; size() is not.
  static Result<SharedMemory> create(const std::string& name, uint64_t bytes);
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  std::byte* data() const noexcept { return data_; }
  uint64_t size() const noexcept { return bytes_; }
  int fd() const noexcept { return fd_.get(); }

 private:
  SharedMemory(std::byte* data, uint64_t bytes, UniqueFd fd) : data_(data), bytes_(bytes), fd_(std::move(fd)) {}

  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
  UniqueFd fd_;
};

}  // namespace kvc
