"""Readings as files, and their differences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ds4.errors import FileFormatError, UsageError
from rulers.compare import compare
from rulers.numbers import Mean, clustered_mean
from rulers.reading import Reading
from tests.rulers.readings import OURS, TEACHER, reading, text


def test_a_reading_comes_back(tmp_path: Path) -> None:
    made = reading(0.5, floor=0.01, experts=3)
    made.save(tmp_path / "r.npz")
    got = Reading.load(tmp_path / "r.npz")
    assert got.figures.tobytes() == made.figures.tobytes() and got.numbers == made.numbers
    assert got.same_experts.tobytes() == made.same_experts.tobytes()
    assert got.floor is not None and made.floor is not None and got.floor.numbers == made.floor.numbers
    assert (got.teacher, got.ours) == (TEACHER, OURS) and got.to_json() == made.to_json()
    assert 0 < got.numbers.sigma_min_p5 < got.numbers.sigma_min_median < 1 and got.numbers.kl.value > 0


def test_figures_belong_to_the_documents_of_their_windows() -> None:
    made = reading(0.5)
    t = made.text
    expected = [int(t.documents[s.start]) for s in t.slices for _ in range(s.stop - s.start - 1)]
    assert made.documents.tolist() == expected
    assert made.numbers.kl == clustered_mean(made.figures[2], np.array(expected))


def test_broken_readings_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "r.npz"
    reading(0.5).save(path)
    with np.load(path) as f:
        whole = dict(f)
    for name, value, said in (
        ("figures", whole["figures"][:, 1:], r"figures is float64 \[5, "),
        (
            "figures",
            np.where(whole["figures"] > 1, np.nan, whole["figures"]),
            "figures has values that are not",
        ),
        ("floor", np.zeros((5, 2)), r"floor is float64 \[5, 2\]; expected float64 \[5, 0\]"),
        ("same_experts", np.zeros((2, 3), np.uint8), r"same_experts is uint8 \[2, 3\]"),
        ("windows", whole["windows"][::-1].copy(), "windows must be numbered"),
        ("meta", np.frombuffer(b'{"version": 2, "teacher": {}, "ours": {}}', np.uint8), "a reading of version 2"),
    ):
        np.savez(path, **{**whole, name: value})
        with pytest.raises(FileFormatError, match=r"r\.npz: .*" + said):
            Reading.load(path)
    replace(reading(0.5), ours=replace(OURS, model="f" * 16)).save(path)
    with pytest.raises(FileFormatError, match="model is '0123456789abcdef' for the original and 'ffff"):
        Reading.load(path)


def test_differences_are_paired() -> None:
    """Half of the noise, on the same positions: the paired error is far below that of two separate readings."""
    a = reading(0.5)
    b = reading(0.25)
    found = compare(a, b)
    d = found.difference
    assert d.sigma_min.value == pytest.approx(b.numbers.sigma_min.value - a.numbers.sigma_min.value)
    assert d.kl.value == pytest.approx(b.numbers.kl.value - a.numbers.kl.value) and d.kl.value < 0
    assert d.ppl_ratio.value == pytest.approx(b.numbers.ppl_ratio.value / a.numbers.ppl_ratio.value)
    assert d.sigma_min == clustered_mean(b.figures[1] - a.figures[1], a.documents)
    assert d.sigma_min_median == pytest.approx(np.median(b.figures[1] - a.figures[1]))
    sides = np.hypot(a.numbers.sigma_min.se or 0, b.numbers.sigma_min.se or 0)
    assert d.sigma_min.se is not None and d.sigma_min.se < sides and d.sigma_min.value > 5 * d.sigma_min.se
    swapped = compare(b, a).difference
    assert swapped.sigma_min.value == -d.sigma_min.value and swapped.sigma_min.se == d.sigma_min.se
    keys = list(found.to_json())
    assert keys[:7] == ["domain", "tokens", "documents", "same_top1", "sigma_min", "kl", "ppl_ratio"]


def test_a_reading_against_itself_differs_by_nothing() -> None:
    d = compare(reading(0.5), reading(0.5)).difference
    assert (d.same_top1, d.sigma_min, d.kl, d.ppl_ratio) == (Mean(0, 0), Mean(0, 0), Mean(0, 0), Mean(1, 0))
    assert (d.sigma_min_median, d.sigma_min_p5) == (0, 0)


def test_the_floor_stands_beside() -> None:
    a, b = reading(0.5, floor=0.02), reading(0.25)
    found = compare(a, b)
    assert found.floor_b is None and found.floor_a is not None
    floor = found.floor_a.numbers
    at = a.floor_positions
    assert floor.tokens == len(at) and floor.kl == clustered_mean(
        a.floor_figures[2] - a.figures[2, at], a.documents[at]
    )
    assert abs(floor.sigma_min.value) < 0.1 * abs(found.difference.sigma_min.value)
    told = found.to_json()["floor"]
    assert told == {"a": floor.to_json(), "b": None}


def test_what_cannot_be_compared_is_refused_by_name() -> None:
    a = reading(0.5)
    b = reading(0.25, of=text(5))
    with pytest.raises(UsageError, match=r"before\.npz and after\.npz .* different texts"):
        compare(a, b, ("before.npz", "after.npz"))
    for name, value in (("model", "f" * 16), ("domain", "law"), ("arithmetic", "f32 kv"), ("length", 32)):
        other = replace(a, teacher=replace(TEACHER, **{name: value}))
        with pytest.raises(UsageError, match=f"the original's {name} is .* read both with the same original"):
            compare(a, other)
    drifted = a.figures.copy()
    drifted[3] += 0.01
    with pytest.raises(UsageError, match="two originals under one name"):
        compare(a, replace(a, figures=drifted))
    drifted[3] -= 0.0099  # what another kind of CPU may do
    compare(a, replace(a, figures=drifted))
