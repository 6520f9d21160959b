"""The connector's worker side over an agent that only records its calls."""

from typing import Any

import pytest
from recording_agent import EXPECT, PAGES, PEER, RESERVE, RecordingAgent, agent

from kv_connector.agent.commands import AnswerPrefix, CacheCleared, Command, FailLoad, FinishPrefill, NewPages
from kv_connector.agent.reports.ledger import Reports
from kv_connector.protocol.actions import PrefixRequested
from kv_connector.protocol.requests import ComputedPages, DecodeRequest
from kv_connector.protocol.wire.content_key import chain
from kv_connector.vllm.connector import WriteImmConnector
from kv_connector.vllm.metadata import News, StepMetadata
from kv_connector.vllm.worker_side import IDLE_STEP_SECONDS, WorkerSide

__all__ = ["agent"]

LAYERS = ("model.layers.0", "model.layers.1", "model.layers.2")


class NoLastBlocks:
    """Stands for LastBlocks in an engine that reads no unwritten bytes."""

    def clear(self, request: DecodeRequest) -> None:
        pass


def worker_side(agent: RecordingAgent, layers: tuple[str, ...], last_blocks: Any = None) -> WorkerSide:
    return WorkerSide(agent, layers, agent.signal.store, last_blocks or NoLastBlocks())  # type: ignore[arg-type]


@pytest.fixture
def worker(agent: RecordingAgent) -> WorkerSide:
    return worker_side(agent, LAYERS)


def step(worker: WorkerSide, *commands: Command, hooks: tuple[str, ...] = LAYERS, **metadata: Any) -> Any:
    """Runs one engine step, in vLLM's order."""
    bound = StepMetadata(commands=commands, **metadata)
    worker.handle_preemptions(bound)
    worker.begin_step(bound)
    for name in hooks:
        worker.layer_computed(name)
    worker.end_step()
    return worker.transfer_results()


def test_each_layer_is_signalled_when_it_is_computed(agent: RecordingAgent, worker: WorkerSide) -> None:
    step(worker)
    assert agent.take_calls() == [("store", 3)], "nobody's pages are computed"
    step(worker, new_pages=(NewPages("t", PAGES, last=False),))
    assert agent.take_calls() == [
        ("no_prompt_ends", 3),
        ("pages_computed", ComputedPages("t", 3, PAGES)),
        ("store", 4),
        ("store", 5),
        ("store", 6),
    ]


# In the order of names a drafter comes before the model whose tokens it continues. An indexer's cache has no
# hook.
TANGLED = ("draft.0", "layers.0", "layers.0.indexer", "layers.1")
HOOKED = ("layers.0", "layers.1", "draft.0")


def test_layers_are_signalled_as_their_hooks_come_whatever_their_names(agent: RecordingAgent) -> None:
    worker = worker_side(agent, TANGLED)
    pages = NewPages("t", PAGES, last=False)
    step(worker, hooks=HOOKED, new_pages=(pages,))
    stores = [call for call in agent.take_calls() if call[0] == "store"]
    assert stores == [("store", 2), ("store", 4)], "the order is not known yet: late, not early"
    step(worker, hooks=HOOKED, new_pages=(pages,))
    assert agent.take_calls() == [
        ("order_layers", 4, (1, 3, 0, 2)),
        ("no_prompt_ends", 4),
        ("pages_computed", ComputedPages("t", 4, PAGES)),
        ("store", 5),
        ("store", 6),
        ("store", 7),
        ("store", 8),
    ]


@pytest.mark.parametrize("hooks", [LAYERS, ()], ids=["hooked", "swept"])
def test_the_prefills_end_is_noted_right_before_its_last_layer(
    agent: RecordingAgent, worker: WorkerSide, hooks: tuple[str, ...]
) -> None:
    step(worker, hooks=hooks, new_pages=(NewPages("a", PAGES, last=True), NewPages("b", PAGES, last=False)))
    assert agent.take_calls()[-2:] == [("note_prefill_end", ["a"]), ("store", 3)]
    step(worker)
    assert "note_prefill_end" not in [call[0] for call in agent.take_calls()]


def test_preempted_blocks_are_drained_before_anything_else(agent: RecordingAgent, worker: WorkerSide) -> None:
    step(worker, EXPECT, preempted=("t",), new_pages=(NewPages("t", PAGES, last=True),))
    assert [call[0] for call in agent.take_calls()][:3] == ["preempt", "expect", "pages_computed"]


def test_waiting_transfers_are_listed_when_they_change(agent: RecordingAgent, worker: WorkerSide) -> None:
    step(worker, waiting=(("t", PEER),))
    assert agent.take_calls()[0] == ("set_waiting", (("t", PEER),))
    step(worker, waiting=())
    assert agent.take_calls()[0] == ("set_waiting", ())
    step(worker)
    assert "set_waiting" not in [call[0] for call in agent.take_calls()]


