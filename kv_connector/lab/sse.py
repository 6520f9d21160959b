"""Server-sent events as vLLM and SGLang write them: each is a line that begins with "data: "."""


class Events:
    """The events of one answer, whose bytes arrive cut anywhere.

    Only a newline ends a line. httpx's own lines end at U+0085 and U+2028, too, which a text may contain.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Returns the JSON of the events that are complete by now, without vLLM's final "[DONE]"."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        # A proxy or another server may end lines with CR LF.
        events = (line.removeprefix(b"data: ").strip() for line in lines if line.startswith(b"data: "))
        return [event for event in events if event != b"[DONE]"]
