"""A domain's sidecar, solved layer by layer on captures of the engine that will mount it.

For each layer, those before it mounted: capture; solve the router bias and, if it helps unseen rows, write and mount
it and capture again; solve the gains and, if they help, write and mount them. A file is written beside its name, read
back by the reader that a load uses, mounted, and kept only if the kernels then give what was solved.

    NAME.part/        the layer files so far; becomes NAME by one rename, with manifest.json and manifest.txt
    NAME.part.json    what is solved and from what (`head`), and each finished layer's record
    NAME.part.lock    held by the process that works on it

A killed run goes on at its layer and gives the same bytes: a layer depends on the files before it and on nothing
else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4.base.codebook import Workers
from ds4.engine import Engine
from ds4.errors import Ds4Error, UsageError
from ds4.sidecar.files import (
    GAIN_FP4,
    bias_path,
    encode_bias,
    encode_gains,
    gain_bytes,
    gain_path,
    read_bias,
    read_gains,
)
from ds4.sidecar.fingerprint import format_fingerprint, sidecar_fingerprint
from ds4.teacher.moe import route
from ds4.teacher.run import Teacher
from solvers.bias import BiasSolution, solve_bias
from solvers.capture import Captured, Captures
from solvers.fixture import Fixture, Target
from solvers.gains import BEST, LEAST_GAIN, RECIPE, GainSolution, Rule, solve_gains
from solvers.rows import BlockRows
from solvers.windows import held_out
from solvers.workfolder import WorkFolder, finished

F32 = NDArray[np.float32]
Mask = NDArray[np.bool_]
Say = Callable[[str], None]
Progress = Callable[[int, int], None]  # thousandths of layers done, in all

LEAST_ROUTING = (
    0.99  # share of rows at which the original's router, on the input that is kept, must choose as is kept
)
MOUNTED_WITHIN = 1e-5  # of a slot's largest value: factors and base gains multiply in another order than here


@dataclass(frozen=True)
class Way:
    """How a layer is solved.

    gains: the rule for gains. bias_rounds: how often the bias is repeated on scores biased so far.
    least_bias_gain: share of the block's held-out error that a bias must take away to stay; None: it stays if more
        rows get the original's experts, whatever the block does.
    """

    gains: Rule
    bias_rounds: int
    least_bias_gain: float | None = None


WAYS = {"recipe": Way(RECIPE, 1), "best": Way(BEST, 4, LEAST_GAIN)}


def solve_sidecar(
    engine: Engine,
    teacher: Teacher,
    fixture: Fixture,
    out: Path,
    about: Mapping[str, Any],
    *,
    way: str = "recipe",
    workers: Workers | None = None,
    say: Say | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Solve a sidecar into the folder `out`; goes on where a killed run of the same job stopped.

    Args:
        engine: on the base, as it is served, no sidecar on.
        teacher: the original that the fixture is of.
        about: what the bytes depend on beside the fixture, for people and to tell jobs apart: JSON values.
        way: one of WAYS.
        say: gets a line a layer.

    Returns:
        The manifest.

    Raises:
        UsageError: no such way, a text too short to hold rows out, a folder that is something else's, or another
            process at work on it.
        FileFormatError: a broken fixture.
        CapacityError: the disk cannot hold it, known before the work.
        Ds4Error: captures are not what the engine computes, the fixture's routing is not its input's, or what is
            mounted is not what was solved.
    """
    if way not in WAYS:
        raise UsageError(f"way {way!r} is unknown; there are {', '.join(WAYS)}")
    head = _head(fixture, about, way)
    done = finished(out, head)
    if done is not None:
        return done
    text = fixture.text
    sources_T = np.unique(np.array(fixture.sources), return_inverse=True)[1]
    held_T = held_out(text.documents, sources_T)
    captures = Captures(engine, text)
    c = engine.config
    room = c.num_hidden_layers * (
        gain_bytes(c.n_routed_experts, c.hidden_size, GAIN_FP4) + 4 * c.n_routed_experts + 8
    )
    with WorkFolder(out, head, room + (1 << 16)) as work:
        captures.mount(work.folder if work.records else None)
        for layer in range(len(work.records), c.num_hidden_layers):
            job = _Layer(captures, work, teacher, layer, held_T, WAYS[way], workers, _within(progress, layer, c))
            record = job.solve(fixture.layer(layer))
            work.add(record)
            if say is not None:
                say(describe(record))
        mark = format_fingerprint(*sidecar_fingerprint(work.folder, c.num_hidden_layers)).strip()
        manifest = {**head, "fingerprint": mark, "held_out_rows": int(held_T.sum()), "layers": work.records}
        work.publish({"manifest.json": to_json(manifest), "manifest.txt": report(manifest)})
    return manifest


def to_json(manifest: Mapping[str, Any]) -> str:
    """The text of manifest.json."""
    return json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"


