"""Memory beside the server: an engine of one's own, the server's device and when it goes back, or a wait."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from ds4.engine import Engine
from ds4.errors import CapacityError
from solvers.nightly.room import Room

MB = 1 << 20


@dataclass
class Lease:
    waiting: int = 0
    lost: bool = False


@dataclass
class World:
    """A machine with a server: what is free, what happens on it, and its time."""

    free: list[int]  # bytes, one a look; the last one stays
    busy_looks: int = 0
    events: list[str] = field(default_factory=list)
    lease: Lease | None = None
    now: float = 0.0
    opening_s: float = 0.0

    def look(self) -> int:
        return self.free.pop(0) if len(self.free) > 1 else self.free[0]

    def open(self) -> Engine:
        self.events.append("open")
        self.now += self.opening_s
        return cast(Engine, OneEngine(self))

    @contextmanager
    def borrow(self) -> Iterator[Lease]:
        self.events.append("borrow")
        self.lease = Lease()
        try:
            yield self.lease
        finally:
            self.events.append("return")
            self.lease = None

    def busy(self) -> bool:
        self.busy_looks -= 1
        return self.busy_looks >= 0

    def reload(self) -> str:
        raise AssertionError("a room has nothing to do with it")

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.events.append("sleep")


class OneEngine:
    def __init__(self, world: World) -> None:
        self.world = world

    def close(self) -> None:
        self.world.events.append("close")


def room(world: World, server: bool = False, budget: int | None = None, wait_s: float = 100.0) -> Room:
    lender = world if server else None
    said: list[str] = []
    made = Room(
        world.open, 10 * MB, world.look, budget, lender, wait_s, said.append, lambda: world.now, world.sleep
    )  # fmt: skip
    cast(Any, made).said = said
    return made


def whole(r: Room, work: Any) -> Any:
    with r:
        return r.run(work)


def test_an_engine_of_its_own_where_there_is_room() -> None:
    world = World([10 * MB])
    with room(world, server=True) as r:
        assert r.run(lambda e: 3) == r.run(lambda e: 3) == 3
    assert world.events == ["open", "close"] and not r.ever_borrowed


def test_nobody_knows_what_is_free() -> None:
    world = World([0])
    r = room(world)
    r.free = lambda: None
    with r:
        assert r.run(lambda e: 3) == 3


@pytest.mark.parametrize("short", ["memory", "budget"])
def test_a_device_is_borrowed_where_room_is_short_and_given_back_in_the_end(short: str) -> None:
    """The engine is closed before the device goes back, whatever happens."""
    world = World([4 * MB, 99 * MB] if short == "memory" else [99 * MB])
    r = room(world, server=True, budget=None if short == "memory" else 9 * MB)
    with pytest.raises(ZeroDivisionError), r:
        r.run(lambda e: 1 // 0)
    assert world.events == ["borrow", "open", "close", "return"] and r.ever_borrowed
    why = "free are 4 MB: 6 MB are missing" if short == "memory" else "the budget has 9 MB: 1 MB are missing"
    assert cast(Any, r).said == [f"the engine and a solve take 10 MB, {why}: borrowing the server's device"]


def test_the_device_goes_back_empty() -> None:
    """Whether work fails, or is to make way: when the server gets its device, nothing holds the engine any more."""
    engines: list[weakref.ref[OneEngine]] = []
    held: list[bool] = []

    class Strict(World):
        def open(self) -> Engine:
            made = super().open()
            engines.append(weakref.ref(cast(OneEngine, made)))
            return made

        @contextmanager
        def borrow(self) -> Iterator[Lease]:
            with super().borrow() as lease:
                yield lease
            held.append(any(ref() is not None for ref in engines))

    world = Strict([4 * MB, 99 * MB, 4 * MB, 99 * MB])
    r = room(world, server=True)

    def step(engine: Engine) -> None:
        session = [engine, engine]  # noqa: F841 - what a step has of it
        if len(engines) == 1:
            assert world.lease is not None
            world.lease.waiting = 1
            r.breathe()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        whole(r, lambda engine: step(engine))
    assert held == [False, False] and len(engines) == 2


def test_too_large_even_for_the_borrowed_device() -> None:
    world = World([4 * MB, 8 * MB])
    with pytest.raises(CapacityError, match="with the server's device borrowed 8 MB are free: 2 MB are missing"):
        whole(room(world, server=True), lambda e: 3)
    assert world.events == ["borrow", "return"]


def test_an_engine_that_does_not_open_keeps_no_device() -> None:
    world = World([4 * MB, 99 * MB])

    def fails() -> Engine:
        raise CapacityError("no")

    r = room(world, server=True)
    r.open_engine = fails
    with pytest.raises(CapacityError), r:
        r.run(lambda e: 3)
    assert world.events == ["borrow", "return"]


def test_without_a_server_it_waits_and_then_says_what_is_missing() -> None:
    world = World([4 * MB, 4 * MB, 11 * MB])
    with room(world) as r:
        r.run(lambda e: None)
    assert world.events == ["sleep", "sleep", "open", "close"] and r.waited_s == 60
    with pytest.raises(CapacityError, match=r"take 10 MB, free are 4 MB: 6 MB are missing, after 100 s of waiting"):
        whole(room(World([4 * MB])), lambda e: None)


def test_a_budget_that_no_wait_mends_is_said_at_once() -> None:
    world = World([99 * MB])
    with pytest.raises(CapacityError, match="the budget has 9 MB: 1 MB are missing; raise --mem-budget-mb"):
        whole(room(world, budget=9 * MB), lambda e: None)
    assert world.events == []


def test_the_device_goes_back_where_work_is_saved_and_work_goes_on_from_there() -> None:
    world = World([4 * MB, 99 * MB, 4 * MB, 99 * MB], busy_looks=2, opening_s=5.0)
    done: list[int] = []

    def work(_: Engine) -> str:
        for i in range(len(done), 4):
            world.now += 3.0
            done.append(i)
            if i == 0 and world.lease is not None:
                world.lease.waiting = (
                    1  # they wait from here on; at 6 s the device was ours as long as it took to open
                )
            r.breathe()
        return "whole"

    with room(world, server=True) as r:
        assert r.run(work) == "whole"
    assert done == [0, 1, 2, 3], "nothing twice, nothing left out"
    assert world.events == [
        "borrow", "open", "close", "return", "sleep", "sleep", "sleep", "borrow", "open", "close", "return",
    ]  # fmt: skip
    assert (r.pauses, r.waited_s) == (1, 90.0)


def test_between_two_steps_it_goes_back_too() -> None:
    world = World([4 * MB, 99 * MB, 4 * MB, 99 * MB])
    with room(world, server=True) as r:
        r.run(lambda e: None)
        assert world.lease is not None
        world.lease.waiting = 2
        r.run(lambda e: None)
    assert world.events.count("borrow") == 2 and r.pauses == 1


def test_a_lost_device_is_left_at_once() -> None:
    world = World([4 * MB, 99 * MB, 4 * MB, 99 * MB], opening_s=1e9)
    seen: list[int] = []

    def work(_: Engine) -> None:
        seen.append(1)
        if len(seen) == 1:
            assert world.lease is not None
            world.lease.lost = True
        r.breathe()

    with room(world, server=True) as r:
        r.run(work)
    assert len(seen) == 2 and world.events.count("borrow") == 2


def test_a_server_that_is_always_busy_ends_the_night() -> None:
    world = World([4 * MB, 99 * MB], busy_looks=1000)
    r = room(world, server=True)

    def work(_: Engine) -> None:
        assert world.lease is not None
        world.lease.waiting = 1
        r.breathe()

    with pytest.raises(CapacityError, match=r"the server was busy for 100 s .* what is done is kept"):
        whole(r, work)
    assert world.lease is None and world.events == ["borrow", "open", "close", "return", *["sleep"] * 4]
