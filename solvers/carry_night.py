"""A post-training folder by carry.py, on the engine: corrections of many days, read and solved and written.

read the turns as MarginReader does: the prompt by prefill, the answer by decode; text by prefill, in full
solve the last layer's table (carry.py), write it, mount it, read the points again: the real forward decides

OUT/    gr_Lnn.bin, base.fnv, manifest.json, manifest.txt; made beside its name, there when all of it is
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4.base.codebook import Workers
from ds4.engine import Engine
from ds4.engine.mount import Mounted, mount
from ds4.engine.weights import ModelWeights
from ds4.errors import UsageError
from ds4.sidecar.files import FINGERPRINT, GAIN_FP4, encode_gains, gain_bytes, gain_path, read_gains
from ds4.sidecar.fingerprint import format_fingerprint, sidecar_fingerprint
from rulers.scores import Scores
from solvers.carry import Carried, Carry, CarryRule, TextPlaces
from solvers.last_layer import Head, Places, read_places
from solvers.margin_capture import Turn
from solvers.posttrain import turns_digest
from solvers.workfolder import WorkFolder, finished

F32 = NDArray[np.float32]
Progress = Callable[[int, int], None]  # turns and windows read, in all


def read_text(
    engine: Engine, weights: ModelWeights, scores: Scores, tell: Callable[[], None] | None = None
) -> TextPlaces:
    """Every position of a text as the engine has it, with the original's logits; both in memory, 4 bytes a logit."""
    found = []
    for where in scores.text.slices:
        ids = scores.text.ids[where].tolist()
        found.append(read_places(engine, weights, Turn((ids[0],), tuple(ids[1:])), len(ids) + 1))
        if tell is not None:
            tell()
    return TextPlaces(
        Places.join([f[0] for f in found]), np.concatenate([f[1] for f in found]),
        np.concatenate([scores.rows(where) for where in scores.text.slices]), scores.text.documents,
    )  # fmt: skip


