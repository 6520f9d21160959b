"""Report: the result of a run as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from kv_connector.cli.verify.run import AnswerFault, AnswerFaultKind, Result

# Unstable canaries that are named.
_NAMED = 5

_HEADS = {
    AnswerFaultKind.DIFFERENT: "WRONG ANSWER",
    AnswerFaultKind.EMPTY: "EMPTY ANSWER",
    AnswerFaultKind.ERROR: "NO ANSWER",
    AnswerFaultKind.LOCAL: "LOCAL PREFILL",
}


def lines(result: Result) -> Iterator[str]:
    yield from (f"note: {note}" for note in result.notes)
    for one in result.unstable[:_NAMED]:
        yield f"unstable: canary {one.canary}: {one.why}"
    if len(result.unstable) > _NAMED:
        yield f"unstable: {len(result.unstable) - _NAMED} more canaries"
    if result.alike:
        yield (
            f"note: {result.alike} canaries share their answer with another one. Exchanged answers of these "
            "canaries are not noticed"
        )
    if result.transfers is not None and result.transfers.completed is None:
        yield "note: the metrics of decode engines are not readable. Only the router's count is checked"
    for fault in result.faults:
        yield from _fault(fault, result)
    if result.equal:
        skipped = f", not counted: {len(result.unstable)}" if result.unstable else ""
        yield (
            f"EQUAL: {result.compared} answers to {result.canaries} canaries are those of the reference"
            f"{skipped} ({result.seconds:.1f} s)"
        )
    elif not result.faults:
        yield (
            f"NOT CHECKED: none of {result.canaries} canaries has a stable answer of the reference. Name "
            "another reference, or lower --max-tokens"
        )


def _fault(fault: AnswerFault, result: Result) -> Iterator[str]:
    if fault.canary is None:
        yield f"{_HEADS[fault.kind]}: {fault.words}"
        return
    yield f"{_HEADS[fault.kind]}: canary {fault.canary} ({fault.request}): {fault.words}"
    if fault.kind is not AnswerFaultKind.ERROR:
        yield f"  reference: {fault.expected!r}"
        yield f"  answer:    {fault.got!r}"
        if fault.expected_tokens or fault.got_tokens:
            yield f"  tokens there: reference {[*fault.expected_tokens]}, answer {[*fault.got_tokens]}"
        if fault.margin is not None:
            yield f"  the reference's second candidate is {fault.margin:.3g} nats behind there"
    if fault.answer_of:
        part = "the answer is" if not fault.position else f"from {fault.unit} {fault.position + 1} on it is"
        yield f"  {part} the answer of {_canaries(fault.answer_of)}"
    if fault.code_of:
        yield f"  the answer contains the code of {_canaries(fault.code_of)}"
    if fault.again:
        yield f"  {fault.again}"
    yield from (f"  header {name}: {value}" for name, value in fault.served_by.items())
    ids = f"  request id {fault.request_id} at {result.target}"
    if fault.reference_request_id:
        ids += f", {fault.reference_request_id} at {result.reference}"
    yield ids


def _canaries(numbers: list[int]) -> str:
    shown = " and ".join(f"canary {number}" for number in numbers[:3])
    return shown + (f" and {len(numbers) - 3} more" if len(numbers) > 3 else "")
