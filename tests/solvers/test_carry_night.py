"""A folder by carry.py, on an engine: what it says is what a session does with it, and what it cannot do it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ds4.device import Device
from ds4.engine import Engine
from ds4.engine.mount import Mounted, mount
from ds4.errors import UsageError
from ds4.sidecar.fingerprint import check_base
from rulers.scores import Meta, Scores
from rulers.text import Text
from solvers.carry import CarryRule
from solvers.carry_night import report, solve_carry
from solvers.last_layer import read_places
from solvers.margin_capture import Turn
from tests.engine.conftest import bases, engines, fast_device  # noqa: F401 - fixtures
from tests.reference_sidecar import write_sidecar
from tests.solvers.solving import NAME, engine_on

RULE = CarryRule(step=0.05, steps=3, held=2, least=-100)


@pytest.fixture(scope="module")
def engine(bases: Callable[[str], Path], fast_device: Device) -> Engine:  # noqa: F811
    return engine_on(bases(NAME), fast_device, prefill="replay")


@pytest.fixture(scope="module")
def scores(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Scores:
    """Text, and as its original's logits those of the same engine with another table on: something can be gained."""
    rng, folder = np.random.default_rng(1), tmp_path_factory.mktemp("text") / "theirs"
    text = Text.of([rng.integers(3, 320, 20).tolist() for _ in range(10)], list(range(10)))
    write_sidecar(folder, engine.config, seed=4)
    for path in folder.glob("rb_*"):
        path.unlink()
    assert engine.bare is not None
    theirs = mount(engine.bare, Mounted.open(engine.config, None, folder), engine.device)
    windows = [text.ids[s].tolist() for s in text.slices]
    logits = [read_places(engine, theirs, Turn((w[0],), tuple(w[1:])), 99)[1] for w in windows]
    return Scores(text, np.concatenate(logits), Meta("m", "d", "fit", 20, "f32 none", "prefill", "w"))


def some_turns() -> list[Turn]:
    rng = np.random.default_rng(5)
    return [
        Turn(tuple(rng.integers(3, 320, p).tolist()), tuple(rng.integers(3, 320, n).tolist()), wanted)
        for p, n, wanted in ((20, 3, 7), (15, 0, 11), (12, 5, None), (22, 2, 200))
    ]


def test_a_folder(engine: Engine, scores: Scores, tmp_path: Path) -> None:
    out, turns = tmp_path / "night", some_turns()
    told: list[tuple[int, int]] = []
    manifest = solve_carry(engine, scores, turns, out, {"day": 1}, rule=RULE, progress=lambda *a: told.append(a))
    f = manifest["figures"]
    assert f["points"] == 3 and f["others"] == 3 + 6 + 2 and 0 <= f["kept"] <= 1
    assert told[-1][0] <= told[-1][1] and [t[0] for t in told] == list(range(1, len(told) + 1))
    assert (out / "manifest.txt").read_text() == report(manifest) and len(f["steps"]) >= 1
    assert check_base(out, None, engine.config.num_hidden_layers) is None
    assert f["taken"] == 3 and f["gain_rms"] > 0
    engine.remount(None, out)
    led = 0
    for turn in turns:
        if turn.wanted is not None:
            session = engine.session()
            session.sync(list(turn.prompt))
            if turn.answer:
                session.step(list(turn.answer), logits=False)
            led += int(session.logits().argmax()) == turn.wanted
    engine.remount(None, None)
    assert led == f["led"]
    # where text may pay nothing and nothing can be gained there is no table, and no layer in the folder
    strict = CarryRule(step=0.05, steps=3, held=2, least=100)
    none = solve_carry(engine, scores, turns, tmp_path / "none", {}, rule=strict)["figures"]
    assert none["taken"] is None and none["led"] == none["led_before"] and not list((tmp_path / "none").glob("gr_*"))
    again = solve_carry(engine, scores, turns, out, {"day": 1}, rule=RULE)
    assert again == manifest
    with pytest.raises(UsageError, match="day differ"):
        solve_carry(engine, scores, turns, out, {"day": 2}, rule=RULE)


def test_nothing_to_solve_for(engine: Engine, scores: Scores, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no turn has a wanted token"):
        solve_carry(engine, scores, [Turn((5, 6))], tmp_path / "night", {}, rule=RULE)
    with pytest.raises(UsageError, match="10 documents of text; at least 18"):
        solve_carry(engine, scores, some_turns(), tmp_path / "night", {}, rule=CarryRule(held=9))
    assert not (tmp_path / "night").exists()
