"""A lane that is measured: a provider, and the NICs on both sides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kv_connector.bench.contestant import SideRole
from kv_connector.engine import DomainConfig
from kv_connector.engine.topology import Nic, read_machine
from kv_connector.engine.transfer_engine import providers

# sim and shuffle are for tests. nvlink and bounce are for GPU memory, and these pools are host memory.
_ONLY_BY_NAME = ("sim", "shuffle", "nvlink", "bounce")


class UnknownLane(ValueError):
    """The provider is unknown in this build or not usable here. The message contains the reason."""


@dataclass(frozen=True)
class Lane:
    provider: str
    devices: tuple[str, ...] = ("",)
    """NICs of the initiator, one domain each; empty: the provider's choice."""
    target_devices: tuple[str, ...] | None = None
    """NICs of the target. None: the initiator's."""
    address: str = "127.0.0.1"

    @property
    def name(self) -> str:
        devices = "+".join(filter(None, self.devices))
        return f"{self.provider} {devices}" if devices else self.provider

    def domains(self, role: SideRole) -> list[DomainConfig]:
        devices = self.devices
        if role is SideRole.TARGET and self.target_devices is not None:
            devices = self.target_devices
        return [DomainConfig(self.provider, device=device, address=self.address) for device in devices]

    def native_domains(self, role: SideRole) -> list[tuple[str, str, str]]:
        """Returns the domains in the form that _bench takes."""
        return [(domain.provider, domain.device, domain.address) for domain in self.domains(role)]

    def nics(self) -> Iterator[str]:
        """Describes the NICs by name, for readers of the results."""
        wanted = {*self.devices, *(self.target_devices or ())}
        for nic in read_machine().nics:
            if nic.name in wanted:
                yield _describe(nic)


def choose_lanes(
    names: Sequence[str], devices: Sequence[str], target_devices: Sequence[str], *, in_one_process: bool
) -> list[Lane]:
    """Returns the lanes by provider. Without names, returns every lane that is usable here for host memory.

    `in_one_process`: both ends are in this process, which `sim` needs. Raises UnknownLane.
    """
    known = {status.name: status for status in providers()}
    if not names:
        names = [name for name, status in known.items() if status.usable and name not in _ONLY_BY_NAME]
    for name in names:
        if name not in known:
            raise UnknownLane(f"this build has no provider {name!r}. It has {', '.join(known)}")
        if not known[name].usable:
            raise UnknownLane(f"{name} is not usable here: {known[name].reason}")
        if name == "sim" and not in_one_process:
            raise UnknownLane("sim connects domains of one process, and this measurement needs two processes")
    if devices and len(names) > 1:
        raise UnknownLane("--device names the NICs of one provider. Set --provider, too")
    return [Lane(name, tuple(devices) or ("",), tuple(target_devices) or None) for name in names]


def _describe(nic: Nic) -> str:
    port = next((port for port in nic.ports if port.active), None)
    if port is None:
        return f"{nic.name}: no port is up"
    gids = ", ".join(f"[{gid.index}] {gid.ipv4 or gid.address} {gid.kind}".strip() for gid in port.gids)
    return (
        f"{nic.name} ({nic.driver or 'software'}) port {port.number}, {port.link_layer}, "
        f"{port.gbit_per_second:g} Gb/s, NUMA node {nic.location.numa_node}, GIDs {gids or 'none'}"
    )
