#include "cuda/virtual_memory.h"

#include <string>
#include <utility>

namespace kvc::cuda {

namespace {

constexpr int kDescriptor = 1;      // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
constexpr int kLocationDevice = 1;  // CU_MEM_LOCATION_TYPE_DEVICE
constexpr int kReadWrite = 3;       // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
constexpr int kPinned = 1;          // CU_MEM_ALLOCATION_TYPE_PINNED

AllocationProperties exportable(const Context& context) {
  return {kPinned, kDescriptor, kLocationDevice, context.device(), nullptr, {}};
}

Error plain_error(ErrorCode code, std::string message) {
  return Error{code, "cuda", {}, "register_memory", std::move(message)};
}

int set_access(const Context& context, DevicePointer address, uint64_t bytes) {
  const MemoryAccess access{kLocationDevice, context.device(), kReadWrite};
  return context.driver().cuMemSetAccess(address, bytes, &access, 1);
}

}  // namespace

Result<std::vector<MemoryChunk>> pieces_of(const Driver& driver, DevicePointer base, uint64_t bytes) {
  const RelaxedCapture relaxed(driver);
  std::vector<MemoryChunk> pieces;
  int first_device = -1;
  for (DevicePointer at = base; at - base < bytes;) {
    int device = -1;
    uint64_t handle_types = 0;
    size_t size = 0;
    DevicePointer start = 0;
    int result = driver.cuPointerGetAttribute(&device, kPointerDevice, at);
    if (result == kInvalidValue) {  // nothing is mapped there
      return plain_error(ErrorCode::kInvalidArgument,
                         "nothing is mapped after the first " + std::to_string(at - base) + " bytes of the region");
    }
    if (result == kSuccess) result = driver.cuPointerGetAttribute(&handle_types, kPointerHandleTypes, at);
    if (result == kSuccess) result = driver.cuPointerGetAttribute(&size, kPointerMappingSize, at);
    if (result == kSuccess) result = driver.cuPointerGetAttribute(&start, kPointerMappingStart, at);
    if (result != kSuccess) return cuda_error("register_memory", "cuPointerGetAttribute", result);
    if ((handle_types & kDescriptor) == 0) {
      return plain_error(ErrorCode::kRefused,
                         "other processes cannot map this GPU memory: it was allocated without "
                         "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR");
    }
    if (first_device < 0) first_device = device;
    if (device != first_device) {
      return plain_error(ErrorCode::kInvalidArgument, "the region spans several GPUs");
    }
    if (at - start >= size) {
      return plain_error(ErrorCode::kSystem, "the driver reported a piece of memory that does not contain the address");
    }
    pieces.push_back({start, size});
    at = start + size;
  }
  return pieces;
}

Result<UniqueFd> export_piece(const Driver& driver, DevicePointer address) {
  const RelaxedCapture relaxed(driver);
  AllocationHandle handle = 0;
  if (int result = driver.cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(address)); result != kSuccess) {
    return cuda_error("register_memory", "cuMemRetainAllocationHandle", result);
  }
  int descriptor = -1;
  const int result = driver.cuMemExportToShareableHandle(&descriptor, handle, kDescriptor, 0);
  driver.cuMemRelease(handle);
  if (result != kSuccess) return cuda_error("register_memory", "cuMemExportToShareableHandle", result);
  return UniqueFd(descriptor);
}

Result<uint64_t> piece_granularity(const Context& context) {
  const RelaxedCapture relaxed(context.driver());
  const AllocationProperties properties = exportable(context);
  size_t bytes = 0;
  if (int result = context.driver().cuMemGetAllocationGranularity(&bytes, &properties, 0); result != kSuccess) {
    return cuda_error("create_piece", "cuMemGetAllocationGranularity", result);
  }
  return bytes;
}