def test_ended_requests_are_reported_at_the_steps_end(agent: RecordingAgent, worker: WorkerSide) -> None:
    agent.reports = Reports(finished_sending={"p"}, finished_recving={"good", "bad"}, failed_recving={"bad"})
    results = step(worker, FinishPrefill("p", "t", True, ""), FailLoad("broken"))
    assert results.finished_sending == {"p"}
    assert results.finished_recving == {"good", "bad", "broken"}
    assert results.failed_recving == {"bad", "broken"}
    results = step(worker)
    assert results.finished_sending == results.finished_recving == results.failed_recving == set()


def test_single_layers_are_not_signalled_where_their_pages_wait_anyway(
    agent: RecordingAgent, worker: WorkerSide
) -> None:
    agent.by_layer = False
    step(worker, new_pages=(NewPages("t", PAGES, last=False),))
    assert [call for call in agent.take_calls() if call[0] == "store"] == [("store", 3)]


def test_the_agent_holds_off_while_a_prompts_step_is_launched(
    agent: RecordingAgent, worker: WorkerSide
) -> None:
    prompts = StepMetadata(commands=(EXPECT,), new_pages=(NewPages("t", PAGES, last=True),))
    worker.handle_preemptions(prompts)
    assert agent.held == 0, "while its inputs are prepared, and before it hears of anything"
    worker.begin_step(prompts)
    assert agent.held == 0
    for name in LAYERS:
        worker.layer_computed(name)
    assert agent.held == 0
    worker.end_step()
    assert agent.held is None
    worker.handle_preemptions(StepMetadata(commands=(EXPECT,)))
    assert agent.held is None, "nobody's pages are computed"


def test_a_forward_pass_that_raised_computes_nothing_more(agent: RecordingAgent, worker: WorkerSide) -> None:
    """Model runner V1 ends the step in a `finally`. The pages of the later layers are old bytes."""
    connector = object.__new__(WriteImmConnector)
    connector.worker = worker
    prompts = StepMetadata(commands=(EXPECT,), new_pages=(NewPages("t", PAGES, last=True),))
    worker.handle_preemptions(prompts)
    worker.begin_step(prompts)
    worker.layer_computed(LAYERS[0])

    def forward() -> None:
        try:
            raise ZeroDivisionError
        finally:
            connector.wait_for_save()

    with pytest.raises(ZeroDivisionError):
        forward()
    assert agent.held is None, "the agent goes on"
    step(worker, new_pages=(NewPages("u", PAGES, last=True),))
    assert [call for call in agent.take_calls() if call[0] == "store"] == [("store", 1)]


