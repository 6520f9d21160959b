"""Attacks of a hostile peer on the lanes of one machine: on their sockets and on the words that both sides
map."""

from __future__ import annotations

import array
import contextlib
import fcntl
import itertools
import mmap
import os
import random
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.fuzz import wire
from tests.fuzz.tally import BATCH, HELD, PATIENCE, Attack, Tally
from tests.fuzz.wire import (
    ADMISSION,
    CHANNEL_BYTES,
    FORGET,
    GATE,
    HEAD,
    HELLO_MESSAGE,
    LET_GO,
    MEMORY,
    MESSAGE_SLOTS,
    MESSAGE_WORDS,
    MESSAGES_WORD,
    PUT,
    RING_ENTRIES,
    RING_WORD,
    SEGMENT_BYTES,
    STARVED,
    TAIL,
    TAKEN,
    WAKE,
    WELCOME_MESSAGE,
    Invitation,
    SameHostLane,
)

Words = npt.NDArray[np.uint64]

_CHANNEL_WORDS = CHANNEL_BYTES // 8
# The region that the victim is made to write to: its place on the attacker's board, and its memfd's name.
_PLACE, _MEMFD = 5, 1
_RKEY = 7 * 16384 + _PLACE
_NBYTES = 1 << 16

_ODD_WORDS = np.array(
    [
        0,
        1,
        2,
        3,
        64,
        4095,
        4096,
        4097,
        1 << 16,
        1 << 31,
        1 << 32,
        1 << 40,
        1 << 63,
        (1 << 64) - 4096,
        (1 << 64) - 1,
    ],
    dtype=np.uint64,
)


def sealed_memory(nbytes: int, seals: int = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW) -> int:
    fd = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def _words(fd: int, nbytes: int) -> Words:
    return np.frombuffer(mmap.mmap(fd, nbytes), dtype=np.uint64)


