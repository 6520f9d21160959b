"""One agent in a separate process, for test_agent_namespaces.

    python namespaced_agent.py prefill|decode HERE [HOST PORT]

A prefill agent serves one transfer. A decode agent receives it from that host and port. HERE is the agent's
address; `own` means the address of the machine's (or container's) name. Prints a line of JSON for each stage.
"""

from __future__ import annotations

import json
import logging
import socket
import sys
from typing import Any

from agent_setup import stage, two_lanes

from kv_connector.protocol.actions import Address
from kv_connector.protocol.wire.messages import Role

SOURCE, TARGET = (1, 2, 3), (11, 12, 13)


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def main(role: str, here: str, host: str = "", port: str = "") -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    if here == "own":
        here = socket.gethostbyname(socket.gethostname())
    with stage("") as made:
        side = made.side(Role(role), host=here, engine=two_lanes(role, address=here))
        say(address=[side.address.host, str(side.address.port)])
        if role == "prefill":
            side.expect()
            side.compute(SOURCE)
            side.agent.request_finished("t", True, "")
            side.wait(sent=["p-t"])
        else:
            side.reserve(Address(host, int(port)), TARGET)
            side.wait(received=["d-t"])
        right = role == "prefill" or side.holds("t", SOURCE, TARGET)
        say(lanes=[peer.lane for peer in side.agent.stats().peers], right=right, failed=side.failed)
        sys.stdin.read()  # until the test has seen both


main(*sys.argv[1:])
