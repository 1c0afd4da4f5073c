"""Captures: the engine's own numbers, with a sidecar on as well, and a stop where they are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ds4.device import Device
from ds4.engine import Engine
from ds4.engine.score import score
from ds4.errors import Ds4Error, UsageError
from rulers.text import Text
from solvers import capture as module
from solvers.capture import Captures
from tests.engine.conftest import bases, engines, fast_device  # noqa: F401 - fixtures
from tests.reference_sidecar import biases_of, write_sidecar
from tests.solvers.solving import NAME, engine_on


@pytest.fixture(scope="module")
def engine(bases: Callable[[str], Path], fast_device: Device) -> Engine:  # noqa: F811
    return engine_on(bases(NAME), fast_device)


def short_text() -> Text:
    rng = np.random.default_rng(3)
    return Text.of([rng.integers(3, 320, n).tolist() for n in (40, 25, 33)], [0, 1, 1])


def test_parts_add_up_and_routing_is_the_engines(engine: Engine) -> None:
    """Picks against those that a tap of a whole prefill sees; weights against the scores they are made of."""
    from rulers.routing import EnginePicks

    text, c = short_text(), engine.config
    last = c.num_hidden_layers - 1
    told: list[tuple[int, int]] = []
    found = Captures(engine, text).layer(last, progress=lambda *a: told.append(a))
    assert told == [(1, 3), (2, 3), (3, 3)] and found.sums == 1.0 and found.sets == 1.0
    for part in text.slices:
        ids = text.ids[part].tolist()
        tap = EnginePicks(engine, len(ids))
        engine.session().sync(ids, logits="none", tap=tap)
        np.testing.assert_array_equal(found.picks_TK[part], tap.picks[last])
    bias = engine.device.download(engine.weights.layers[last].router_bias).reshape(-1)
    plain = np.take_along_axis(found.scores_TE - bias, found.picks_TK, axis=1)
    mixed = plain / plain.sum(axis=1, keepdims=True) if c.norm_topk_prob else plain
    np.testing.assert_allclose(found.weights_TK, mixed * c.routed_scaling_factor, rtol=1e-4)
    assert np.abs(found.slots_TKD).max() > 0 and found.slots_TKD.shape == (98, c.num_experts_per_tok, c.hidden_size)


def test_some_windows_are_those_rows_of_all(engine: Engine) -> None:
    text, captures = short_text(), Captures(engine, short_text())
    whole, some = captures.layer(1), captures.layer(1, [2])
    for name in ("slots_TKD", "picks_TK", "weights_TK", "scores_TE", "shared_TD", "output_TD"):
        assert getattr(some, name).tobytes() == getattr(whole, name)[text.slices[2]].tobytes(), name


def test_a_mounted_folder_changes_captures_and_nothing_of_the_engine(engine: Engine, tmp_path: Path) -> None:
    lattices = write_sidecar(tmp_path / "s", engine.config, 5)
    ids = short_text().ids[:40].tolist()
    before = score(engine, ids)["logits_TV"]
    captures = Captures(engine, short_text())
    bare = captures.layer(0)
    captures.mount(tmp_path / "s")
    found = captures.layer(0)
    assert found.scores_TE.tobytes() == bare.scores_TE.tobytes()  # without the sidecar's bias, by definition
    assert (np.sort(found.picks_TK) != np.sort(bare.picks_TK)).any(), "the bias moved nothing: this tested nothing"
    moved = found.scores_TE + biases_of(engine.config, 5)
    order = np.argsort(-moved, axis=1, kind="stable")[:, : found.picks_TK.shape[1]]
    assert (np.sort(order) == np.sort(found.picks_TK)).all()
    checked = 0
    for row in range(len(bare.picks_TK)):
        if set(bare.picks_TK[row]) != set(found.picks_TK[row]):
            continue
        for slot, e in enumerate(bare.picks_TK[row]):
            other = int(np.flatnonzero(found.picks_TK[row] == e)[0])
            want = bare.slots_TKD[row, slot] * lattices[0].s[e]
            np.testing.assert_allclose(found.slots_TKD[row, other], want, rtol=1e-5, atol=1e-6 * np.abs(want).max())
            checked += 1
    assert checked > 10
    captures.mount(None)
    assert captures.layer(0).slots_TKD.tobytes() == bare.slots_TKD.tobytes()
    assert score(engine, ids)["logits_TV"].tobytes() == before.tobytes()


def test_captures_that_are_not_the_engines_numbers_stop_the_run(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures = Captures(engine, short_text())
    read = module.bf16_to_f32
    with monkeypatch.context() as m:
        m.setattr(module, "bf16_to_f32", lambda a: read(a) * np.float32(1.01))
        with pytest.raises(
            Ds4Error, match=r"layer 1: experts and shared expert add up .* on \d+\.\d+% of its values"
        ):
            captures.layer(1)
    with monkeypatch.context() as m:
        m.setattr(Captures, "_scores", lambda self, layer, logits: -logits)
        with pytest.raises(Ds4Error, match=r"layer 1: selection scores choose what the router chose at"):
            captures.layer(1)
    assert captures.layer(1).sums == 1.0  # and the next capture is whole again


def test_only_the_engine_as_it_is_served(
    engines: Callable[..., Engine],  # noqa: F811
    bases: Callable[[str], Path],  # noqa: F811
    fast_device: Device,  # noqa: F811
    tmp_path: Path,
) -> None:
    with pytest.raises(UsageError, match="as it is served"):
        Captures(engines(NAME, activations="f32"), short_text())
    with pytest.raises(UsageError, match="as it is served"):
        Captures(engines(NAME, prefill="replay"), short_text())
    write_sidecar(tmp_path / "s", engines(NAME).config, 5)
    with pytest.raises(UsageError, match="on the base alone"):
        Captures(engine_on(bases(NAME), fast_device, zchain=tmp_path / "s"), short_text())
