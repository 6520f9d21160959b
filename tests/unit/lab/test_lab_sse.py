"""Reading an answer's events, wherever its bytes are cut."""

import json

import pytest

from kv_connector.lab.sse import Events


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_events_are_whole_whatever_is_in_their_text(end: str) -> None:
    texts = ["a", "\x85 and \u2028 end no line", "é漢😀"]
    events_of = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    lines = [": a comment", *(f"data: {event}" for event in [*events_of, "[DONE]"])]
    answer = "".join(f"{line}{end}{end}" for line in lines).encode()
    for size in (1, 7, len(answer)):
        events, found = Events(), []
        for first in range(0, len(answer), size):
            found += events.feed(answer[first : first + size])
        assert [json.loads(event)["text"] for event in found] == texts
