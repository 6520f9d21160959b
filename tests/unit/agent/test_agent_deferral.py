"""A decode agent that waits for its prompt without blocks, over real sockets."""

from __future__ import annotations

from agent_pairs import SOURCE, TARGET, sim
from agent_setup import AgentSide, AgentStage, until

__all__ = ["sim"]


def due(decode: AgentSide) -> set[str]:
    """Waits until a deferred transfer may take blocks."""
    found: set[str] = set()
    until(lambda: found.update(decode.agent.take_prompts_due()) or found, "the notice")
    return found


def test_decode_gets_the_notice_before_a_page_is_computed(sim: AgentStage) -> None:
    prefill, decode = sim.pair()
    decode.agent.defer("t", prefill.address)
    prefill.expect()
    prefill.agent.prompt_next("t")
    assert due(decode) == {"t"}
    assert decode.agent.live().idle
    decode.reserve(prefill.address, TARGET)
    prefill.compute(SOURCE)
    prefill.agent.request_finished("t", ok=True)
    decode.wait(received=["d-t"])
    assert decode.holds("t", SOURCE, TARGET)
    prefill.wait(sent=["p-t"])


def test_await_news_returns_with_the_notice(sim: AgentStage) -> None:
    prefill, decode = sim.pair()
    prefill.expect()
    prefill.agent.prompt_next("t")
    decode.agent.defer("t", prefill.address)
    decode.agent.await_news(60.0)
    assert decode.agent.take_prompts_due() == {"t"}


def test_decode_does_not_wait_for_an_engine_that_is_gone(sim: AgentStage) -> None:
    prefill, decode = sim.pair()
    decode.agent.defer("t", prefill.address)
    until(lambda: len(prefill.agent._effects.prefill._due_notices) == 1, "DEFER")
    prefill.agent.close()
    assert due(decode) == {"t"}
