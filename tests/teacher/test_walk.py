"""A walk is the teacher's prefill, window by window; what it shows of the experts; taken up again, the same bits."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from ds4.errors import CapacityError, Ds4Error, RequestError
from ds4.teacher import stream
from ds4.teacher.moe import mix, route
from ds4.teacher.numerics import ARITHMETICS
from ds4.teacher.run import Teacher
from ds4.teacher.walk import Walk
from tests.teacher import lookalike
from tests.teacher.oracles import source, whole

NAMES = ("oracle-a", "oracle-b")


def windows(name: str, lengths: tuple[int, ...] = (37, 5, 64, 1)) -> list[NDArray[Any]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, source(name).config.vocab_size, n) for n in lengths]


def finish(walk: Walk) -> Walk:
    while not walk.done:
        walk.advance()
    return walk


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arith", ARITHMETICS)
def test_one_window_gives_the_bits_of_a_run(name: str, arith: str) -> None:
    """With as many BLAS threads, which the walk itself pins to one."""
    (ids,) = windows(name, (70,))
    walk = finish(Walk(Teacher(source(name), arith), [ids]))
    with threadpool_limits(1, user_api="blas"):
        expected = Teacher(source(name), arith).run(ids)["logits_TV"]
    np.testing.assert_array_equal(walk.logits(0), expected)


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    found = []
    for n in (1, 2, 3):
        with threadpool_limits(n, user_api="blas"):
            walk = finish(Walk(Teacher(source("oracle-a")), windows("oracle-a")))
            found.append(walk.logits(2).tobytes())
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("name", NAMES)
def test_windows_do_not_see_each_other(name: str) -> None:
    """Each window's logits are those of a run of it alone, up to the order of float32 sums in a larger product."""
    parts = windows(name)
    walk = finish(Walk(Teacher(source(name)), parts))
    for i, ids in enumerate(parts):
        # 1e-5: some thirty products of up to 128 terms in float32, in another order; a window seeing another is 1
        assert whole(walk.logits(i), Teacher(source(name)).run(ids)["logits_TV"]) < 1e-5


def test_the_experts_of_a_layer_are_shown() -> None:
    """Routing and output follow from the input that is shown, by the layer's own weights."""
    teacher = Teacher(source("oracle-a"))
    c, nm = teacher.config, teacher.nm
    parts = windows("oracle-a")
    walk, seen = Walk(teacher, parts), []
    while not walk.done:
        seen.append(walk.advance())
    n = sum(map(len, parts))
    assert [m.layer for m in seen] == list(range(c.num_hidden_layers))
    for m in seen:
        assert m.input_TD.shape == m.output_TD.shape == (n, c.hidden_size)
        assert m.picks_Tk.shape == m.mix_Tk.shape == (n, c.num_experts_per_tok)
        prefix = f"layers.{m.layer}"
        w = teacher.stream.layer(prefix).moe
        with threadpool_limits(1, user_api="blas"):
            picks, weights = route(nm, c, w, m.input_TD, None, c.num_experts_per_tok)
        np.testing.assert_array_equal(picks, m.picks_Tk)
        np.testing.assert_array_equal(weights, m.mix_Tk)
        with threadpool_limits(1, user_api="blas"):
            y = mix(nm, c, w, partial(teacher.stream.expert, prefix), m.input_TD, picks, weights)
        np.testing.assert_array_equal(y, m.output_TD)
    assert len({m.input_TD.tobytes() for m in seen}) == len(seen)


def test_another_array_library_gives_the_same_bits(tmp_path: Path) -> None:
    parts = windows("oracle-a")
    there = Walk(Teacher(source("oracle-a"), "vendor", xp=lookalike.module()), parts)
    here = Walk(Teacher(source("oracle-a"), "vendor"), parts)
    for _ in range(2):
        a, b = there.advance(), here.advance()
        for x, y in ((a.input_TD, b.input_TD), (a.output_TD, b.output_TD), (a.picks_Tk, b.picks_Tk)):
            assert type(x) is np.ndarray
            np.testing.assert_array_equal(x, y)
    there.save(tmp_path / "walk", "key")
    again = Walk(Teacher(source("oracle-a"), "vendor", xp=lookalike.module()), parts)
    assert again.load(tmp_path / "walk", "key") and again.layer == 2
    np.testing.assert_array_equal(finish(again).logits(2), finish(here).logits(2))


