"""BodyParser: parses long bodies in a separate process, outside the event loop.

msgspec holds the interpreter's lock while it reads, so a thread would stop the event loop as well: 60 MiB of
token ids take 0.15 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys

import msgspec

from kv_connector.router.bodies import parser_process
from kv_connector.router.bodies.fields import PASSED_ON, BodyError, Fields, Shapes, named, parse
from kv_connector.router.bodies.parser_process import ANSWER, REQUEST, Field, Parsed, WantedParts, read
from kv_connector.router.failure import bad_request, overloaded

# Longer bodies go to the child process. A text of this length holds the event loop for 0.1 ms, and a body
# that is made to be slow for 2.6 ms (docs/benchmarks/2026-11-29-placement.md).
# The child needs 4 to 7 ms for 256 KiB, none of them in the event loop (two cores at load 5, 2026-11-28).
LONG = 128 << 10
# 60 MiB took 0.3 to 0.9 s on that machine.
_LONGEST_S = 30.0


class BodyParser:
    """Parses request bodies, the long ones in a child process, which starts with the first long body.

    Used from the event loop's thread only.
    """

    def __init__(self, *, prompts: bool = True) -> None:
        """``prompts``: whether prompts will be looked at. The child process reads the long ones."""
        self._wanted = WantedParts.PROMPT if prompts else WantedParts.FIELDS
        self._turn = asyncio.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    async def fields(self, raw: bytes | memoryview) -> Fields:
        """Reads a body; Failure 400 if it is not a JSON object, 503 if the child process has ended."""
        try:
            if len(raw) <= LONG:
                return parse(raw)
            parsed = await self._ask(raw, self._wanted)
            if parsed.refusal is not None:
                raise BodyError(parsed.refusal)
        except BodyError as error:
            raise bad_request(str(error)) from None
        view = memoryview(raw)
        long = [field for field in parsed.fields if field.shape is not None]
        return Fields(
            _values(view, parsed.fields),
            None if parsed.xargs is None else _values(view, parsed.xargs),
            Shapes(
                {field.name: field.shape for field in long if field.shape},
                {field.name: field.texts for field in long if field.name in PASSED_ON},
            ),
        )

    async def model(self, raw: bytes | memoryview) -> str | None:
        """Returns the model that a body names; Failure 503 if the child process has ended."""
        if len(raw) <= LONG:
            return named(raw)
        return (await self._ask(raw, WantedParts.MODEL)).model

    async def close(self) -> None:
        """Ends the child process."""
        if self._child is not None:
            self._child.kill()
        async with self._turn:
            if self._child is not None:
                await asyncio.to_thread(self._end, self._child)

    async def _ask(self, raw: bytes | memoryview, wanted: WantedParts) -> Parsed:
        async with self._turn:
            asking = asyncio.ensure_future(asyncio.to_thread(self._exchange, raw, wanted))
            try:
                async with asyncio.timeout(_LONGEST_S):
                    return await asyncio.shield(asking)
            except (OSError, EOFError) as error:  # a TimeoutError is an OSError
                raise overloaded(
                    f"the router's parser process did not answer: {type(error).__name__}. Retry the request"
                ) from error
            finally:
                # The thread uses the body, which must count as long, and the child, which no other request
                # may use meanwhile.
                while not asking.done():
                    if self._child is not None:
                        self._child.kill()
                    # another cancellation during the cleanup
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait({asking})
                asking.exception()  # retrieves the exception: it was raised above, or is not needed

    def _exchange(self, raw: bytes | memoryview, wanted: WantedParts) -> Parsed:
        """Sends the body to the child and reads the answer, in a thread. It waits without the interpreter's
        lock."""
        child = self._child
        if child is not None and child.poll() is not None:
            self._end(child)
            child = None
        if child is None:
            # The child gets this process's module path. Without -P, files of the working directory would come
            # first.
            command = [sys.executable, "-P", "-m", parser_process.__name__]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            child = self._child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
            )
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(REQUEST.pack(wanted, len(raw)))
            child.stdin.write(raw)
            child.stdin.flush()
            (nbytes,) = ANSWER.unpack(read(child.stdout, ANSWER.size))
            return msgspec.msgpack.decode(read(child.stdout, nbytes), type=Parsed)
        except BaseException:
            self._end(child)
            raise

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        self._child = None
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # a part of a body is in its buffer
                pipe.close()


def _values(view: memoryview, fields: list[Field]) -> dict[str, msgspec.Raw]:
    return {field.name: msgspec.Raw(view[field.start : field.end]) for field in fields}
