#include "providers/verbs/queues.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "base/random.h"

namespace kvc::verbs {

namespace {

void nonblocking(int fd) { ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK); }

}  // namespace

Queues::Queues(std::unique_ptr<Device> opened, const Tuning& numbers)
    : device(std::move(opened)), tuning(numbers), key_half(static_cast<uint32_t>(random_key())) {}

Result<std::unique_ptr<Queues>> Queues::open(std::unique_ptr<Device> device, const Tuning& tuning) {
  std::unique_ptr<Queues> queues(new Queues(std::move(device), tuning));
  const Device& nic = *queues->device;
  const Library& library = nic.library();
  queues->channel = owned(library.create_comp_channel(nic.context()), library.destroy_comp_channel);
  if (!queues->channel) return verbs_error(ErrorCode::kResources, "open", "ibv_create_comp_channel", errno);
  queues->entries = std::min(tuning.completions, static_cast<uint32_t>(nic.limits().max_cqe));
  queues->completions =
      owned(library.create_cq(nic.context(), static_cast<int>(queues->entries), nullptr, queues->channel.get(), 0),
            library.destroy_cq);
  if (!queues->completions) return verbs_error(ErrorCode::kResources, "open", "ibv_create_cq", errno);

  auto writes =
      ReceiveQueue::create(nic, WorkRequestId::Kind::kWriteReceive, tuning.write_receives, 0, tuning.receive_batch);
  if (!writes) return writes.error();
  queues->write_receives = std::move(writes.value());
  auto messages = ReceiveQueue::create(nic, WorkRequestId::Kind::kMessageReceive, tuning.message_receives,
                                       kMaxMessageBytes, std::max(1U, tuning.receive_batch / 8));
  if (!messages) return messages.error();
  queues->message_receives = std::move(messages.value());
  const uint32_t receives = queues->write_receives->slots() + queues->message_receives->slots();
  if (queues->entries <= receives) {
    return verbs_error(ErrorCode::kResources, "open",
                       "a completion queue of " + std::to_string(queues->entries) + " entries is too small");
  }
  queues->credits = queues->entries - receives;
  auto buffers = SendBuffers::create(nic, tuning.message_buffers);
  if (!buffers) return buffers.error();
  queues->buffers = std::move(buffers.value());

  nonblocking(queues->channel->fd);
  nonblocking(nic.context()->async_fd);
  return queues;
}

}  // namespace kvc::verbs