def _head(fixture: Fixture, about: Mapping[str, Any], way: str) -> dict[str, Any]:
    h = fixture.head
    kept = {name: h[name] for name in ("model", "arithmetic", "domain", "split", "dtype", "tokens", "text")}
    rule = json.loads(json.dumps(asdict(WAYS[way])))  # as it reads back, so that a changed rule is another job
    return {"format": 1, **about, **kept, "way": way, "rule": rule}


def _within(progress: Progress | None, layer: int, config: Any) -> Callable[[float], None]:
    def tell(share: float) -> None:
        if progress is not None:
            progress(int(1000 * (layer + share)), 1000 * config.num_hidden_layers)

    return tell


@dataclass
class _Layer:
    """One layer's work, with those before it mounted."""

    captures: Captures
    work: WorkFolder
    teacher: Teacher
    layer: int
    held_T: Mask
    way: Way
    workers: Workers | None
    tell: Callable[[float], None]

    def solve(self, target: Target) -> dict[str, Any]:
        """Solve, write, mount; the layer's record."""
        routing = self._original_routing(target)
        found = self._capture(0.0)
        shares = {"sums": found.sums, "sets": found.sets, "original_routing": routing}
        errors = {"before": block_error(found, target.output_TD, self.held_T)}
        files: dict[str, str] = {}
        bias = solve_bias(found.scores_TE, target.picks_Tk, self.held_T, self.way.bias_rounds)
        tried = bias.mounted
        if tried:
            found, bias = self._biased(found, target, bias, files, errors["before"])
        errors["with_bias"] = block_error(found, target.output_TD, self.held_T)
        E = self.captures.engine.config.n_routed_experts
        rows = BlockRows(found.slots_TKD, found.picks_TK, found.shared_TD, target.output_TD, E)
        gains = solve_gains(
            rows, self.held_T, self.way.gains, self.workers, lambda done, n: self.tell(0.5 + 0.5 * done / n)
        )
        if gains.mounted:
            path = gain_path(self.work.folder, self.layer)
            files[path.name] = self.work.put(
                path.name, encode_gains(gains.s_ED), lambda p: self._same_gains(p, gains)
            )
            self.captures.mount(self.work.folder)
            self._check_gains(found, gains)
        self.tell(1.0)
        errors["with_gains"] = gains.held_out_after if gains.mounted else errors["with_bias"]
        return {
            "layer": self.layer, "shares": shares, "held_out_error": errors, "bias": _bias_record(bias, tried),
            "gains": _gains_record(gains), "files": files,
        }  # fmt: skip

    def _biased(
        self, found: Captured, target: Target, bias: BiasSolution, files: dict[str, str], before: float
    ) -> tuple[Captured, BiasSolution]:
        """Mount the bias and capture again; what was found before, and the bias unmounted, if that is not better."""
        path = bias_path(self.work.folder, self.layer)
        mark = self.work.put(path.name, encode_bias(bias.delta_E), lambda p: self._same_bias(p, bias))
        self.captures.mount(self.work.folder)
        again = self._capture(0.25)  # its check tells whether the kernel chooses by the bias
        least = self.way.least_bias_gain
        if least is None or block_error(again, target.output_TD, self.held_T) < (1 - least) * before:
            files[path.name] = mark
            return again, bias
        self.work.drop(path.name)
        self.captures.mount(self.work.folder)
        return found, replace(
            bias, delta_E=np.zeros_like(bias.delta_E), alpha=0.0, rounds=0, same_set_after=bias.same_set
        )

    def _capture(self, start: float) -> Captured:
        return self.captures.layer(self.layer, progress=lambda done, n: self.tell(start + 0.25 * done / n))

    def _original_routing(self, target: Target) -> float:
        """Share of rows at which the original's router chooses, from the input that is kept, what is kept."""
        nm, config = self.teacher.nm, self.teacher.config
        moe = self.teacher.stream.layer(f"layers.{self.layer}").moe
        picks, _ = route(nm, config, moe, nm.to_xp(target.input_TD), None, config.num_experts_per_tok)
        share = float((np.sort(target.picks_Tk, axis=1) == nm.to_host(picks)).all(axis=1).mean())
        if share < LEAST_ROUTING:
            raise Ds4Error(
                f"layer {self.layer}: the original's router chooses what the fixture says at {share:.2%} of its "
                f"rows; at least {LEAST_ROUTING:.0%} must: fixture and checkpoint do not belong together"
            )
        return share

    def _same_bias(self, path: Path, bias: BiasSolution) -> bool:
        return bool(np.array_equal(read_bias(path, len(bias.delta_E)), bias.delta_E))

    def _same_gains(self, path: Path, gains: GainSolution) -> bool:
        return bool(np.array_equal(read_gains(path, *gains.s_ED.shape), gains.s_ED))

    def _check_gains(self, found: Captured, gains: GainSolution) -> None:
        """The engine's kernels, with the file on, give each slot of the first window times its factor.

        Raises:
            Ds4Error: they do not; the file is gone again.
        """
        again = self.captures.layer(self.layer, [0])
        n = len(again.picks_TK)
        want_TKD = found.slots_TKD[:n] * gains.s_ED[found.picks_TK[:n]]
        off_TKD = np.abs(again.slots_TKD - want_TKD)
        limit_TK1 = MOUNTED_WITHIN * np.abs(want_TKD).max(axis=2, keepdims=True)
        if np.array_equal(again.picks_TK, found.picks_TK[:n]) and (off_TKD <= limit_TK1).all():
            return
        self.work.drop(gain_path(self.work.folder, self.layer).name)
        raise Ds4Error(
            f"layer {self.layer}: with the gains mounted the engine's slots are off by up to {off_TKD.max():.3g} "
            "from what was solved; the file is not kept"
        )


