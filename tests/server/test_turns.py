"""Whose turn it is: prompts and answers of several requests on one device, and who gives way when memory runs out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from ds4.engine import Ask, Cancelled, Sampling
from ds4.errors import CapacityError, DeviceError
from ds4.server.errors import HttpError
from ds4.server.job import Job
from ds4.server.outbox import Event, Failed, Finished, Outbox, Reading
from ds4.server.request import Generation
from ds4.server.run import Run
from ds4.server.turns import Turns
from tests.server.standin import StandIn, StandInSession, ids_of

CHUNK = 64  # tokens, of the stand-in


class Noted(StandInSession):
    """A session that writes down what it does, under its prompt's first token, and may find no room."""

    engine: Noting

    def __init__(self, engine: Noting) -> None:
        super().__init__(engine)
        self.name = -1

    def reading(self, tokens: Sequence[int]) -> Generator[tuple[int, int], None, None]:
        self.name = tokens[0]
        for at in range(0, len(tokens), CHUNK):
            yield at, len(tokens)
            self.engine.room(self.name, "read")
            self.engine.done.append((self.name, "read"))

    def next(self, sampling: Sampling, *, left: int | None = None) -> int:
        self.engine.room(self.name, "draw")
        self.engine.done.append((self.name, "draw"))
        return super().next(sampling, left=left)


@dataclass
class Noting(StandIn):
    """`done`: chunks and tokens in order; `room` is asked before each and may raise."""

    done: list[tuple[int, str]] = field(default_factory=list)
    room: Callable[[int, str], None] = lambda name, what: None
    dropped: int = 0

    def session(self) -> Noted:
        made = Noted(self)
        self.sessions.add(made)
        return made

    def drop_idle(self) -> None:
        self.dropped += 1


@dataclass
class Desk:
    """Keeps how requests ended, by their prompts' first token."""

    ends: dict[int, Event] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    steps: int = 0

    def stepped(self) -> None:
        self.steps += 1

    def ended(self, run: Run, end: Event) -> None:
        name = run.job.generation.prompt_ids[0]
        self.ends[name] = end
        self.order.append(name)

    def error(self, name: int) -> Exception:
        end = self.ends[name]
        assert isinstance(end, Failed)
        return end.error

    def reason(self, name: int) -> str:
        end = self.ends[name]
        return end.reason if isinstance(end, Finished) else repr(end)


class Table:
    """Turns on a noting engine; request n has a prompt of n's."""

    def __init__(self, engine: Noting, most: int = 8) -> None:
        self.engine, self.desk = engine, Desk()
        self.turns = Turns(self.desk, most)
        self.jobs: dict[int, Job] = {}

    def ask(self, name: int, *, prompt: int = 1, tokens: int = 5) -> Job:
        job = Job(Generation([name] * prompt, Sampling(), tokens), Outbox(10_000))
        self.turns.begin(self.engine, job, None)
        self.jobs[name] = job
        return job

    def run(self, most: int = 200) -> None:
        for _ in range(most):
            if not self.turns.runs:
                return
            self.turns.turn(self.engine)
        raise AssertionError("it does not end")


@pytest.fixture
def table() -> Callable[..., Table]:
    return lambda **kw: Table(Noting(ids_of("abcdefgh"), endless=True, **kw))


def inside(test: Callable[..., None]) -> Callable[..., None]:
    """An outbox belongs to an event loop."""

    async def on_loop(*args: object, **kw: object) -> None:
        test(*args, **kw)

    def run(table: Callable[..., Table]) -> None:
        asyncio.run(on_loop(table))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@inside
def test_a_long_prompt_holds_an_answer_up_by_one_chunk_a_token(table: Callable[..., Table]) -> None:
    t = table()
    t.ask(1, tokens=12)
    t.turns.turn(t.engine)
    t.ask(2, prompt=10 * CHUNK, tokens=1)
    t.run()
    done = t.engine.done
    assert done.count((2, "read")) == 10 and done.count((1, "draw")) == 12
    at = [i for i, one in enumerate(done) if one == (1, "draw")]
    assert max(b - a for a, b in pairwise(at)) == 2  # a chunk between two tokens, never two
    assert (t.desk.reason(1), t.desk.reason(2)) == ("length", "length")


@inside
def test_prompts_take_turns(table: Callable[..., Table]) -> None:
    """A short one does not wait for the long one before it."""
    t = table()
    t.ask(1, prompt=8 * CHUNK, tokens=1)
    t.ask(2, prompt=2 * CHUNK, tokens=1)
    t.ask(3, prompt=2 * CHUNK, tokens=1)
    t.run()
    reads = [name for name, what in t.engine.done if what == "read"]
    assert reads == [1, 2, 3, 1, 2, 3, 1, 1, 1, 1, 1, 1]
    assert t.desk.order == [2, 3, 1]


@inside
def test_answers_share_passes(table: Callable[..., Table]) -> None:
    t = table()
    for name in range(1, 6):
        t.ask(name, tokens=name + 1)
    t.run()
    # a prompt is read a turn, and an answer goes on alone while it is the only one
    assert t.engine.passes == [2, 2, 3, 3, 3, 2, 2]
    assert [t.desk.reason(n) for n in range(1, 6)] == ["length"] * 5
    assert [len(t.jobs[n].drawn) for n in range(1, 6)] == [2, 3, 4, 5, 6]


