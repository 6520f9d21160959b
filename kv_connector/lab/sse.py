"""Server-sent events as vLLM and SGLang write them: each a line that begins with "data: "."""


class Events:
    """Of one answer, whose bytes come cut anywhere. Lines end at a newline alone: httpx's own end at U+0085
    and U+2028, too, which a text may have."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The JSON of the events that are whole by now, without vLLM's last word."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        events = (line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: "))
        return [event for event in events if event != b"[DONE]"]