def solve_carry(
    engine: Engine,
    scores: Scores | Sequence[Scores],
    turns: Sequence[Turn],
    out: Path,
    about: Mapping[str, Any],
    *,
    zchain: Path | None = None,
    rule: CarryRule | None = None,
    workers: Workers | None = None,
    say: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Solve ③ into the folder `out`.

    Args:
        engine: on the base; what it has mounted is neither used nor changed.
        scores: the original's, of the text or texts that are not to suffer.
        turns: those with a wanted token give points, of all days that are to count; other decisions are to stay.
        about: what the bytes depend on beside these: JSON values.
        zchain: ②.

    Returns:
        The manifest; figures: points, led before and after by a real forward, kept share of other decisions by hand,
        steps (points led by hand, Sigma-min's gain on held-out text, its standard error) and which was taken. None
        taken: no table was worth it, and the folder has no layer.

    Raises:
        UsageError: no turn wants anything, too little text, or `out` is something else's.
        FileFormatError: ② is broken. CapacityError: the disk is full.
        Ds4Error: logits that are not finite.
    """
    rule = rule or CarryRule()
    if all(t.wanted is None for t in turns):
        raise UsageError("no turn has a wanted token: there is nothing to solve for; give decision points")
    texts = [scores] if isinstance(scores, Scores) else list(scores)
    c = engine.config
    mark = format_fingerprint(*sidecar_fingerprint(zchain, c.num_hidden_layers))
    head = {
        "format": 1, **about, "method": "carry", "base_fnv": mark.strip(), "rule": asdict(rule),
        "turns": turns_digest(turns), "text": [s.text.digest for s in texts],
    }  # fmt: skip
    done = finished(out, head)
    if done is not None:
        return done
    last = c.num_hidden_layers - 1
    with WorkFolder(out, head, gain_bytes(c.n_routed_experts, c.hidden_size, GAIN_FP4) + (1 << 20)) as work:
        files = {FINGERPRINT: work.put(FINGERPRINT, mark.encode(), lambda p: p.read_bytes() == mark.encode())}
        n_read, total = [0], sum(len(s.text.slices) for s in texts) + 2 * len(turns)

        def tell() -> None:
            n_read[0] += 1
            if progress is not None:
                progress(n_read[0], total)

        weights = _weights(engine, zchain, None)
        points, a_P, before_P, others = _read_turns(engine, weights, turns, tell)
        text = TextPlaces.join([read_text(engine, weights, s, tell) for s in texts])
        carry = Carry(text, Head.of(engine), c.n_routed_experts, rule, workers)
        found = carry.solve(points, a_P, [others] if len(others.places) else [])
        led_P = before_P
        if found.taken is not None:
            path = gain_path(work.folder, last)
            same = lambda p: bool(np.array_equal(read_gains(p, *found.s_ED.shape), found.s_ED))  # noqa: E731
            files[path.name] = work.put(path.name, encode_gains(found.s_ED), same)
            led_P = _led(engine, _weights(engine, zchain, work.folder), turns, tell)
        figures = _figures(found, carry.head, others, before_P, led_P)
        manifest = {**head, "figures": figures, "layers": [{"layer": last, "files": files}]}
        told = report(manifest)
        if say is not None:
            say(told.splitlines()[1])
        work.publish({"manifest.json": json.dumps(manifest, indent=1) + "\n", "manifest.txt": told})
    return manifest


def _weights(engine: Engine, zchain: Path | None, posttrain: Path | None) -> ModelWeights:
    assert engine.bare is not None
    if zchain is None and posttrain is None:
        return engine.bare
    return mount(engine.bare, Mounted.open(engine.config, zchain, posttrain), engine.device)


def _read_turns(
    engine: Engine, weights: ModelWeights, turns: Sequence[Turn], tell: Callable[[], None]
) -> tuple[Places, NDArray[np.int64], NDArray[np.bool_], TextPlaces]:
    """Points, their wanted tokens and whether these lead; every other decision."""
    parts, logits, wanted = [], [], []
    for turn in turns:
        places, logits_PV = read_places(engine, weights, turn)
        parts.append(places)
        logits.append(logits_PV)
        wanted += [-1] * (len(places) - 1) + [-1 if turn.wanted is None else turn.wanted]
        tell()
    places, logits_PV, a_P = Places.join(parts), np.concatenate(logits), np.array(wanted, np.int64)
    point_P = a_P >= 0
    others = TextPlaces(places, logits_PV, None, np.arange(len(places))).take(~point_P)
    return places.take(point_P), a_P[point_P], logits_PV[point_P].argmax(axis=1) == a_P[point_P], others


def _led(
    engine: Engine, weights: ModelWeights, turns: Sequence[Turn], tell: Callable[[], None]
) -> NDArray[np.bool_]:  # fmt: skip
    """Whether each point's token leads, by a real forward."""
    led = []
    for turn in turns:
        if turn.wanted is not None:
            led.append(int(read_places(engine, weights, turn)[1][-1].argmax()) == turn.wanted)
        tell()
    return np.array(led, np.bool_)


def _figures(
    found: Carried, head: Head, others: TextPlaces, before_P: NDArray[np.bool_], led_P: NDArray[np.bool_]
) -> dict[str, Any]:  # fmt: skip
    after_PV = head.logits(others.places.moved(found.s_ED.astype(np.float64) - 1))
    kept_P = after_PV.argmax(axis=1) == others.logits_PV.argmax(axis=1)
    return {
        "points": len(led_P), "led_before": int(before_P.sum()), "led": int(led_P.sum()),
        "flipped": float(led_P[~before_P].mean()) if (~before_P).any() else 1.0,
        "others": len(kept_P), "kept": float(kept_P.mean()) if len(kept_P) else 1.0, "taken": found.taken,
        "steps": [{"led": s.led, "sigma_min": s.held_out.value, "se": s.held_out.se} for s in found.steps],
        "gain_rms": float(np.sqrt(np.square(found.s_ED.astype(np.float64) - 1).mean())),
    }  # fmt: skip


def report(manifest: Mapping[str, Any]) -> str:
    """manifest.txt."""
    f = manifest["figures"]
    lines = [
        f"Post-training that carries over, on sidecar {manifest['base_fnv']}.",
        f"{f['points']} points, {f['led_before']} led by their token before, {f['led']} now; {f['kept']:.2%} of "
        f"{f['others']} other decisions keep their strongest token.",
        "No step was worth what it cost text: no table." if f["taken"] is None else f"Step {f['taken']} was taken:",
        "",
        "  step   points led   Sigma-min on held-out text",
    ]
    for number, s in enumerate(f["steps"]):
        se = "" if s["se"] is None else f" +- {s['se']:.5f}"
        lines.append(f"{number:6d} {s['led']:12d}   {s['sigma_min']:+.5f}{se}")
    return "\n".join(lines) + "\n"