@pytest.mark.parametrize("name", NAMES)
def test_taken_up_at_any_layer_it_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    """Compressed rows, index keys, picks and candidates come back: layers that only read them are reached too."""
    parts = windows(name)
    walk, files = Walk(Teacher(source(name), "kv"), parts), []
    while not walk.done:
        walk.advance()
        files.append(tmp_path / f"{walk.layer}")
        walk.save(files[-1], "key")
    expected = [walk.logits(i) for i in range(len(parts))]
    assert max(f.stat().st_size for f in files) <= walk.saved_bytes
    for file in files:
        again = Walk(Teacher(source(name), "kv"), parts)
        assert again.load(file, "key")
        finish(again)
        for i, logits in enumerate(expected):
            np.testing.assert_array_equal(again.logits(i), logits)


def test_a_file_that_is_not_this_walk_is_left_alone(tmp_path: Path) -> None:
    parts = windows("oracle-a")
    walk = Walk(Teacher(source("oracle-a")), parts)
    walk.advance()
    walk.save(tmp_path / "w", "key")
    again = Walk(Teacher(source("oracle-a")), parts)
    assert not again.load(tmp_path / "w", "another") and not again.load(tmp_path / "none", "key")
    data = bytearray((tmp_path / "w").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "w").write_bytes(data)
    assert not again.load(tmp_path / "w", "key") and again.layer == 0
    (tmp_path / "w").write_bytes(data[:1000])
    assert not again.load(tmp_path / "w", "key") and again.layer == 0
    assert [p.name for p in tmp_path.iterdir()] == ["w"]


class Watched:
    """A source that knows which of its arrays are alive."""

    def __init__(self, name: str) -> None:
        self._inner = source(name)
        self.config = self._inner.config
        self.layers: dict[int, str] = {}
        self.experts: dict[int, str] = {}
        self.visits: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def _watch(self, alive: dict[int, str], x: NDArray[Any], what: str) -> NDArray[Any]:
        x = np.array(x)
        alive[id(x)] = what
        weakref.finalize(x, alive.pop, id(x), None)
        return x

    def dense(self, name: str) -> NDArray[Any]:
        if name.startswith("layers."):
            assert set(self.layers.values()) <= {name.split(".")[1]}, (name, self.layers)
        return self._watch(self.layers, self._inner.dense(name), name.split(".")[1])

    def expert(self, prefix: str, e: int) -> tuple[NDArray[Any], ...]:
        assert not self.experts, "an expert is asked for while another is still in memory"
        self.visits.append((prefix, e))
        return tuple(self._watch(self.experts, w, f"{prefix} {e}") for w in self._inner.expert(prefix, e))


def test_one_layer_and_one_expert_in_memory_and_each_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "RESIDENT_BYTES", 0)
    watched = Watched("oracle-a")
    gc.collect()
    walk = Walk(Teacher(watched), windows("oracle-a"))
    gc.disable()  # reference counts alone must free the arrays
    try:
        finish(walk)
    finally:
        gc.enable()
    assert len(watched.visits) == len(set(watched.visits)) > watched.config.num_hidden_layers


def test_what_a_walk_refuses() -> None:
    teacher = Teacher(source("oracle-a"))
    with pytest.raises(RequestError, match="id 320 at position 1 is outside the vocabulary of 320"):
        Walk(teacher, [np.array([3]), np.array([0, 320])])
    most = teacher.config.max_position_embeddings
    with pytest.raises(CapacityError, match=f"a window of {most + 1} tokens exceeds the model's context of {most}"):
        Walk(teacher, [np.zeros(most + 1, np.int64)])


def test_a_value_that_is_not_finite_is_named_with_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = windows("oracle-a")
    broken = Walk(Teacher(source("oracle-a")), parts)
    broken.advance()
    broken._x[broken.slices[2].start] = np.nan
    with pytest.raises(
        Ds4Error, match="router of layer 1, in window 2, gave a value that is not finite at position 0"
    ):
        broken.advance()

    def spoil(*args: Any) -> NDArray[Any]:
        y = mix(*args)
        y[37 + 5 + 9] = np.inf
        return y

    walk = Walk(Teacher(source("oracle-a")), parts)
    monkeypatch.setattr("ds4.teacher.walk.mix", spoil)
    with pytest.raises(Ds4Error, match="layer 0, in window 2, gave a value that is not finite at position 9"):
        walk.advance()