class Seat:
    """The attacker's end of one link: its socket, and both directions of its segment."""

    def __init__(self, connection: socket.socket, segment: int, offerer: bool) -> None:
        self.socket = connection
        words = _words(segment, SEGMENT_BYTES)
        # Order of the segment: to_offerer, to_acceptor.
        halves = words[:_CHANNEL_WORDS], words[_CHANNEL_WORDS:]
        self.incoming, self.outgoing = halves if offerer else halves[::-1]
        self.incoming[ADMISSION] = (
            1  # the victim may write here; nvlink's control thread waits for it, for 100 ms
        )
        self.tail = 0

    def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        rights = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        )
        self.socket.sendmsg([data], rights)

    def raise_counters(self, immediates: npt.NDArray[np.uint32]) -> None:
        """Puts immediates into the ring. The caller leaves room for them."""
        ring = self.outgoing[RING_WORD : RING_WORD + RING_ENTRIES // 2].view(np.uint32)
        ring[(self.tail + np.arange(len(immediates))) % RING_ENTRIES] = immediates
        self.tail += len(immediates)
        self.outgoing[TAIL] = self.tail

    def put(self, slot: int, message: bytes, nbytes: int | None = None) -> None:
        """Puts a message into a slot, free or not, with its true length or another one."""
        first = MESSAGES_WORD + slot * MESSAGE_WORDS
        body = np.frombuffer(message.ljust(-(-len(message) // 8) * 8, b"\0"), dtype=np.uint64)
        self.outgoing[first + 1 : first + 1 + len(body)] = body
        self.outgoing[first] = len(message) if nbytes is None else nbytes
        self.outgoing[PUT] ^= np.uint64(1 << slot)

    def leave(self) -> None:
        """Releases what the victim maps or could write to. Otherwise the victim keeps it as long as this
        process lives."""
        self.socket.close()
        self.outgoing[GATE:TAIL] = 0
        self.outgoing[LET_GO] = (1 << 64) - 1


class SameHostAttacker:
    """The attacks on one lane. Each takes a number of frames: a connect, a message, an immediate or a
    scribble is one."""

    def __init__(self, lane: SameHostLane, victim: Any, honest: int, seed: str) -> None:
        """`honest`: the immediate of the honest peer."""
        self._lane = lane
        self._victim = victim
        self._honest = honest & ~0x3F
        self._pick = random.Random(seed)
        self._numbers = np.random.default_rng(list(seed.encode()))
        (offer,) = victim.offers(1)
        self._invitation = Invitation.of(offer.data, lane)
        victim.fence([offer.peer])
        self._names = itertools.count()
        self._memory = sealed_memory(_NBYTES)
        self._board_fd = sealed_memory(lane.board_bytes)
        self._board = _words(self._board_fd, lane.board_bytes)
        # The host lane only: a GPU's driver makes nvlink's entry of a region.
        self._region = wire.region_descriptor("host", _RKEY, _NBYTES) if lane is wire.HOST else b""
        self._describe()

    def close(self) -> None:
        os.close(self._memory)
        os.close(self._board_fd)

    @property
    def attacks(self) -> dict[str, tuple[Attack, int]]:
        """Returns each attack with its share of a campaign's frames, in hundredths."""
        return {
            "floods of connects": (self.connects, 1),
            "half-open handshakes": (self.half_open, 1),
            "strangers' greetings": (self.greetings, 3),
            "guessed immediates": (self.guesses, 10),
            "forged lengths": (self.lengths, 5),
            "floods of immediates": (self.flood, 30),
            "fuzzed messages": (self.messages, 40),
            "scribbled words": (self.scribbles, 10),
        }

    def held_at_most(self) -> int:
        """Returns the bytes of the victim's memory for links that are up. Some earlier links may not have
        ended yet.

        Most of this memory is the attacker's, which the victim maps.
        """
        return 2 * BATCH * (SEGMENT_BYTES + self._lane.board_bytes + MESSAGE_SLOTS * 4096)

    def _describe(self) -> None:
        """Writes the correct entry of the attacker's region."""
        entry = 8 + 8 * _PLACE
        self._board[entry : entry + 5] = (_RKEY, 0, _NBYTES, _MEMFD, 0)

    # --- Strangers

    def connects(self, frames: int) -> Tally:
        return self._strangers(frames, lambda connection: None)

    def greetings(self, frames: int) -> Tally:
        """Sends all greetings except the right one."""

        def greet(connection: socket.socket) -> None:
            data = wire.control(
                self._pick.choice((HELLO_MESSAGE, WELCOME_MESSAGE, WAKE)), secret=self._pick.randbytes(16)
            )
            self._say_wrongly(connection, self._mutated(data))

        return self._strangers(frames, greet)

    def _strangers(self, frames: int, greet: Callable[[socket.socket], None]) -> Tally:
        with contextlib.ExitStack() as stack:
            held: deque[socket.socket] = deque()
            stack.callback(lambda: [one.close() for one in held])
            for _ in range(frames):
                held.append(self._dial(self._invitation.socket))
                with contextlib.suppress(OSError):  # already replaced by a newer connection
                    greet(held[-1])
                if len(held) > HELD:
                    held.popleft().close()
        return Tally(frames=frames)

    def _dial(self, name: bytes) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The accept queue may be full: only a blocking socket waits for room in it.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(PATIENCE), 0))
        connection.connect(b"\0" + name)
        connection.settimeout(PATIENCE)
        return connection

    # --- Handshakes that break off

    def half_open(self, frames: int) -> Tally:
        done = Tally()
        while done.frames < frames:
            self._half_dialled(done)
            self._half_accepted(done)
        return done

    def _half_dialled(self, done: Tally) -> None:
        offers = self._victim.offers(BATCH)
        with contextlib.ExitStack() as stack:
            answers = []
            for offer in offers:
                invitation = Invitation.of(offer.data, self._lane)
                # The attacker does not dial, or dials and sends nothing, half a greeting, too little memory,
                # or all.
                match self._pick.randrange(5):
                    case 0:
                        pass
                    case 1:
                        stack.enter_context(self._dial(invitation.socket))
                    case 2:
                        connection = stack.enter_context(self._dial(invitation.socket))
                        connection.send(wire.control(HELLO_MESSAGE, secret=invitation.secret)[:20])
                    case 3:
                        connection = stack.enter_context(self._dial(invitation.socket))
                        hello = wire.control(HELLO_MESSAGE, secret=invitation.secret)
                        socket.send_fds(connection, [hello], [self._memory, self._memory])
                    case 4:
                        seat = self._hello(invitation)
                        # Sometimes it does not admit the victim's writes either.
                        seat.incoming[ADMISSION] = min(self._pick.getrandbits(3), 1)
                        stack.callback(seat.leave)
                if self._pick.getrandbits(1):
                    # If the lane's answer contains a probe: an address outside the attacker's memory.
                    probed = self._pick.randbytes(max(len(self._lane.answer_tail) - 8, 0)) + b"\1" + bytes(7)
                    tail = self._pick.choice((None, probed if self._lane.answer_tail else None))
                    answers.append((offer.peer, self._lane.answer(tail)))
            self._victim.complete(answers)
        self._victim.fence([offer.peer for offer in offers])
        done.frames += BATCH

    def pass_for_one_of_theirs(self) -> list[bool]:
        """Poses as a domain of the victim's process (nvlink). Returns whether the victim accepts that."""
        (offer,) = self._victim.offers(1)
        process = wire.offered_link(offer.data)[-8:]
        entry = 16 + 16 * _PLACE
        self._board[1:3] = (int.from_bytes(process, "little"), _PLACE + 1)
        self._board[entry : entry + 3] = (_RKEY, 4096, _NBYTES)
        seat = self._hello(Invitation.of(offer.data, self._lane))
        taken: list[bool] = self._victim.complete([(offer.peer, self._lane.answer())])
        seat.leave()
        return taken

    def _half_accepted(self, done: Tally) -> None:
        """Has the victim dial a missing listener, one that does not accept, or one that does not welcome
        it."""
        name = self._new_name()
        with self._listen(name) as listener:
            names = [self._pick.choice((name, name, b"kvc-nobody")) for _ in range(BATCH)]
            offers = [self._offer(each).encode(self._lane) for each in names]
            answers = self._victim.accept(offers, self._region)
            for _ in range(self._pick.randrange(names.count(name) + 1)):
                listener.accept()[0].close()
            self._victim.fence([answer.peer for answer in answers if answer])
        done.frames += BATCH

    def _offer(self, name: bytes) -> Invitation:
        return Invitation(self._invitation.boot_id, name, self._pick.randbytes(16))

    def _new_name(self) -> bytes:
        return f"kvc-hostile-{os.getpid()}-{next(self._names)}".encode()

    def _listen(self, name: bytes) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.settimeout(PATIENCE)
        listener.bind(b"\0" + name)
        listener.listen(2 * BATCH)
        return listener

    # --- Peers that have been admitted

    def _hello(self, invitation: Invitation) -> Seat:
        segment = sealed_memory(SEGMENT_BYTES)
        try:
            seat = Seat(self._dial(invitation.socket), segment, offerer=False)
            seat.send(wire.control(HELLO_MESSAGE, secret=invitation.secret), (segment, self._board_fd))
        finally:
            os.close(segment)
        return seat

    def _be_dialled(self, count: int) -> list[Seat]:
        """Makes links that this side has offered."""
        name = self._new_name()
        seats = []
        with self._listen(name) as listener:
            answers = self._victim.accept([self._offer(name).encode(self._lane)] * count, self._region)
            assert all(answers), "an honest offer was refused"
            for _ in range(count):
                connection, _ = listener.accept()
                connection.settimeout(PATIENCE)
                _, descriptors, _, _ = socket.recv_fds(connection, wire.CONTROL.size, 2)
                seats.append(Seat(connection, descriptors[0], offerer=True))
                for fd in descriptors:
                    os.close(fd)
                with contextlib.suppress(ConnectionError):
                    seats[-1].send(wire.control(WELCOME_MESSAGE), [self._board_fd])
        return seats

    def _dial_in(self, count: int) -> list[Seat]:
        """Makes links that the victim has offered."""
        offers = self._victim.offers(count)
        seats = [self._hello(Invitation.of(offer.data, self._lane)) for offer in offers]
        answers = [(offer.peer, self._lane.answer()) for offer in offers]
        assert all(self._victim.complete(answers, self._region)), "an honest answer was refused"
        return seats

    def _links(
        self, frames: int, act: Callable[[Sequence[Seat], Tally], None], at_a_time: int = BATCH
    ) -> Tally:
        """Runs `act` on some links at a time, until it has used up its frames."""
        tally = Tally()
        while tally.frames < frames:
            seats = self._pick.choice((self._be_dialled, self._dial_in))(at_a_time)
            for seat in seats:
                with contextlib.suppress(OSError):
                    if self._region:  # which is in flight
                        seat.send(wire.control(MEMORY, _MEMFD, _NBYTES), [self._memory])
            try:
                act(seats, tally)
            finally:
                for seat in seats:
                    seat.leave()
                self._board[:] = 0
                self._describe()
            tally.links += at_a_time
        return tally

    def guesses(self, frames: int) -> Tally:
        """Sends random immediates, then the honest peer's own: the victim must know its raisers by the
        link."""

        def guess(seats: Sequence[Seat], tally: Tally) -> None:
            for seat in seats:
                guesses = self._numbers.integers(0, 1 << 32, self._pick.randrange(1, 200), dtype=np.uint32)
                pages = 1 + self._pick.getrandbits(6)
                guesses[-1] = self._honest | pages - 1
                seat.raise_counters(guesses)
                tally.frames += len(guesses)
                tally.foreign += pages
                with contextlib.suppress(ConnectionError):
                    seat.send(wire.control(WAKE))
            self._await_the_end(seats)

        return self._links(frames, guess)

    def _await_the_end(self, seats: Sequence[Seat]) -> None:
        """Waits until the victim has closed all of these links."""
        for seat in seats:
            with contextlib.suppress(ConnectionError):
                while seat.socket.recv(wire.CONTROL.size):
                    pass

    def lengths(self, frames: int) -> Tally:
        """Sends wrong lengths: of messages in slots, of announced memory, and of regions on the board."""

        def forge(seats: Sequence[Seat], tally: Tally) -> None:
            for seat in seats:
                for slot in range(self._pick.randrange(MESSAGE_SLOTS)):
                    seat.put(slot, wire.user_message(self._pick))
                forged = int(self._pick.choice(_ODD_WORDS))
                match self._pick.randrange(3):
                    case 0:
                        slot = self._pick.randrange(MESSAGE_SLOTS)
                        seat.put(slot, wire.user_message(self._pick), nbytes=forged)
                    case 1:
                        with contextlib.suppress(OSError):
                            seat.send(wire.control(MEMORY, 2, forged), [self._memory])
                    case 2:
                        self._board[8 + 8 * _PLACE + self._pick.choice((1, 2, 4))] = forged
                tally.frames += MESSAGE_SLOTS
                with contextlib.suppress(OSError):
                    seat.send(wire.control(WAKE))

        return self._links(frames, forge)

    def flood(self, frames: int) -> Tally:
        """Sends as many immediates and messages as the rings and slots hold, all of them allowed."""

        def pour(seats: Sequence[Seat], tally: Tally) -> None:
            immediates = self._numbers.integers(0xFFFF_0000, 1 << 32, RING_ENTRIES, dtype=np.uint32)
            for _ in range(100):
                for seat in seats:
                    room = RING_ENTRIES - (seat.tail - int(seat.outgoing[HEAD]))
                    seat.raise_counters(immediates[:room])
                    free = ~(int(seat.outgoing[PUT]) ^ int(seat.outgoing[TAKEN])) & (1 << MESSAGE_SLOTS) - 1
                    for slot in range(MESSAGE_SLOTS):
                        if free >> slot & 1:
                            seat.put(slot, b"\0" + self._pick.randbytes(4095))
                    with contextlib.suppress(OSError):
                        seat.send(wire.control(WAKE))
                    tally.frames += room + free.bit_count() + 1

        return self._links(frames, pour, at_a_time=4)

    def messages(self, frames: int) -> Tally:
        """Sends socket messages that any peer may send, then some that it may not."""

        def talk(seats: Sequence[Seat], tally: Tally) -> None:
            for seat in seats:
                with contextlib.suppress(OSError):  # the victim has closed the link
                    for name in range(_MEMFD + 1, 1 << self._pick.randrange(8)):
                        self._say_rightly(seat, name)
                        tally.frames += 1
                    for _ in range(4):
                        kind = self._pick.choice((WELCOME_MESSAGE, MEMORY, FORGET, WAKE))
                        data = wire.control(kind, self._pick.randrange(4), _NBYTES)
                        self._say_wrongly(seat.socket, self._mutated(data))
                        tally.frames += 1

        return self._links(frames, talk)

    def _say_rightly(self, seat: Seat, name: int) -> None:
        match self._pick.randrange(4):
            case 0 if self._lane is wire.HOST:
                seat.send(wire.control(MEMORY, name, _NBYTES), [self._memory])
            case 1 if self._lane is wire.HOST:
                seat.send(wire.control(FORGET, self._pick.randrange(2, name + 2)))
            case _:
                seat.send(wire.control(WAKE))

    def _mutated(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self._pick.choice((1, 1, 2, 4))):
            match self._pick.randrange(4):
                case 0:
                    changed[self._pick.randrange(8)] ^= 1 << self._pick.getrandbits(3)
                case 1:
                    at = self._pick.choice((8, 32))  # bytes, key
                    changed[at : at + 8] = int(self._pick.choice(_ODD_WORDS)).to_bytes(8, "little")
                case 2:
                    changed[0:4] = self._pick.randrange(9).to_bytes(4, "little")
                case 3:
                    at = self._pick.randrange(len(data))
                    changed[at : at + 4] = self._pick.randbytes(4)
        return bytes(changed[: self._pick.choice((None, None, None, self._pick.randrange(1, len(data))))])

    def _say_wrongly(self, connection: socket.socket, data: bytes) -> None:
        """Sends a message with missing, surplus or wrong descriptors: memory that may shrink, is too small,
        or no memory."""
        with contextlib.ExitStack() as stack:
            descriptors: list[int] = []
            for _ in range(self._pick.choice((0, 0, 1, 1, 2, 3, 9))):
                match self._pick.randrange(5):
                    case 0:
                        descriptors.append(self._memory)
                    case 1:
                        descriptors.append(sealed_memory(_NBYTES, seals=0))
                        stack.callback(os.close, descriptors[-1])
                    case 2:
                        descriptors.append(sealed_memory(self._pick.randrange(8192)))
                        stack.callback(os.close, descriptors[-1])
                    case 3:
                        descriptors.append(connection.fileno())
                    case 4:
                        descriptors.append(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
                        stack.callback(os.close, descriptors[-1])
            if descriptors:
                socket.send_fds(connection, [data], descriptors)
            else:
                connection.send(data)

    def scribbles(self, frames: int) -> Tally:
        """Writes random words over all that the victim maps, at full speed, 1,024 a frame."""

        def scribble(seats: Sequence[Seat], tally: Tally) -> None:
            for _ in range(8):
                self._board[:1024] = self._random_words(1024)
                self._board[0] = self._pick.getrandbits(8)
                for seat in seats:
                    words, first, last = self._pick.choice(self._parts(seat))
                    words[self._numbers.integers(first, last, 1024)] = self._random_words(1024)
                    tally.frames += 1
                    with contextlib.suppress(OSError):
                        seat.send(wire.control(WAKE))

        return self._links(frames, scribble)

    def _parts(self, seat: Seat) -> list[tuple[Words, int, int]]:
        """Returns the areas that the victim reads together."""
        parts = [
            (seat.outgoing, TAIL, PUT + 1),
            (seat.outgoing, RING_WORD, MESSAGES_WORD),
            (seat.outgoing, MESSAGES_WORD, _CHANNEL_WORDS),
            (seat.outgoing, ADMISSION, TAKEN + 1),
            (seat.incoming, ADMISSION, TAKEN + 1),
            (seat.incoming, GATE, PUT + 1),
            (seat.incoming, 0, _CHANNEL_WORDS),
        ]
        # nvlink's account is trusted until its writer's process has ended, and this process continues.
        if self._lane is wire.HOST:
            parts += [(seat.outgoing, GATE, STARVED + 1), (seat.outgoing, 0, _CHANNEL_WORDS)]
        return parts

    def _random_words(self, count: int) -> Words:
        words = self._numbers.integers(0, 1 << 64, count, dtype=np.uint64)
        odd = self._numbers.random(count) < 0.5
        words[odd] = self._numbers.choice(_ODD_WORDS, int(odd.sum()))
        return words
