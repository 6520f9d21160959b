"""Reading an answer's events, wherever its bytes are cut."""

import json

from kv_connector.lab.sse import Events


def test_events_are_whole_whatever_is_in_their_text() -> None:
    texts = ["a", "\x85 and \u2028 end no line", "é漢😀"]
    data = "".join(f"data: {json.dumps({'text': text}, ensure_ascii=False)}\n\n" for text in texts)
    answer = (f": a comment\n\n{data}" + "data: [DONE]\n\n").encode()
    for size in (1, 7, len(answer)):
        events, found = Events(), []
        for first in range(0, len(answer), size):
            found += events.feed(answer[first : first + size])
        assert [json.loads(event)["text"] for event in found] == texts
