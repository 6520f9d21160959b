// Writing the private memory of another process (process_vm_writev): whether it is permitted, and the reason if not.
// Nothing here blocks.
#pragma once

#include <sys/types.h>

#include <string_view>

#include "base/error.h"
#include "providers/host/wire.h"

namespace kvc::host {

// Lets any process of this user write our memory if the Yama module restricts that to descendants. Yama can allow one
// process or all of them. A transfer engine has several peers, and makes its offer before it knows their pids, so it
// allows all.
void allow_peers_to_write();

// Checks whether this process may write `pid`'s private memory, if there is any to write. Reads the probe, which must
// have its value, and writes it back. kNotReachable: another process has that pid, or a border of namespaces or
// containers lies between the two. kRefused: the kernel forbids it within one container.
Status try_probe(std::string_view operation, pid_t pid, const Probe& probe);
// The acceptor's check after it has tried the offerer's probe: whether the offerer's try_probe() will succeed, as far
// as namespaces decide. kNotReachable: it will not. A lane that fails only at the offerer costs a second handshake.
Status check_way_back(pid_t pid, const Probe& theirs, const Probe& ours);
// Returns the error for a failed process_vm_writev(): kPeerDown, kRefused with advice, or the kernel's own message.
Error remote_write_error(std::string_view operation, pid_t pid, int error_number);

}  // namespace kvc::host
