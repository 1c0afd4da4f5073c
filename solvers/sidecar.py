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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ds4.base.codebook import Workers
from ds4.engine import Engine
from ds4.errors import UsageError
from ds4.sidecar.files import GAIN_FP4, bias_path, encode_bias, gain_bytes, read_bias
from ds4.sidecar.fingerprint import format_fingerprint, sidecar_fingerprint
from ds4.teacher.run import Teacher
from solvers.bias import BiasSolution, solve_bias
from solvers.capture import Captured, Captures
from solvers.fixture import Fixture, Target
from solvers.gains import BEST, LEAST_GAIN, RECIPE, Rule
from solvers.layer import LayerWork, Progress, block_error, gains_record, taken, within
from solvers.windows import held_out
from solvers.workfolder import WorkFolder, finished

Say = Callable[[str], None]


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
        mounted = partial(captures.mount, work.folder)
        captures.mount(work.folder if work.records else None)
        for layer in range(len(work.records), c.num_hidden_layers):
            tell = within(progress, layer, c.num_hidden_layers)
            job = _Layer(captures, work, mounted, teacher, layer, held_T, workers, tell, WAYS[way])
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


@dataclass
class _Layer(LayerWork):
    """One layer's work: the bias, then the gains."""

    way: Way

    def solve(self, target: Target) -> dict[str, Any]:
        """Solve, write, mount; the layer's record."""
        routing = self.original_routing(target)
        found = self.capture(0.0)
        shares = {"sums": found.sums, "sets": found.sets, "original_routing": routing}
        errors = {"before": block_error(found, target.output_TD, self.held_T)}
        files: dict[str, str] = {}
        bias = solve_bias(found.scores_TE, target.picks_Tk, self.held_T, self.way.bias_rounds)
        tried = bias.mounted
        if tried:
            found, bias = self._biased(found, target, bias, files, errors["before"])
        errors["with_bias"] = block_error(found, target.output_TD, self.held_T)
        gains = self.solve_gains(found, target, self.way.gains)
        if gains.mounted:
            files |= self.put_gains(found, gains)
        self.tell(1.0)
        errors["with_gains"] = gains.held_out_after if gains.mounted else errors["with_bias"]
        return {
            "layer": self.layer, "shares": shares, "held_out_error": errors, "bias": _bias_record(bias, tried),
            "gains": gains_record(gains), "files": files,
        }  # fmt: skip

    def _biased(
        self, found: Captured, target: Target, bias: BiasSolution, files: dict[str, str], before: float
    ) -> tuple[Captured, BiasSolution]:
        """Mount the bias and capture again; what was found before, and the bias unmounted, if that is not better."""
        path = bias_path(self.work.folder, self.layer)
        mark = self.work.put(path.name, encode_bias(bias.delta_E), lambda p: self._same_bias(p, bias))
        self.mount()
        again = self.capture(0.25)  # its check tells whether the kernel chooses by the bias
        least = self.way.least_bias_gain
        if least is None or block_error(again, target.output_TD, self.held_T) < (1 - least) * before:
            files[path.name] = mark
            return again, bias
        self.work.drop(path.name)
        self.mount()
        return found, replace(
            bias, delta_E=np.zeros_like(bias.delta_E), alpha=0.0, rounds=0, same_set_after=bias.same_set
        )

    def _same_bias(self, path: Path, bias: BiasSolution) -> bool:
        return bool(np.array_equal(read_bias(path, len(bias.delta_E)), bias.delta_E))


def _bias_record(bias: BiasSolution, tried: bool) -> dict[str, Any]:
    return {
        "written": bias.mounted, "tried": tried, "alpha": bias.alpha, "rounds": bias.rounds,
        "same_set": bias.same_set, "same_set_after": bias.same_set_after, "armed": bias.n_armed,
        "events": bias.n_events,
        "by_alpha": [{"alpha": a, "same_set": share} for a, share in bias.by_alpha],
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
    return f"layer {record['layer']:02d}: {same}; {found}; in all {taken(error):.2%}"


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
        alpha = f"{bias['alpha']:g}" if bias["written"] else "-"
        lam = f"{gains['lambda']:g}" if gains["written"] else "-"
        lines.append(
            f"   {record['layer']:02d}   {bias['same_set']:>20.2%}  {bias['same_set_after']:>6.2%}   {alpha:>5}  "
            f"{lam:>8}  {gains['held_out_gain']:>11.2%}  {taken(error):>7.2%}  {gains['louder']:>7.3f}"
        )
    with_bias = sum(r["bias"]["written"] for r in layers)
    with_gains = sum(r["gains"]["written"] for r in layers)
    lines.append(f"\n{with_bias} of {len(layers)} layers have a router bias, {with_gains} have gains.")
    return "\n".join(lines) + "\n"
