// Writing the private memory of another process (process_vm_writev): may we, and why not. Nothing here blocks.
#pragma once

#include <sys/types.h>

#include <string_view>

#include "base/error.h"
#include "providers/host/wire.h"

namespace kvc::host {

// Lets any process of this user write our memory where the Yama module restricts that to descendants. Yama knows
// one process or any: an engine has several peers, and offers before it knows their pids, so it is any.
void allow_peers_to_write();

// May this process write `pid`'s private memory, if there is any to write? Reads the probe, which must have its value,
// and writes it back. kNotReachable: it is not the process that the probe speaks of, or the border of a namespace or of a
// container lies between the two. kRefused: the kernel forbids it within one container.
Status try_probe(std::string_view operation, pid_t pid, const Probe& probe);
// The acceptor's part once it has tried the offerer's probe: will the offerer's try_probe() of ours succeed, as far as
// namespaces decide? kNotReachable: it will not. A lane that fails only there costs the two a second handshake.
Status check_way_back(pid_t pid, const Probe& theirs, const Probe& ours);
// process_vm_writev() failed: kPeerDown, kRefused with what to do, or the kernel's words.
Error remote_write_error(std::string_view operation, pid_t pid, int error_number);

}  // namespace kvc::host
