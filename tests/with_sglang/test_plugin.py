"""The parts of this package that SGLang loads at its start."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from kv_connector.sglang import plugin
from kv_connector.sglang.internals import SUPPORTED, UnsupportedSglang, check_release
from kv_connector.sglang.manager import Manager
from kv_connector.sglang.polls import Poll
from kv_connector.sglang.receiver import Receiver
from kv_connector.sglang.sender import Sender

LOADED = """
import sys
from types import SimpleNamespace
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES
from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class
assert "write_imm" in DISAGG_TRANSFER_BACKEND_CHOICES
ours = TransferBackend("write_imm")
assert ours is TransferBackend["WRITE_IMM"] and ours in list(TransferBackend)
assert "kv_connector._native" not in sys.modules, "a frontend needs no transfer engine"
for kind in KVClassType:
    print(kind.value, get_kv_class(ours, kind).__name__, get_kv_class(TransferBackend.FAKE, kind))
"""


def test_sglang_finds_the_backend_by_its_entry_point() -> None:
    answer = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    found = {words[0]: words[1] for line in answer.stdout.splitlines() if (words := line.split(" ", 2))[1:]}
    assert found == {
        "kvargs": "KVArgs",
        "manager": Manager.__name__,
        "sender": Sender.__name__,
        "receiver": Receiver.__name__,
        "bootstrap_server": "CommonKVBootstrapServer",
    }
    assert "FakeKVManager" in answer.stdout


def test_another_release_is_refused_with_what_to_install() -> None:
    check_release(SUPPORTED[-1])
    with pytest.raises(UnsupportedSglang, match=r"this is SGLang 0\.5\.22\. Install sglang==0\.5\.23"):
        check_release("0.5.22")


def test_our_words_for_polls_are_sglangs() -> None:
    from sglang.srt.disaggregation.base.conn import KVPoll

    theirs = {name: value for name, value in vars(KVPoll).items() if isinstance(value, int)}
    assert theirs == {
        "Failed": Poll.FAILED,
        "Bootstrapping": Poll.BOOTSTRAPPING,
        "WaitingForInput": Poll.WAITING_FOR_INPUT,
        "Transferring": Poll.TRANSFERRING,
        "Success": Poll.SUCCESS,
    }


@pytest.mark.parametrize(("backend", "seconds"), [("write_imm", float("inf")), ("mooncake", 30.0)])
def test_pages_of_an_aborted_request_are_never_freed_by_timeout(backend: str, seconds: float) -> None:
    """SGLang would free them after a while, whatever its backend reports. With other backends it still
    does."""
    scheduler = SimpleNamespace(transfer_backend=SimpleNamespace(value=backend))
    queue = SimpleNamespace(scheduler=scheduler, deferred_kv_release_timeout=30.0)
    plugin._hold_until_drained(None, queue)
    assert queue.deferred_kv_release_timeout == seconds


def test_sglangs_queue_and_scheduler_are_hooked() -> None:
    code = (
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.disaggregation.decode import DecodeTransferQueue as queue\n"
        "from sglang.srt.plugins.hook_registry import HookRegistry\n"
        "assert hasattr(queue.__init__, '__wrapped__')\n"
        "assert 'sglang.srt.disaggregation.decode.DecodeTransferQueue.__init__' in HookRegistry._patched\n"
        "for name in ('__init__', 'on_idle', 'record_weight_version_change', 'pause_generation',\n"
        "             'continue_generation', 'abort_request', 'ingest_requests'):\n"
        "    assert f'sglang.srt.managers.scheduler.Scheduler.{name}' in HookRegistry._patched\n"
        "for name in ('_create_receiver_and_enqueue', '_init_receiver'):\n"
        "    assert f'sglang.srt.disaggregation.decode.DecodePreallocQueue.{name}' in HookRegistry._patched\n"
        "from sglang.srt.entrypoints.warmup import _warmup_registry\n"
        "assert 'write_imm' in _warmup_registry\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def scheduler_of(backend: str, rested: list[object], **queues: object) -> SimpleNamespace:
    manager = SimpleNamespace(
        rest=rested.append,
        note_weights=lambda pushed: rested.append(f"weights {pushed}".strip()),
        forget_checkpoint=lambda: rested.append("unnamed"),
    )
    queue = SimpleNamespace(kv_manager=manager)
    found = dict.fromkeys(("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue"))
    found |= dict.fromkeys(queues, queue)
    return SimpleNamespace(
        transfer_backend=SimpleNamespace(value=backend), recv_from_tokenizer="its socket", **found
    )


@pytest.mark.parametrize("queue", ["disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue"])
def test_a_scheduler_with_nothing_to_compute_rests(queue: str) -> None:
    rested: list[object] = []
    plugin._rest(None, scheduler_of("write_imm", rested, **{queue: True}))
    assert rested == ["its socket"]


def test_schedulers_of_others_do_not_rest() -> None:
    rested: list[object] = []
    plugin._rest(None, scheduler_of("mooncake", rested, disagg_decode_prealloc_queue=True))
    plugin._rest(None, scheduler_of("write_imm", rested))  # prefills and decodes by itself
    assert not rested


def test_a_new_weight_version_of_our_schedulers_is_noted() -> None:
    noted: list[object] = []
    plugin._note_weights(None, scheduler_of("write_imm", noted, disagg_decode_prealloc_queue=True), "v1")
    plugin._note_weights(None, scheduler_of("mooncake", noted, disagg_decode_prealloc_queue=True), "v1")
    plugin._note_weights(None, scheduler_of("write_imm", noted), "v1")
    assert noted == ["weights"]
    takes_weights = scheduler_of("write_imm", noted, disagg_decode_prealloc_queue=True)
    takes_weights.kv_connector_weights = SimpleNamespace(served="v1#00000000")
    plugin._note_weights(None, takes_weights, "v1")
    assert noted == ["weights", "weights v1#00000000"]


def test_version_change_is_recorded_and_then_noted() -> None:
    """SGLang calls it with a keyword."""
    recorded: list[object] = []
    ours = scheduler_of("write_imm", recorded, disagg_prefill_bootstrap_queue=True)
    plugin._record_weights(lambda scheduler, version: recorded.append(version), ours, new_version="v1")
    assert recorded == ["v1"]


def test_an_update_without_a_version_drops_the_identity_of_the_checkpoint() -> None:
    """A pushed version has its name only after its update."""
    noted: list[object] = []
    ours = scheduler_of("write_imm", noted, disagg_decode_prealloc_queue=True)
    plugin._note_weights(None, ours, new_version=None)
    plugin._note_weights(None, scheduler_of("write_imm", noted), new_version=None)
    assert noted == ["unnamed"]


@pytest.mark.parametrize("lacking", ["module", "function", "option"])
def test_scheduler_of_a_release_without_the_option_starts(
    lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt import runtime_context

    if lacking == "module":
        monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", None)
    elif lacking == "function":
        monkeypatch.delattr(runtime_context, "get_model")
    else:
        monkeypatch.setattr(runtime_context, "get_model", SimpleNamespace)
    plugin._start_weights(None, "a scheduler")


def test_scheduler_takes_weights_only_with_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import runtime_context

    from kv_connector.sglang.weights import worker

    started: list[object] = []
    monkeypatch.setattr(worker, "start_worker", started.append)
    loaders: list[list[str] | None] = [None, [], ["another.loader"], ["another.loader", plugin.LOADER]]
    for loader in loaders:
        model = SimpleNamespace(custom_weight_loader=loader)
        monkeypatch.setattr(runtime_context, "get_model", lambda model=model: model)
        plugin._start_weights(None, f"with {loader}")
    assert started == [f"with {loaders[-1]}"]
