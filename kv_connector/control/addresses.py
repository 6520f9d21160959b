"""Host names and addresses, as operators write them."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from kv_connector.protocol.actions import Address

LOOPBACK = "127.0.0.1"


def parse_address(text: str) -> Address:
    """Reads ``host:port`` or ``[host]:port``. Raises ValueError, which explains the problem."""
    parts = urlsplit(f"//{text.strip()}")
    try:
        port = parts.port
    except ValueError:
        port = None
    if not parts.hostname or not port or parts.path or parts.username is not None:
        raise ValueError(f"{text!r} must be host:port with a port from 1 to 65535")
    return Address(parts.hostname, port)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``. A name that cannot be resolved counts as another
    machine's."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(address).is_loopback for address in found)
