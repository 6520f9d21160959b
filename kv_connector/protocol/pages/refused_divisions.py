"""The ways in which an engine may be divided among ranks and batches: by tensors, layers and data."""

from __future__ import annotations


def division_problem(decode_context: int, prefill_context: int, microbatches: bool) -> str | None:
    """Why an engine that also divides its contexts or its batches is refused at its start, or None."""
    for name, value in (
        ("--decode-context-parallel-size", decode_context),
        ("--prefill-context-parallel-size", prefill_context),
    ):
        if value > 1:
            return f"WriteImmConnector does not support {name} {value} yet: set it to 1."
    if microbatches:
        return "WriteImmConnector does not support microbatches yet: turn --enable-dbo and --ubatch-size off."
    return None
