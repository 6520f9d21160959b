#include "moe/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <string>
#include <utility>

namespace kvc::moe {

namespace {

constexpr std::string_view kOperation = "moe_segment";

Result<UniqueFd> duplicate(int descriptor) {
  if (descriptor < 0) {
    return invalid(std::string(kOperation), "the segment belongs to a peer: only its owner can give a descriptor");
  }
  UniqueFd fd(fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
  if (!fd) return system_error({}, kOperation, errno);
  return fd;
}

Error own_segment() { return invalid(std::string(kOperation), "the segment is this rank's own"); }

class HostSegment final : public Segment {
 public:
  explicit HostSegment(SharedMemory memory)
      : Segment(reinterpret_cast<unsigned char*>(memory.data()), memory.size()), memory_(std::move(memory)) {}
  Result<UniqueFd> descriptor() const override { return duplicate(memory_.fd()); }
  Status replace(int) override { return own_segment(); }

 private:
  SharedMemory memory_;
};

class MappedHostSegment final : public Segment {
 public:
  using Segment::Segment;
  static Result<std::unique_ptr<Segment>> map(int descriptor, uint64_t bytes) {
    if (Status valid = check(descriptor, bytes); !valid) return valid.error();
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (data == MAP_FAILED) return system_error({}, kOperation, errno);
    return std::unique_ptr<Segment>(new MappedHostSegment(static_cast<unsigned char*>(data), bytes));
  }
  MappedHostSegment(const MappedHostSegment&) = delete;
  MappedHostSegment& operator=(const MappedHostSegment&) = delete;
  ~MappedHostSegment() override { munmap(base_, bytes_); }
  Result<UniqueFd> descriptor() const override { return duplicate(-1); }
  Status replace(int descriptor) override {
    if (Status valid = check(descriptor, bytes_); !valid) return valid;
    void* data = mmap(base_, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, descriptor, 0);
    return data == MAP_FAILED ? Status(system_error({}, kOperation, errno)) : Status();
  }

 private:
  // A file that shrinks under a mapping kills its readers. It is sealed first, so that the measured size stays.
  static Status check(int descriptor, uint64_t bytes) {
    if (fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK) != 0) return system_error({}, kOperation, errno);
    struct stat status{};
    if (fstat(descriptor, &status) != 0) return system_error({}, kOperation, errno);
    if (static_cast<uint64_t>(status.st_size) >= bytes) return {};
    return invalid(std::string(kOperation),
                   "the peer's segment has " + std::to_string(status.st_size) + " bytes, not " + std::to_string(bytes));
  }
};

class GpuSegment final : public Segment {
 public:
  // `piece`: the descriptor of an own segment, empty for a peer's.
  GpuSegment(std::shared_ptr<cuda::Context> context, cuda::PieceMapping mapping, UniqueFd piece)
      : Segment(reinterpret_cast<unsigned char*>(mapping.base()), mapping.bytes()),
        context_(std::move(context)),
        mapping_(std::move(mapping)),
        piece_(std::move(piece)) {}
  GpuSegment(const GpuSegment&) = delete;
  GpuSegment& operator=(const GpuSegment&) = delete;
  ~GpuSegment() override {
    const cuda::Context::Scope scope(*context_);
    mapping_ = {};
  }
  Result<UniqueFd> descriptor() const override { return duplicate(piece_.get()); }
  Status replace(int descriptor) override {
    if (piece_) return own_segment();
    const cuda::Context::Scope scope(*context_);
    return mapping_.replace(descriptor);
  }

 private:
  std::shared_ptr<cuda::Context> context_;
  cuda::PieceMapping mapping_;
  UniqueFd piece_;
};

Result<cuda::PieceMapping> map_piece(const std::shared_ptr<cuda::Context>& context, int descriptor, uint64_t bytes) {
  Result<cuda::PieceMapping> mapping = cuda::PieceMapping::reserve(context, bytes);
  if (!mapping) return mapping.error();
  if (Status status = mapping.value().append(descriptor, bytes); !status) return status.error();
  return mapping;
}

}  // namespace

Result<std::unique_ptr<Segment>> Segment::create(std::shared_ptr<cuda::Context> context, uint64_t bytes) {
  if (!context) {
    Result<SharedMemory> memory = SharedMemory::create("kv-connector-moe", bytes);
    if (!memory) return memory.error();
    return std::unique_ptr<Segment>(new HostSegment(std::move(memory.value())));
  }
  const cuda::Context::Scope scope(*context);
  Result<uint64_t> piece = cuda::piece_granularity(*context);
  if (!piece) return piece.error();
  const uint64_t rounded = (bytes + piece.value() - 1) / piece.value() * piece.value();
  Result<UniqueFd> made = cuda::create_piece(*context, rounded);
  if (!made) return made.error();
  // Mapped from its own descriptor, as peers do. The mapping keeps the memory alive.
  Result<cuda::PieceMapping> mapping = map_piece(context, made.value().get(), rounded);
  if (!mapping) return mapping.error();
  if (const int result = context->driver().cuMemsetD8_v2(mapping.value().base(), 0, rounded); result != 0) {
    return cuda::cuda_error(kOperation, "cuMemsetD8", result);
  }
  if (const int result = context->driver().cuCtxSynchronize(); result != 0) {
    return cuda::cuda_error(kOperation, "cuCtxSynchronize", result);
  }
  return std::unique_ptr<Segment>(
      new GpuSegment(std::move(context), std::move(mapping.value()), std::move(made.value())));
}

Result<std::unique_ptr<Segment>> Segment::map(std::shared_ptr<cuda::Context> context, int descriptor, uint64_t bytes) {
  if (!context) return MappedHostSegment::map(descriptor, bytes);
  const cuda::Context::Scope scope(*context);
  Result<uint64_t> piece = cuda::piece_granularity(*context);
  if (!piece) return piece.error();
  const uint64_t rounded = (bytes + piece.value() - 1) / piece.value() * piece.value();
  Result<cuda::PieceMapping> mapping = map_piece(context, descriptor, rounded);
  if (!mapping) {
    Error error = mapping.error();
    error.code = ErrorCode::kNotReachable;
    error.message += " (the GPUs need peer access to each other: `nvidia-smi topo -p2p r` shows it)";
    return error;
  }
  return std::unique_ptr<Segment>(new GpuSegment(std::move(context), std::move(mapping.value()), {}));
}

}  // namespace kvc::moe
