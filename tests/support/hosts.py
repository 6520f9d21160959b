"""Hosts on this machine: each has its own network, processes, name, shared memory and copy of /etc.

Needs root, iproute2 and util-linux. When the block ends, or the test process dies, the kernel ends the
namespaces with all their processes and interfaces.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

# Process 1 of a host. Arguments: name, and an empty directory for the host's changes in /etc. The host ends
# when its input ends.
INIT = """
set -e
hostname "$1"
mount -t tmpfs tmpfs "$2"
mkdir "$2/upper" "$2/work"
mount -t overlay -o "lowerdir=/etc,upperdir=$2/upper,workdir=$2/work" overlay /etc
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
ip link set lo up
echo up
cat >/dev/null
"""
NAMESPACES = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]


class NoHostsError(RuntimeError):
    """This machine cannot make namespaces. The message has the reason."""


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    pid: int
    """Process 1 of the host, as this machine numbers it."""

    def command(self, line: str, directory: Path) -> list[str]:
        """Returns a command that runs a line of shell on the host, in the directory."""
        return ["nsenter", f"--target={self.pid}", "--all", f"--wd={directory}", "bash", "-c", line]

    def path(self, path: str) -> Path:
        """Returns where this machine finds a file of the host."""
        return Path(f"/proc/{self.pid}/root{path}")


@contextmanager
def hosts(directory: Path, addresses: Mapping[str, str]) -> Iterator[dict[str, Host]]:
    """Yields hosts of one network with the prefix length 24, by name. NoHostsError: not possible here."""
    with ExitStack() as stack:
        made = {
            name: stack.enter_context(_host(name, address, directory / f"etc-{name}"))
            for name, address in addresses.items()
        }
        first, *others = made.values()
        # The first host has the bridge, so this machine gets no interface and no address.
        _ip(first, "link", "add", "eth0", "type", "bridge")
        for host in others:
            peer = ("peer", "name", "eth0", "netns", str(host.pid))
            _ip(first, "link", "add", f"to-{host.name}", "type", "veth", *peer)
            _ip(first, "link", "set", f"to-{host.name}", "master", "eth0", "up")
        for host in made.values():
            _ip(host, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip(host, "link", "set", "eth0", "up")
        yield made


@contextmanager
def _host(name: str, address: str, etc: Path) -> Iterator[Host]:
    etc.mkdir()
    try:
        process = subprocess.Popen(
            ["unshare", *NAMESPACES, "bash", "-c", INIT, "init", name, str(etc)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except OSError as error:
        raise NoHostsError(str(error)) from error
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if line != "up\n":
            raise NoHostsError(line + process.stdout.read())
        pid = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        yield Host(name, address, pid)
    finally:
        process.kill()
        process.communicate()


def _ip(host: Host, *words: str) -> None:
    subprocess.run(
        ["nsenter", f"--target={host.pid}", "--net", "ip", *words], check=True, capture_output=True
    )
