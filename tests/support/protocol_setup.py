"""Small layouts, requests and messages that the protocol tests share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from kv_connector.protocol.actions import Address
from kv_connector.protocol.pages.geometry import Place, opaque_page
from kv_connector.protocol.pages.layout import GroupLayout, GroupTarget, KvLayout, LayerLayout
from kv_connector.protocol.plans.plan import Plan
from kv_connector.protocol.plans.runs import Misfit
from kv_connector.protocol.requests import ComputedPages, DecodeRequest, GroupPages, PrefillRequest
from kv_connector.protocol.wire.messages import Fingerprint, Rank, Recalled, Reserve, Role, Wants, fingerprint
from kv_connector.protocol.wire.timeline import About, LayerSpan, Receiving, Sending

HASH = bytes(range(16))
BLOCK = 16  # tokens
PAGE = 64  # bytes
P_ADDRESS = Address("127.0.0.1", 5600)

T = TypeVar("T")


def layout(
    groups: Sequence[int] = (2,),
    num_blocks: int = 64,
    stride: int = PAGE,
    page: int = PAGE,
    holder: tuple[int, int] | None = None,
) -> KvLayout:
    """Returns one region. ``groups``: number of layers of each group; the groups' layers alternate.

    ``holder``: as in opaque_page.
    """
    owners = [group for turn in range(max(groups)) for group, layers in enumerate(groups) if turn < layers]
    places = [Place(0, k * num_blocks * stride, stride) for k in range(len(owners))]
    return KvLayout(
        groups=tuple(
            GroupLayout(num_blocks, BLOCK, "full" if i == 0 else "sliding_window") for i in range(len(groups))
        ),
        layers=tuple(
            LayerLayout(f"layer{k}", group, "", opaque_page(place, page, holder))
            for k, (group, place) in enumerate(zip(owners, places, strict=True))
        ),
    )


def with_rows(pages: KvLayout, rows: int) -> KvLayout:
    """Returns the layout with rows in place of the last group's blocks."""
    return msgspec.structs.replace(pages, groups=(*pages.groups[:-1], GroupLayout(rows, 0, "state")))


def region_bytes(pages: KvLayout) -> int:
    return pages.bytes_per_region()[0]


# Advice to operators, by the names of ``pairs``. Nothing is known of "engine".
ADVICE = {
    "model": "serve the same model on both sides",
    "dtype": "give both sides the same dtype",
    "block_sizes": "give both sides the same block size",
    "page_bytes": "give both sides pages of one size",
    "layers": "serve the same layers on both sides",
    "ranks": "give both sides as many ranks",
}


def pairs(**changes: str | tuple[str, ...]) -> Fingerprint:
    values: dict[str, str | tuple[str, ...]] = {
        "engine": "engine 1.0",
        "model": "llama",
        "dtype": "bfloat16",
        "block_sizes": (str(BLOCK),),
        "page_bytes": (str(PAGE), str(PAGE)),
        "layers": ("layer0", "layer1"),
        "ranks": "1",
    }
    return fingerprint(values | changes)


def prefill_request(
    transfer: str = "t", tokens: int = 3 * BLOCK, prompt_hash: bytes | None = HASH, request: str | None = None
) -> PrefillRequest:
    return PrefillRequest(request or f"p-{transfer}", transfer, tokens, prompt_hash)


def computed(
    blocks: Iterable[int],
    first: int = 0,
    base: int | None = 0,
    transfer: str = "t",
    more: Sequence[Sequence[int]] = (),
) -> ComputedPages:
    """Returns pages of group 0 from logical block ``first`` on. ``more``: pages of the further groups, from 0
    on."""
    groups = (GroupPages(first, tuple(blocks)), *(GroupPages(0, tuple(other)) for other in more))
    return ComputedPages(transfer, base, groups)


def reserve(
    blocks: Iterable[int] = (11, 12, 13),
    transfer: str = "t",
    attempt: int = 1,
    tokens: int = 3 * BLOCK,
    prompt_hash: bytes | None = HASH,
    deadline_ms: int = 300_000,
    more: Sequence[Sequence[int]] = (),
    share: int = 0,
    shares: int = 1,
) -> Reserve:
    return Reserve(
        transfer_id=transfer,
        attempt=attempt,
        prompt_tokens=tokens,
        first_token=0,
        prompt_hash=prompt_hash,
        groups=(GroupTarget(0, tuple(blocks)), *(GroupTarget(0, tuple(other)) for other in more)),
        immediate=100,
        deadline_ms=deadline_ms,
        share=share,
        shares=shares,
    )


def decode_request(
    transfer: str = "t",
    blocks: Iterable[int] = (11, 12, 13),
    request: str | None = None,
    engine: Address = P_ADDRESS,
    tokens: int = 3 * BLOCK,
    prompt_hash: bytes | None = HASH,
) -> DecodeRequest:
    groups = (GroupTarget(0, tuple(blocks)),)
    return DecodeRequest(request or f"d-{transfer}", transfer, engine, tokens, 0, prompt_hash, groups)


def worker(
    pages: KvLayout, address: Address = P_ADDRESS, stage: int = 0, layers: Iterable[int] | None = None
) -> Rank:
    """Returns one of an engine's workers, with all of these pages or those of some layers."""
    some = pages.layers if layers is None else tuple(pages.layers[layer] for layer in layers)
    return Rank(address.host, address.port, stage, msgspec.structs.replace(pages, layers=some))


def all_of(pages: KvLayout) -> Wants:
    """Returns every part of every layer."""
    return tuple(tuple(range(len(layer.parts))) for layer in pages.layers)


def misfit(source: KvLayout, target: KvLayout) -> str:
    """Returns why no plan exists; empty if one does."""
    try:
        Plan(source, target)
    except Misfit as problem:
        return str(problem)
    return ""


def only(actions: Sequence[object], kind: type[T]) -> T:
    """Returns the only action of that kind."""
    found = every(actions, kind)
    assert len(found) == 1, f"{len(found)} x {kind.__name__} in {actions}"
    return found[0]


def every(actions: Sequence[object], kind: type[T]) -> list[T]:
    return [action for action in actions if isinstance(action, kind)]


def recalled() -> Recalled:
    """Returns a worker's timelines, one of each kind."""
    about = About("t", "r", "peer", "tcp", 1, 9, "completed")
    return Recalled(
        engine_id="e",
        rank=0,
        role=Role.BOTH,
        host="boot",
        now=10,
        kept=4,
        lost=0,
        layers=("layer0", "layer1"),
        others=(("10.0.0.1", 5601),),
        sent=(Sending(about, 0, 64, (2, 5), (LayerSpan(0, 3, 4, 4, 6, 1), LayerSpan(1, 5, 6, 7, 8, 2))),),
        received=(Receiving(about, 3, ((6, 1), (8, 3))),),
    )