def block_error(found: Captured, output_TD: F32, wanted_T: Mask) -> float:
    """Sum of squared differences of the block's parts, unrounded, from the original's output on some rows."""
    total = 0.0
    wanted = np.flatnonzero(wanted_T)
    for first in range(0, len(wanted), 256):
        rows = wanted[first : first + 256]
        off = found.slots_TKD[rows].sum(axis=1) + found.shared_TD[rows] - output_TD[rows]
        total += float(np.square(off, dtype=np.float64).sum())
    return total


def _bias_record(bias: BiasSolution, tried: bool) -> dict[str, Any]:
    return {
        "written": bias.mounted, "tried": tried, "alpha": bias.alpha, "rounds": bias.rounds,
        "same_set": bias.same_set, "same_set_after": bias.same_set_after, "armed": bias.n_armed,
        "events": bias.n_events,
        "by_alpha": [{"alpha": a, "same_set": share} for a, share in bias.by_alpha],
    }  # fmt: skip


def _gains_record(gains: GainSolution) -> dict[str, Any]:
    return {
        "written": gains.mounted, "lambda": gains.lam, "louder": gains.louder, "held_out_gain": gains.held_out_gain,
        "fitted_rows": gains.n_fitted, "untouched_experts": gains.n_untouched,
        "by_lambda": [{"lambda": c.lam, "fitted": c.fitted, "held_out": c.held_out} for c in gains.candidates],
    }  # fmt: skip


# -- for people --


def describe(record: Mapping[str, Any]) -> str:
    """One layer in a line."""
    bias, gains, error = record["bias"], record["gains"], record["held_out_error"]
    same = f"experts as the original's {bias['same_set']:.1%}"
    same += f" -> {bias['same_set_after']:.1%} (alpha {bias['alpha']:g})" if bias["written"] else ", no bias"
    found = f"{gains['held_out_gain']:.2%} of the held-out error (lambda {gains['lambda']:g})"
    found += f", made {gains['louder']:.3f} times as loud" if gains["louder"] != 1 else ""
    found = f"gains take {found}" if gains["written"] else f"no gains: they would take {found}"
    whole = 1 - error["with_gains"] / error["before"] if error["before"] else 0.0
    return f"layer {record['layer']:02d}: {same}; {found}; in all {whole:.2%}"


def report(manifest: Mapping[str, Any]) -> str:
    """manifest.txt: what was solved, and what each layer's files do on rows that were not fitted."""
    layers, beside = manifest["layers"], manifest.get("beside")
    also = "" if beside is None else f" and of {beside['domain']}'s ({beside['tokens']:,})"
    head = (
        f"A sidecar for domain {manifest['domain']}, solved by the way {manifest['way']!r} on {manifest['tokens']:,} "
        f"tokens of its {manifest['split']} slice{also},\n{manifest['held_out_rows']:,} held out; fingerprint "
        f"{manifest['fingerprint']}. Figures are of held-out rows, each layer with those\nbefore it mounted.\n"
    )
    lines = [head, "layer   same experts, before   after   alpha    lambda   gains take   in all   louder"]
    for record in layers:
        bias, gains, error = record["bias"], record["gains"], record["held_out_error"]
        whole = 1 - error["with_gains"] / error["before"] if error["before"] else 0.0
        alpha = f"{bias['alpha']:g}" if bias["written"] else "-"
        lam = f"{gains['lambda']:g}" if gains["written"] else "-"
        lines.append(
            f"   {record['layer']:02d}   {bias['same_set']:>20.2%}  {bias['same_set_after']:>6.2%}   {alpha:>5}  "
            f"{lam:>8}  {gains['held_out_gain']:>11.2%}  {whole:>7.2%}  {gains['louder']:>7.3f}"
        )
    with_bias = sum(r["bias"]["written"] for r in layers)
    with_gains = sum(r["gains"]["written"] for r in layers)
    lines.append(f"\n{with_bias} of {len(layers)} layers have a router bias, {with_gains} have gains.")
    return "\n".join(lines) + "\n"
