"""One agent in a process of its own, for test_agent_namespaces: a prefill agent that serves one transfer, or
a decode agent that receives it from the port in the second argument. Prints a line of JSON for each stage."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from agent_setup import stage, two_lanes

from kv_connector.protocol.actions import Address
from kv_connector.protocol.messages import Role

SOURCE, TARGET = (1, 2, 3), (11, 12, 13)


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def main(role: str, port: str = "") -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    with stage("") as made:
        side = made.side(Role(role), engine=two_lanes(role))
        say(port=side.address.port)
        if role == "prefill":
            side.expect()
            side.compute(SOURCE)
            side.agent.finished("t", True, "")
            side.wait(sent=["p-t"])
        else:
            side.reserve(Address("127.0.0.1", int(port)), TARGET)
            side.wait(received=["d-t"])
        right = role == "prefill" or side.holds("t", SOURCE, TARGET)
        say(lanes=[peer.lane for peer in side.agent.stats().peers], right=right, failed=side.failed)
        sys.stdin.read()  # until the test has seen both


main(*sys.argv[1:])
