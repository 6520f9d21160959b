"""Attacks of a hostile peer on tcp sockets: as a stranger, and with a connection's secret."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tests.fuzz import wire
from tests.fuzz.tally import BATCH, HELD, PATIENCE, Attack, Tally
from tests.fuzz.wire import ACK, FRAME, FRAME_MAGIC, MAX_PAGES, MESSAGE, MESSAGE_SLOTS, WRITE, TcpOffer

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closed without a FIN and without TIME_WAIT


# --- Frames

_FORGED_COUNTS = (0, 1, 2, 63, 64, 65, 255, 4096, 4097, 0x7FFF, 0xFFFF)
_FORGED_WORDS = (
    *(0, 1, 2, 47, 48, 255, 4096, (1 << 20) - 1, 1 << 20, (1 << 20) + 1),
    *(1 << 31, 1 << 32, (1 << 40) - 1, 1 << 40, (1 << 40) + 1, 1 << 63),
    *((1 << 64) - (1 << 20), (1 << 64) - 4096, (1 << 64) - 64, (1 << 64) - 1),
)
# Offsets in a frame: of its count, of its 64-bit words (acknowledged, sequence, rkey, page_bytes, first
# offset), and of its 32-bit words (value, messages_taken).
_COUNT, _WORDS, _HALVES = 6, (8, 16, 24, 32, 48), (40, 44)
_LENGTHS = (_COUNT, 32, 48)


class Conversation:
    """Frames that a peer may send, numbered correctly, and frames that it may not send."""

    def __init__(self, pick: random.Random, rkey: int, nbytes: int) -> None:
        self._pick = pick
        self._bits = pick.getrandbits
        self._rkey = rkey
        self._nbytes = nbytes
        self._sequence = 0
        self._slots = list(range(MESSAGE_SLOTS))

    def frame(self) -> bytes:
        """Returns a frame that any peer may send."""
        kind = self._bits(4)
        if kind < 6:
            return self.immediate(self._bits(26) << 6, self._bits(6) + 1)
        if kind < 12:
            return self._write(1 + self._bits(2), 1 + self._bits(8))
        if kind == 12:
            return self._write(MAX_PAGES, 1 + self._bits(6))
        if kind == 13 and self._slots:
            body = wire.user_message(self._pick)
            slot = self._slots.pop(self._pick.randrange(len(self._slots)))
            return FRAME.pack(FRAME_MAGIC, MESSAGE, 0, len(body), 0, 0, 0, 0, slot, 0) + body
        return FRAME.pack(FRAME_MAGIC, ACK, self._bits(1), 0, 0, self._bits(64), 0, 0, 0, 0)

    def immediate(self, counter: int, pages: int) -> bytes:
        """Returns a frame that raises a counter and writes nothing."""
        self._sequence += 1
        value = counter | pages - 1
        return FRAME.pack(FRAME_MAGIC, WRITE, 1, pages, 0, self._sequence, self._bits(64), 0, value, 0)

    def _write(self, pages: int, nbytes: int) -> bytes:
        self._sequence += 1
        counted = self._bits(1)
        value = self._bits(26) << 6 | pages - 1
        head = FRAME.pack(FRAME_MAGIC, WRITE, counted, pages, 0, self._sequence, self._rkey, nbytes, value, 0)
        offsets = [self._pick.randrange(self._nbytes - nbytes) for _ in range(pages)]
        return head + struct.pack(f"<{pages}Q", *offsets) + self._pick.randbytes(pages * nbytes)

    def mutated(self) -> bytes:
        """Returns a frame that is nearly right. By chance it may be right."""
        data = bytearray(self.frame())
        for _ in range(self._pick.choice((1, 1, 1, 2, 4))):
            self._mutate(data)
        return bytes(data)

    def _mutate(self, data: bytearray) -> None:
        pick = self._pick
        match pick.randrange(7):
            case 0:
                data[pick.randrange(len(data))] ^= 1 << self._bits(3)
            case 1:
                at = pick.randrange(FRAME.size)
                data[at : at + 4] = pick.randbytes(4)
            case 2:
                self._forge(data, _COUNT)
            case 3:
                self._forge(data, pick.choice(_WORDS))
            case 4:
                struct.pack_into("<I", data, pick.choice(_HALVES), self._bits(32))
            case 5:
                data[4] = self._bits(3)
            case 6:
                del data[pick.randrange(len(data)) :]
                data.extend(bytes(max(FRAME.size + 8 - len(data), 0)))

    def forged(self) -> bytes:
        """Returns a frame with one wrong length: a count, the bytes of a page, or an offset."""
        data = bytearray(self.frame())
        self._forge(data, self._pick.choice(_LENGTHS))
        return bytes(data)

    def _forge(self, data: bytearray, at: int) -> None:
        if at == _COUNT:
            struct.pack_into("<H", data, at, self._pick.choice(_FORGED_COUNTS))
        elif at + 8 <= len(data):
            struct.pack_into("<Q", data, at, self._pick.choice(_FORGED_WORDS))

    def random_run(self) -> list[bytes]:
        """Returns 1 to 128 frames that any peer may send, which often precede the frame that ends the
        link."""
        return [self.frame() for _ in range(1 << self._pick.randrange(8))]


# --- Attacks

Say = Callable[[Conversation, Tally], bytes]
"""Returns the bytes to send on one link. Adds the frames that the victim certainly reads to the tally."""


class TcpAttacker:
    """The attacks. Each takes a number of frames: a connect, a broken-off handshake or a greeting is one."""

    def __init__(self, victim: Any, honest: int, seed: str) -> None:
        """`honest`: the immediate of the honest peer."""
        self._victim = victim
        self._pick = random.Random(seed)
        self._honest = honest & ~0x3F
        self._rkey = wire.described_key(playground := victim.playground())
        self._playground = playground
        (offer,) = victim.offers(1)
        self._port = TcpOffer.of(offer.data).port
        victim.fence([offer.peer])

    @property
    def attacks(self) -> dict[str, tuple[Attack, int]]:
        """Returns each attack with its share of a campaign's frames, in hundredths."""
        return {
            "floods of connects": (self.connects, 1),
            "half-open handshakes": (self.half_open, 1),
            "strangers' greetings": (self.greetings, 3),
            "guessed immediates": (self.guesses, 10),
            "forged lengths": (self.lengths, 10),
            "floods of small frames": (self.flood, 20),
            "fuzzed frames": (self.fuzzed, 55),
        }

    def held_at_most(self) -> int:
        """Returns the bytes of the victim's memory for links that are up. Some earlier links may not have
        ended yet."""
        return 2 * BATCH * MESSAGE_SLOTS * 4096

    # --- Strangers

    def connects(self, frames: int) -> Tally:
        """Connects again and again, with HELD connections open at a time."""
        return self._strangers(frames, lambda: b"")

    def greetings(self, frames: int) -> Tally:
        """Sends greetings of a link that is being made, with some bits changed and noise behind them."""
        (offer,) = self._victim.offers(1)
        right = TcpOffer.of(offer.data).hello()

        def greeting() -> bytes:
            data = bytearray(right)
            for _ in range(1 + self._pick.getrandbits(1)):
                # Without the two bytes that no code reads: the greeting must not be accepted.
                at = self._pick.choice([*range(6), *range(8, 12), *range(16, 32)])
                data[at] ^= 1 << self._pick.getrandbits(3)
            return bytes(data) + self._pick.randbytes(self._pick.randrange(200))

        tally = self._strangers(frames, greeting)
        self._victim.fence([offer.peer])
        return tally

    def _strangers(self, frames: int, greeting: Callable[[], bytes]) -> Tally:
        with contextlib.ExitStack() as stack:
            held: deque[socket.socket] = deque()
            stack.callback(lambda: [one.close() for one in held])
            for _ in range(frames):
                held.append(self._dial(self._port))
                with contextlib.suppress(OSError):  # already replaced by a newer connection
                    held[-1].send(greeting())
                if len(held) > HELD:
                    held.popleft().close()
        return Tally(frames=frames)

    # --- Handshakes that break off

    def half_open(self, frames: int) -> Tally:
        """Breaks off handshakes, as the dialling side and as the dialled side."""
        done = Tally()
        with socket.create_server(("127.0.0.1", 0), backlog=2 * BATCH) as listener:
            while done.frames < frames:
                self._half_dialled(done)
                self._half_accepted(listener, done)
        return done

    def _half_dialled(self, done: Tally) -> None:
        offers = self._victim.offers(BATCH)
        with contextlib.ExitStack() as stack:
            answers = []
            for offer in offers:
                link = TcpOffer.of(offer.data)
                # Of two connections: none, a part of a greeting, or one; with or without the answer.
                for hello in self._pick.choice(((), (link.hello()[:19],), (link.hello(1),))):
                    stack.enter_context(self._dial(link.port)).send(hello)
                if self._pick.getrandbits(1):
                    answers.append((offer.peer, link.answer(connections=2)))
            self._victim.complete(answers, self._playground)
        self._victim.fence([offer.peer for offer in offers])
        done.frames += BATCH

    def _half_accepted(self, listener: socket.socket, done: Tally) -> None:
        """Has the victim dial a listener that does not welcome it, or one with another identity."""
        port = listener.getsockname()[1]
        offers = [self._offer(port) for _ in range(BATCH)]
        answers = self._victim.accept([offer.encode("127.0.0.1") for offer in offers], self._playground)
        for _ in range(BATCH):
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(PATIENCE)
                connection.send(
                    self._pick.choice((b"", offers[0].welcome()[:11], self._offer(port).welcome()))
                )
        self._victim.fence([answer.peer for answer in answers if answer])
        done.frames += BATCH

    def _offer(self, port: int) -> TcpOffer:
        return TcpOffer(port, self._pick.getrandbits(32), self._pick.randbytes(16), self._pick.randbytes(16))

    # --- Peers that have been admitted

    def guesses(self, frames: int) -> Tally:
        """Sends random immediates, then the honest peer's own: the victim must know its raisers by the
        link."""

        def say(conversation: Conversation, tally: Tally) -> bytes:
            guesses = [
                conversation.immediate(self._pick.getrandbits(26) << 6, 1 + self._pick.getrandbits(6))
                for _ in range(self._pick.randrange(100))
            ]
            pages = 1 + self._pick.getrandbits(6)
            tally.frames += len(guesses) + 1
            tally.foreign += pages
            return b"".join(guesses) + conversation.immediate(self._honest, pages)

        return self._links(frames, say)

    def lengths(self, frames: int) -> Tally:
        def say(conversation: Conversation, tally: Tally) -> bytes:
            run = conversation.random_run()
            tally.frames += len(run) + 1
            return b"".join(run) + b"".join(conversation.forged() for _ in range(4))

        return self._links(frames, say)

    def fuzzed(self, frames: int) -> Tally:
        def say(conversation: Conversation, tally: Tally) -> bytes:
            run = conversation.random_run()
            tally.frames += len(run) + 1
            # If that frame does no harm, the next ones are read too.
            return b"".join(run) + b"".join(conversation.mutated() for _ in range(4))

        return self._links(frames, say)

    def flood(self, frames: int) -> Tally:
        """Sends as many frames as a link takes, each of which costs the victim more than its bytes."""

        def say(conversation: Conversation, tally: Tally) -> bytes:
            tally.frames += 1 << 14
            return b"".join(conversation.immediate(0xFFFF_0000, 64) for _ in range(1 << 14))

        return self._links(frames, say, at_a_time=4)

    def _links(self, frames: int, say: Say, at_a_time: int = BATCH) -> Tally:
        tally = Tally()
        while tally.frames < frames:
            offers = self._victim.offers(at_a_time)
            links = [TcpOffer.of(offer.data) for offer in offers]
            words = [say(self._conversation(), tally) for _ in links]
            with contextlib.ExitStack() as stack:
                # In every second round the victim dials.
                if self._pick.getrandbits(1):
                    dialled = [stack.enter_context(self._dial(link.port)) for link in links]
                    greetings = [link.hello() for link in links]
                    for connection, greeting in zip(dialled, greetings, strict=True):
                        connection.sendall(greeting)
                    answers = [(o.peer, link.answer()) for o, link in zip(offers, links, strict=True)]
                    taken = self._victim.complete(answers, self._something_on_its_way())
                    assert all(taken), "an honest answer was refused"
                else:
                    self._victim.fence([offer.peer for offer in offers])
                    dialled = self._be_dialled(stack, at_a_time)
                self._converse(dialled, words)
            tally.links += at_a_time
        return tally

    def _conversation(self) -> Conversation:
        return Conversation(self._pick, self._rkey, 1 << 20)

    def _something_on_its_way(self) -> bytes:
        return self._pick.choice((b"", self._playground))

    def _be_dialled(self, stack: contextlib.ExitStack, count: int) -> list[socket.socket]:
        """Returns welcomed connections of links that this side has offered."""
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=2 * BATCH))
        offer = self._offer(listener.getsockname()[1])
        answers = self._victim.accept([offer.encode("127.0.0.1")] * count, self._something_on_its_way())
        assert all(answers), "an honest offer was refused"
        dialled = []
        for _ in range(count):
            connection, _ = listener.accept()
            dialled.append(stack.enter_context(connection))
            connection.settimeout(PATIENCE)
            connection.sendall(offer.welcome())
        return dialled

    def _converse(self, dialled: Sequence[socket.socket], words: Sequence[bytes]) -> None:
        for connection, said in zip(dialled, words, strict=True):
            with contextlib.suppress(ConnectionError):  # the victim has closed the link before the end
                connection.sendall(said)
                connection.shutdown(socket.SHUT_WR)
        for connection in dialled:
            with contextlib.suppress(ConnectionError):
                while connection.recv(1 << 16):
                    pass
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    def _dial(self, port: int) -> socket.socket:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        connection.settimeout(PATIENCE)
        connection.connect(("127.0.0.1", port))
        return connection