@pytest.mark.parametrize("hooks", [(), LAYERS[:1]], ids=["full graph", "layer by layer"])
def test_a_step_queued_behind_one_that_raised_computes_nothing(
    agent: RecordingAgent, worker: WorkerSide, hooks: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Model runner V2, and V1 with a drafter, do not end the step that raised. The queued one runs."""
    worker.begin_step(StepMetadata(commands=(EXPECT,), new_pages=(NewPages("t", PAGES, last=True),)))
    for name in hooks:
        worker.layer_computed(name)
    for transfer in ("u", "v"):
        step(worker, new_pages=(NewPages(transfer, PAGES, last=True),))
    stores = [call for call in agent.take_calls() if call[0] == "store"]
    assert stores == [("store", 1)] * len(hooks)
    assert [record.message for record in caplog.records] == [
        "a forward pass failed: this engine sends no further pages of its running prompts"
    ]


def test_steps_that_vllm_never_ends_are_late_and_not_abandoned(agent: RecordingAgent) -> None:
    """Model runner V1 does so with a drafter, on a pipeline stage that is not the last."""
    worker = WorkerSide(agent, LAYERS, agent.signal.store, NoLastBlocks(), ends_every_step=False)  # type: ignore[arg-type]
    for transfer in ("t", "u"):
        worker.begin_step(StepMetadata(new_pages=(NewPages(transfer, PAGES, last=True),)))
    worker.layer_computed(LAYERS[0])
    assert agent.take_calls()[-1] == ("store", 4)


def test_a_steps_preemptions_are_drained_once_if_vllm_names_them_twice(
    agent: RecordingAgent, worker: WorkerSide
) -> None:
    """In model runner V2 the connector adds a hook in update_requests, before V2's own hook."""
    preempts = [StepMetadata(preempted=("t",)), StepMetadata(preempted=("t",))]
    for metadata in preempts:
        worker.handle_preemptions(metadata)
        worker.handle_preemptions(metadata)
    assert agent.take_calls() == [("preempt", ("t",))] * 2


def test_every_step_is_noted(agent: RecordingAgent, worker: WorkerSide) -> None:
    step(worker)
    step(worker, computes=False)
    assert agent.steps == 2


def test_a_cleared_cache_is_passed_on_before_new_pages(agent: RecordingAgent, worker: WorkerSide) -> None:
    step(worker, CacheCleared(), new_pages=(NewPages("t", PAGES, True),))
    names = [call[0] for call in agent.take_calls()]
    assert names.index("cache_cleared") < names.index("pages_computed")


def test_reservations_are_passed_on_where_there_are_any(worker: WorkerSide, agent: RecordingAgent) -> None:
    found = [{"a", "b"}, set()]
    agent.take_reserved = lambda: found.pop(0)  # type: ignore[attr-defined]
    first = worker.news()
    assert first == News({"a", "b"})
    assert first.aggregate(News({"c"}, {"d": 7})) == News({"a", "b", "c"}, {"d": 7})
    assert worker.news() is None


def test_worker_passes_questions_of_borrowers_on_once(worker: WorkerSide, agent: RecordingAgent) -> None:
    agent.take_reserved = set  # type: ignore[attr-defined]
    requests = [PrefixRequested(name, chain(range(32), 16), 0, 16) for name in ("x", "y")]
    agent.prefix_requests = requests[:1]
    news = worker.news()
    assert news == News(requested=requests[:1])
    assert news.aggregate(News(requested=requests[1:])).requested == requests
    assert worker.news() is None


def test_commands_that_follow_pages_come_after_them(worker: WorkerSide, agent: RecordingAgent) -> None:
    step(worker, EXPECT, new_pages=(NewPages("t", PAGES, True),), after_pages=(AnswerPrefix("t", 32),))
    names = [call[0] for call in agent.take_calls()]
    order = [names.index(name) for name in ("expect", "pages_computed", "answer_prefix")]
    assert order == sorted(order)


def test_token_sampled_by_prefill_is_passed_on_with_the_end_of_its_load(
    agent: RecordingAgent, worker: WorkerSide
) -> None:
    agent.take_reserved = set  # type: ignore[attr-defined]
    agent.reports = Reports(finished_recving={"d"}, sampled={"d": 7})
    step(worker)
    assert worker.news() == News(set(), {"d": 7})
    assert worker.news() is None


def test_a_stale_load_is_no_failure_and_its_pages_are_void(agent: RecordingAgent, worker: WorkerSide) -> None:
    agent.take_reserved = set  # type: ignore[attr-defined]
    agent.reports = Reports(
        finished_recving={"stale", "bad"}, failed_recving={"stale", "bad"}, stale={"stale"}
    )
    results = step(worker)
    assert (results.finished_recving, results.failed_recving) == ({"stale", "bad"}, {"bad"})
    news = worker.news()
    assert news == News(discarded={"stale"})
    assert news.aggregate(News(discarded={"other"})) == News(discarded={"stale", "other"})
    assert worker.news() is None


def test_a_pause_between_idle_steps_ends_with_news_and_none_delays_news(
    agent: RecordingAgent, worker: WorkerSide
) -> None:
    def pauses() -> list[tuple[Any, ...]]:
        worker.pause(0.001)
        return [call for call in agent.take_calls() if call[0] == "await_news"]

    step(worker, RESERVE, computes=False)
    agent.take_calls()
    assert pauses() == [("await_news", 0.001)]
    agent.reports = Reports(finished_recving={"d"})
    step(worker, computes=False)
    agent.take_calls()
    assert [pauses() for _ in range(3)] == [[], [], [("await_news", 0.001)]]
    step(worker)  # its tokens end prompts
    agent.take_calls()
    assert [pauses() for _ in range(2)] == [[], [("await_news", 0.001)]]


def test_a_step_that_computes_nothing_waits_a_moment_for_news(
    agent: RecordingAgent, worker: WorkerSide
) -> None:
    step(worker)
    assert "await_news" not in [call[0] for call in agent.take_calls()]
    step(worker, RESERVE, computes=False)
    assert agent.take_calls()[-1] == ("await_news", IDLE_STEP_SECONDS)
    step(worker, FailLoad("d"), computes=False)
    assert "await_news" not in [call[0] for call in agent.take_calls()], "there is news already"


def test_blocks_are_cleared_before_the_reservation_goes_out(agent: RecordingAgent) -> None:
    class LastBlocks:
        def clear(self, request: DecodeRequest) -> None:
            assert agent.take_calls() == []
            cleared.append(request)
            if len(cleared) > 1:
                raise RuntimeError("the device is gone")

    cleared: list[DecodeRequest] = []
    worker = worker_side(agent, LAYERS, LastBlocks())
    step(worker, RESERVE)
    assert cleared == [RESERVE]
    assert ("reserve", RESERVE) in agent.take_calls()
    reports = step(worker, RESERVE)
    assert reports.failed_recving == {RESERVE.request_id}
    assert ("reserve", RESERVE) not in agent.take_calls()
