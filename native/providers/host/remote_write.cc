#include "providers/host/remote_write.h"

#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <string>

#include "base/process.h"
#include "providers/same_host/system.h"

namespace kvc::host {

void allow_peers_to_write() {
#ifdef PR_SET_PTRACER
  std::ifstream scope("/proc/sys/kernel/yama/ptrace_scope");
  int value = 0;
  if (scope >> value && value == 1) prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
#endif
}

Error remote_write_error(std::string_view operation, pid_t pid, int error_number) {
  const std::string who = "process_vm_writev to pid " + std::to_string(pid);
  switch (error_number) {
    case EPERM:
      return kLane.error(ErrorCode::kRefused, operation,
                         who +
                             " is forbidden (EPERM): run both engines as one user and set "
                             "kernel.yama.ptrace_scope=0 or give CAP_SYS_PTRACE (in containers: one pid namespace "
                             "and --cap-add SYS_PTRACE); or put the KV cache into shared memory; or configure "
                             "providers=[\"tcp\"]");
    case ENOSYS:
      return kLane.error(ErrorCode::kRefused, operation,
                         who +
                             " does not exist here (ENOSYS, a sandbox or a kernel without CROSS_MEMORY_ATTACH): "
                             "put the KV cache into shared memory, or configure providers=[\"tcp\"]");
    case ESRCH:
      return kLane.error(ErrorCode::kPeerDown, operation, "process " + std::to_string(pid) + " is gone");
    default:
      return kLane.named(same_host::kernel_error(operation, who, error_number));
  }
}

namespace {

Error other_pid_namespace(std::string_view operation) {
  return kLane.error(ErrorCode::kNotReachable, operation,
                     "the peer runs in another pid namespace and memory of one of the two is not shared: use one pid "
                     "namespace, or put the KV cache into shared memory");
}

Error other_user_namespace(std::string_view operation) {
  return kLane.error(ErrorCode::kNotReachable, operation,
                     "the peer runs in another user namespace and memory of one of the two is not shared: use one user "
                     "namespace, or put the KV cache into shared memory");
}

// Containers that share a PID namespace: the kernel allows the access only with CAP_SYS_PTRACE, which neither Docker
// nor Kubernetes grants.
Error other_container(std::string_view operation) {
  return kLane.error(ErrorCode::kNotReachable, operation,
                     "the peer runs in another container (mount namespace), whose memory the kernel forbids to this "
                     "process, and memory of one of the two is not shared: give both CAP_SYS_PTRACE, or put the KV "
                     "cache into shared memory");
}

}  // namespace

Status try_probe(std::string_view operation, pid_t pid, const Probe& probe) {
  if (probe.private_regions == 0 || pid == getpid()) return {};
  if (pid == 0) {
    return other_pid_namespace(operation);
  }
  uint64_t word = 0;
  iovec local{&word, sizeof(word)};
  iovec remote{reinterpret_cast<void*>(probe.address), sizeof(word)};
  const ssize_t length = process_vm_readv(pid, &local, 1, &remote, 1, 0);
  const int error_number = length < 0 ? errno : 0;
  if (error_number == EPERM && probe.user_namespace != own_namespace("user")) return other_user_namespace(operation);
  if (error_number == EPERM && probe.mount_namespace != own_namespace("mnt")) return other_container(operation);
  if (error_number == EPERM || error_number == ENOSYS) return remote_write_error(operation, pid, error_number);
  if (length != sizeof(word) || word != probe.value) {
    return kLane.error(ErrorCode::kNotReachable, operation,
                       "process " + std::to_string(pid) + " is not the one that sent the handshake");
  }
  if (process_vm_writev(pid, &local, 1, &remote, 1, 0) != sizeof(word)) {
    return remote_write_error(operation, pid, errno);
  }
  return {};
}

// Namespaces are nested, and only the outer of two sees into the inner one. So a process that this side reaches across
// a border cannot reach back.
Status check_way_back(pid_t pid, const Probe& theirs, const Probe& ours) {
  if (ours.private_regions == 0 || pid == getpid()) return {};
  if (pid != 0 && theirs.pid_namespace != ours.pid_namespace) return other_pid_namespace("accept");
  const bool reached = theirs.private_regions != 0;
  if (reached && theirs.user_namespace != ours.user_namespace) return other_user_namespace("accept");
  return {};
}

}  // namespace kvc::host
