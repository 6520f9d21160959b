#include "providers/verbs/domain_resources.h"

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

DomainResources::DomainResources(std::unique_ptr<Device> opened, const Tuning& numbers)
    : device(std::move(opened)), tuning(numbers), key_half(static_cast<uint32_t>(random_key())) {}

Result<std::unique_ptr<DomainResources>> DomainResources::open(std::unique_ptr<Device> device, const Tuning& tuning) {
  std::unique_ptr<DomainResources> resources(new DomainResources(std::move(device), tuning));
  const Device& nic = *resources->device;
  const Library& library = nic.library();
  resources->channel = owned(library.create_comp_channel(nic.context()), library.destroy_comp_channel);
  if (!resources->channel) return verbs_error(ErrorCode::kResources, "open", "ibv_create_comp_channel", errno);
  resources->entries = std::min(tuning.completions, static_cast<uint32_t>(nic.limits().max_cqe));
  resources->completions = owned(
      library.create_cq(nic.context(), static_cast<int>(resources->entries), nullptr, resources->channel.get(), 0),
      library.destroy_cq);
  if (!resources->completions) return verbs_error(ErrorCode::kResources, "open", "ibv_create_cq", errno);

  auto writes =
      ReceiveQueue::create(nic, WorkRequestId::Kind::kWriteReceive, tuning.write_receives, 0, tuning.receive_batch);
  if (!writes) return writes.error();
  resources->write_receives = std::move(writes.value());
  auto messages = ReceiveQueue::create(nic, WorkRequestId::Kind::kMessageReceive, tuning.message_receives,
                                       kMaxMessageBytes, std::max(1U, tuning.receive_batch / 8));
  if (!messages) return messages.error();
  resources->message_receives = std::move(messages.value());
  const uint32_t receives = resources->write_receives->slots() + resources->message_receives->slots();
  if (resources->entries <= receives) {
    return verbs_error(ErrorCode::kResources, "open",
                       "a completion queue of " + std::to_string(resources->entries) + " entries is too small");
  }
  resources->credits = resources->entries - receives;
  auto buffers = SendBuffers::create(nic, tuning.message_buffers);
  if (!buffers) return buffers.error();
  resources->buffers = std::move(buffers.value());

  nonblocking(resources->channel->fd);
  nonblocking(nic.context()->async_fd);
  return resources;
}

}  // namespace kvc::verbs