@inside
def test_progress_is_told_by_chunks(table: Callable[..., Table]) -> None:
    t = table()
    job = t.ask(1, prompt=3 * CHUNK, tokens=1)
    for done in (64, 128):
        t.turns.turn(t.engine)
        assert job.outbox._events == [Reading(done, 192, 0)]  # the last one stands for those before it


@pytest.mark.parametrize("place", ["reading", "drawing"])
def test_a_cancelled_request_frees_everything_at_its_next_turn(table: Callable[..., Table], place: str) -> None:
    async def run() -> None:
        t = table()
        t.ask(1, tokens=50)
        t.ask(2, prompt=20 * CHUNK if place == "reading" else 1, tokens=50)
        for _ in range(6):
            t.turns.turn(t.engine)
        t.jobs[2].cancelled = True
        before = len(t.engine.done)
        t.turns.turn(t.engine)
        assert isinstance(t.desk.error(2), Cancelled) and len(t.engine.sessions) == 1
        assert {name for name, _ in t.engine.done[before:]} == {1}
        t.run()
        assert t.desk.reason(1) == "length" and len(t.engine.sessions) == 0

    asyncio.run(run())


@pytest.mark.parametrize("what", ["read", "draw"])
def test_a_failed_request_holds_no_session_and_leaves_others_alone(table: Callable[..., Table], what: str) -> None:
    def fire(name: int, doing: str) -> None:
        if (name, doing) == (2, what):
            raise DeviceError("fire")

    async def run() -> None:
        t = table(room=fire)
        for name in (1, 2, 3):
            t.ask(name)
        for _ in range(3):
            t.turns.turn(t.engine)
        assert str(t.desk.error(2)) == "fire" and len(t.engine.sessions) == 2
        t.run()
        assert t.desk.reason(1) == t.desk.reason(3) == "length"

    asyncio.run(run())


def test_a_pass_that_fails_fails_those_that_shared_it(table: Callable[..., Table]) -> None:
    @dataclass
    class Burning(Noting):
        def draw(self, asks: Sequence[Ask]) -> list[Exception | None]:
            raise DeviceError("fire")

    async def run() -> None:
        t = Table(Burning(ids_of("abc"), endless=True))
        t.ask(1)
        t.ask(2)
        t.run()
        assert str(t.desk.error(1)) == str(t.desk.error(2)) == "fire"
        assert len(t.engine.sessions) == 0

    asyncio.run(run())


def cramped(held: dict[int, int], most: int) -> Callable[[int, str], None]:
    """Room for `most` steps in all; those of a request are free again when `held` has forgotten it."""

    def room(name: int, what: str) -> None:
        if sum(held.values()) >= most:
            raise CapacityError("no room")
        held[name] = held.get(name, 0) + 1

    return room


@inside
def test_a_prompt_without_room_waits_for_another_answer_to_end(table: Callable[..., Table]) -> None:
    t = table()
    busy = [True]

    def room(name: int, what: str) -> None:
        if name == 2 and busy[0]:
            raise CapacityError("no room")

    t.engine.room = room
    t.ask(1, tokens=4)
    t.ask(2, prompt=3 * CHUNK, tokens=2)
    assert t.turns.open
    for _ in range(3):
        t.turns.turn(t.engine)
    assert not t.turns.open and len(t.engine.sessions) == 1  # what it had read is given back
    busy[0] = False
    t.run()
    assert t.desk.order == [1, 2] and t.desk.reason(2) == "length"
    assert [one for one in t.engine.done if one[0] == 2] == [(2, "read")] * 3 + [(2, "draw")] * 2
    assert t.engine.dropped == 1


@inside
def test_without_room_the_oldest_answer_goes_on_and_the_youngest_is_told_to_come_again(
    table: Callable[..., Table],
) -> None:
    t = table()
    held: dict[int, int] = {}
    t.engine.room = cramped(held, 12)
    ended = t.desk.ended

    def free(run: Run, end: Event) -> None:
        held.pop(run.job.generation.prompt_ids[0], None)
        ended(run, end)

    t.desk.ended = free  # type: ignore[method-assign]
    for name in (1, 2, 3):
        t.ask(name, tokens=7)
    t.run()
    error = t.desk.error(3)
    assert isinstance(error, HttpError) and (error.status, error.code) == (503, "no_memory")
    assert error.headers is not None and int(error.headers["Retry-After"]) > 0
    assert t.desk.order == [3, 2, 1] or t.desk.reason(1) == "length"
    assert t.desk.reason(1) == "length" and len(t.jobs[1].drawn) == 7


@pytest.mark.parametrize("what", ["read", "draw"])
def test_alone_without_room_it_fails_after_idle_memory_was_given_back(table: Callable[..., Table], what: str) -> None:
    def full(name: int, doing: str) -> None:
        if doing == what:
            raise CapacityError("1 token needs 9 MB")

    async def run() -> None:
        t = table(room=full)
        t.ask(1)
        t.run()
        assert isinstance(t.desk.error(1), CapacityError) and t.engine.dropped == 2
        assert len(t.engine.sessions) == 0

    asyncio.run(run())