Result<UniqueFd> create_piece(const Context& context, uint64_t bytes) {
  const Driver& driver = context.driver();
  const RelaxedCapture relaxed(driver);
  const AllocationProperties properties = exportable(context);
  AllocationHandle handle = 0;
  if (int result = driver.cuMemCreate(&handle, bytes, &properties, 0); result != kSuccess) {
    return cuda_error("create_piece", "cuMemCreate of " + std::to_string(bytes) + " bytes", result);
  }
  int descriptor = -1;
  const int result = driver.cuMemExportToShareableHandle(&descriptor, handle, kDescriptor, 0);
  driver.cuMemRelease(handle);  // the descriptor keeps the memory
  if (result != kSuccess) return cuda_error("create_piece", "cuMemExportToShareableHandle", result);
  return UniqueFd(descriptor);
}

Status allow_access(const Context& context, const std::vector<MemoryChunk>& pieces) {
  const RelaxedCapture relaxed(context.driver());
  // One by one, because neighbours may have been reserved separately.
  for (const MemoryChunk& piece : pieces) {
    if (int result = set_access(context, piece.address, piece.bytes); result != kSuccess) {
      return cuda_error("accept", "cuMemSetAccess", result);
    }
  }
  return {};
}

Result<PieceMapping> PieceMapping::reserve(std::shared_ptr<Context> context, uint64_t bytes) {
  const RelaxedCapture relaxed(context->driver());
  PieceMapping mapping;
  mapping.context_ = std::move(context);
  if (int result = mapping.context_->driver().cuMemAddressReserve(&mapping.base_, bytes, 0, 0, 0); result != kSuccess) {
    return cuda_error("accept", "cuMemAddressReserve", result);
  }
  mapping.bytes_ = bytes;
  return mapping;
}

PieceMapping& PieceMapping::operator=(PieceMapping&& other) noexcept {
  std::swap(context_, other.context_);
  std::swap(base_, other.base_);
  std::swap(bytes_, other.bytes_);
  std::swap(mapped_, other.mapped_);
  std::swap(pieces_, other.pieces_);
  return *this;
}

PieceMapping::~PieceMapping() {
  if (bytes_ == 0) return;
  const RelaxedCapture relaxed(context_->driver());
  while (!pieces_.empty()) remove_last();
  context_->driver().cuMemAddressFree(base_, bytes_);
}

Result<AllocationHandle> PieceMapping::import(const Driver& driver, int descriptor) {
  AllocationHandle handle = 0;
  // The call takes the descriptor in its pointer argument.
  if (int result = driver.cuMemImportFromShareableHandle(
          &handle, reinterpret_cast<void*>(static_cast<intptr_t>(descriptor)), kDescriptor);
      result != kSuccess) {
    return cuda_error("accept", "cuMemImportFromShareableHandle", result);
  }
  return handle;
}

Status PieceMapping::map(AllocationHandle handle, uint64_t bytes) {
  const Driver& driver = context_->driver();
  const DevicePointer address = base_ + mapped_;
  const int mapped = driver.cuMemMap(address, bytes, 0, handle, 0);
  driver.cuMemRelease(handle);  // the mapping keeps the memory
  if (mapped != kSuccess) return cuda_error("accept", "cuMemMap", mapped);
  pieces_.push_back(bytes);
  mapped_ += bytes;
  if (int result = set_access(*context_, address, bytes); result != kSuccess) {
    remove_last();
    return cuda_error("accept", "cuMemSetAccess", result);
  }
  return {};
}

Status PieceMapping::append(int descriptor, uint64_t bytes) {
  const RelaxedCapture relaxed(context_->driver());
  Result<AllocationHandle> handle = import(context_->driver(), descriptor);
  return handle ? map(handle.value(), bytes) : Status(handle.error());
}

Status PieceMapping::replace(int descriptor) {
  const RelaxedCapture relaxed(context_->driver());
  Result<AllocationHandle> handle = import(context_->driver(), descriptor);
  if (!handle) return handle.error();
  const uint64_t bytes = mapped_;
  remove_last();
  return map(handle.value(), bytes);
}

void PieceMapping::remove_last() noexcept {
  mapped_ -= pieces_.back();
  context_->driver().cuMemUnmap(base_ + mapped_, pieces_.back());
  pieces_.pop_back();
}

}  // namespace kvc::cuda
