#include "base/shared_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace kvc {

Result<SharedMemory> SharedMemory::create(const std::string& name, uint64_t bytes) {
  if (bytes == 0) {
    return Error{
        ErrorCode::kInvalidArgument, {}, {}, "create_shared_memory", "0 bytes requested: at least 1 byte is needed"};
  }
  // MFD_ALLOW_SEALING: the host lane seals the file against shrinking, so that a peer that maps it cannot get SIGBUS.
  UniqueFd fd(memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return system_error({}, "memfd_create", errno);
  void* data = MAP_FAILED;
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0) {
    data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  }
  if (data == MAP_FAILED) return system_error({}, "create_shared_memory", errno);
  return SharedMemory(static_cast<std::byte*>(data), bytes, std::move(fd));
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)), fd_(std::move(other.fd_)) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(fd_, other.fd_);
  return *this;
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

}  // namespace kvc
