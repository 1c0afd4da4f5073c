"""The margin solve of a night: ③'s last layer from decisions that are to come out otherwise, on the engine itself.

    read every decision of the turns (margin_capture.py) with ② and what ③ has already
    solve the last layer's table (margins.py), write it, mount it, read again: the real forward decides
    again from there, with the factors and margins that the engine has now, while a decision is not as wanted

The norm's factor moves with the gains, and a second reading says by how much; and a token may lead that nobody looked
at: it joins the margins (`Decisions.with_rivals`). The ridge pulls to where the first round began, in every round: a
solve that starts from the one before and forgets where it came from runs away, gains of 35 instead of 0.5 on points
that are far from what the model says. The best table by the real forward is kept: the most points led by their token
and other decisions that stay.

    OUT/    gr_Lnn.bin, base.fnv, manifest.json, manifest.txt; made beside its name, there when all of it is
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4.base.codebook import Workers
from ds4.engine import Engine
from ds4.engine.mount import Mounted, mount
from ds4.engine.weights import ModelWeights
from ds4.errors import UsageError
from ds4.sidecar.files import FINGERPRINT, GAIN_FP4, encode_gains, gain_bytes, gain_path, list_folder, read_gains
from ds4.sidecar.fingerprint import check_base, format_fingerprint, sidecar_fingerprint
from solvers.margin_capture import Decisions, MarginReader, Turn
from solvers.margins import MarginRule, MarginSolution, Verdict, solve_margins
from solvers.workfolder import WorkFolder, finished

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Mask = NDArray[np.bool_]
Say = Callable[[str], None]
Progress = Callable[[int, int], None]  # turns read, in all readings that there will be at most

OTHERS = 4096  # margins that the solve keeps at most; all are read, and judged by


@dataclass(frozen=True)
class NightRule:
    """How a night's table is sought.

    margins: see margins.py. rounds: solves from the engine's own margins, at most. others: margins to keep, at most.
    split: the place from which tokens go through decode; None: where the answer begins (margin_capture.py).
    """

    margins: MarginRule = field(default_factory=lambda: MarginRule(tau=0.5, lam=1.0))
    rounds: int = 8
    others: int = OTHERS
    split: int | None = None

    def __post_init__(self) -> None:
        """Raises UsageError: a value that gives no solve."""
        if self.rounds < 1 or self.others < 0:
            raise UsageError(f"{self.rounds} rounds, {self.others} others; expected at least 1 round and 0 others")
        if self.split is not None and self.split < 1:
            raise UsageError(f"split {self.split}: must be at least 1, a prompt's first token is prefilled")


def solve_night(
    engine: Engine,
    turns: Sequence[Turn],
    out: Path,
    about: Mapping[str, Any],
    *,
    zchain: Path | None = None,
    under: Path | None = None,
    rule: NightRule | None = None,
    workers: Workers | None = None,
    say: Say | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Solve ③ into the folder `out`.

    Args:
        engine: on the base; what it has mounted is neither used nor changed.
        turns: those with a wanted token give points, every other decision is to stay. Turns that end alike with
            other wants contradict each other: both are left out, and named.
        about: what the bytes depend on beside these, for people and to tell jobs apart: JSON values.
        zchain: ②. under: a ③ that goes on: its layers are taken over, the last one's gains are where it begins.

    Returns:
        The manifest: see `_Tried.figures`.

    Raises:
        UsageError: no turn wants anything, or `out` is something else's.
        FileFormatError: ② or `under` is broken, or they do not belong together.
        CapacityError: the disk is full.
        Ds4Error: what is read is not what the engine computes.
    """
    rule = rule or NightRule()
    if all(t.wanted is None for t in turns):
        raise UsageError("no turn has a wanted token: there is nothing to solve for; give decision points")
    if under is not None:
        check_base(under, zchain, engine.config.num_hidden_layers)
    mark = format_fingerprint(*sidecar_fingerprint(zchain, engine.config.num_hidden_layers))
    head = {
        "format": 1, **about, "method": "margins", "base_fnv": mark.strip(), "rule": _plain(asdict(rule)),
        "turns": turns_digest(turns), "under": None if under is None else _mark(under, engine),
    }  # fmt: skip
    done = finished(out, head)
    if done is not None:
        return done
    c = engine.config
    layers = c.num_hidden_layers if under is not None else 1
    room = layers * gain_bytes(c.n_routed_experts, c.hidden_size, GAIN_FP4) + (1 << 20)
    with WorkFolder(out, head, room) as work:
        files = {FINGERPRINT: work.put(FINGERPRINT, mark.encode(), lambda p: p.read_bytes() == mark.encode())}
        files |= _taken_over(work, under, c.num_hidden_layers)
        night = _Night(engine, MarginReader(engine, turns, rule.split), work, zchain, under, rule, workers, progress)
        figures = night.solve(say)
        files[night.path.name] = night.digest
        manifest = {**head, "figures": figures, "layers": [{"layer": c.num_hidden_layers - 1, "files": files}]}
        work.publish({"manifest.json": json.dumps(manifest, indent=1) + "\n", "manifest.txt": report(manifest)})
    return manifest


@dataclass
class _Tried:
    """A table: what was predicted of the margins `use_M`, what the engine then had, what it had without."""

    number: int
    s_ED: F32
    solution: MarginSolution
    use_M: Mask
    real: Decisions
    before: Decisions

    def __post_init__(self) -> None:
        order: tuple[Verdict, ...] = ("reached", "short", "immovable", "contradicts")  # the worst of a point's counts
        worst: dict[int, Verdict] = {}
        at = self.real.at_M[self.use_M][self.solution.point_N].tolist()
        for i, verdict in zip(at, self.solution.verdicts, strict=True):
            worst[i] = max(worst.get(i, "reached"), verdict, key=order.index)
        self.verdicts = worst
        self.sought = np.array([i for i, verdict in worst.items() if verdict != "contradicts"], np.int64)
        self.led = int((self.real.lead_N[self.sought] > 0).sum())
        self.kept_O: Mask = self.real.lead_N[~self.real.point_N] > 0  # a is what led before

    @property
    def right(self) -> int:
        """Decisions that are as wanted."""
        return self.led + int(self.kept_O.sum())

    @property
    def all(self) -> int:
        return len(self.sought) + len(self.kept_O)

    def __str__(self) -> str:
        return (
            f"round {self.number}: {self.led} of {len(self.sought)} points led by their token, "
            f"{int(self.kept_O.sum())} of {len(self.kept_O)} other decisions kept"
        )

    def to_json(self) -> dict[str, Any]:
        """In short."""
        was_M, real_M = self.solution.before_N, self.real.margin_M[self.use_M]
        return {
            "round": self.number, "margins": len(real_M), "points_led": self.led,
            "others_kept": int(self.kept_O.sum()),
            "correlation": _correlation(self.solution.after_N, real_M),
            "of_changes": _correlation(self.solution.after_N - was_M, real_M - was_M),
            "solves": len(self.solution.rounds), "iterations": sum(r.iterations for r in self.solution.rounds),
        }  # fmt: skip

    def figures(self) -> dict[str, Any]:
        """JSON: what the table does.

        points: a row a point, in the turns' order: turn, a, lead of a before and after, the margin that is least
            after, against token b, predicted and real, and the verdict of the solve. wrong: points not led by their
            token before; flipped: the share of those that are now, contradicting ones included. kept, others: share
            and number of the other decisions with the same strongest token. correlation: of predicted margins with
            real ones, over what was fitted. contradicting: pairs of turns.
        """
        before, real = self.before, self.real
        at_M, b_M, real_M = real.at_M[self.use_M], real.b_M[self.use_M], real.margin_M[self.use_M]
        points = np.flatnonzero(real.point_N)
        wrong = points[before.lead_N[points] <= 0]
        rows = []
        for i in points.tolist():
            mine = np.flatnonzero(at_M == i)
            m = mine[np.argmin(real_M[mine])]
            rows.append(
                {
                    "turn": int(real.turn_N[i]),
                    "a": int(real.a_N[i]),
                    "b": int(b_M[m]),
                    "before": float(before.lead_N[i]),
                    "after": float(real.lead_N[i]),
                    "predicted": float(self.solution.after_N[m]),
                    "real": float(real_M[m]),
                    "verdict": self.verdicts[i],
                }
            )
        return {
            "points": rows, "wrong": len(wrong),
            "flipped": float((real.lead_N[wrong] > 0).mean()) if len(wrong) else 1.0,
            "others": len(self.kept_O), "kept": float(self.kept_O.mean()) if len(self.kept_O) else 1.0,
            "correlation": _correlation(self.solution.after_N, real_M),
            "contradicting": [[int(real.turn_N[at_M[i]]) for i in pair] for pair in self.solution.contradicting],
            "gain_rms": float(np.sqrt(np.square(self.s_ED.astype(np.float64) - 1).mean())),
        }  # fmt: skip


class _Night:
    """One solve's readings and rounds."""

    def __init__(
        self, engine: Engine, reader: MarginReader, work: WorkFolder, zchain: Path | None, under: Path | None,
        rule: NightRule, workers: Workers | None, progress: Progress | None,
    ) -> None:  # fmt: skip
        self._engine, self._reader, self._work, self._zchain = engine, reader, work, zchain
        self._rule, self._workers, self._progress = rule, workers, progress
        c = engine.config
        self._shape = c.n_routed_experts, c.hidden_size
        self.path = gain_path(work.folder, c.num_hidden_layers - 1)
        self.digest = ""
        there = under is not None and (under / self.path.name).is_file()
        self._first: F32 | None = read_gains(under / self.path.name, *self._shape) if under and there else None
        self._readings = rule.rounds + 2
        self._read = 0

    def solve(self, say: Say | None) -> dict[str, Any]:
        """Write the best table; the figures."""
        if self._first is not None:
            self._put(self._first)
        before = self._decisions(None)
        fit_N = self._fitted(before)
        if self._first is not None:
            self._work.drop(self.path.name)
        slots = self._reader.slots(self._weights(), fit_N, self._tell())
        first_ED = s_ED = self._first if self._first is not None else np.ones(self._shape, np.float32)
        now, keep_M, best, tried = before, before.margin_M, None, []
        for number in range(self._rule.rounds):
            rows, use_M = self._reader.rows(now, slots)
            solution = solve_margins(rows, self._rule.margins, s_ED, self._workers, keep_M[use_M], first_ED)
            s_ED = solution.s_ED
            self._put(s_ED)
            real = self._decisions(now)
            found = _Tried(number + 1, s_ED, solution, use_M, real, before)
            tried.append(found.to_json())
            if say is not None:
                say(str(found))
            if best is None or found.right > best.right:
                best = found
            if found.right == found.all:
                break
            now = real.with_rivals(fit_N)
            keep_M = _kept_at(before, now)
        assert best is not None  # rounds >= 1
        if best.s_ED is not s_ED:
            self._put(best.s_ED)
        return best.figures() | {"rounds": tried}

    def _decisions(self, known: Decisions | None) -> Decisions:
        """A reading with what is mounted now."""
        return self._reader.decisions(self._weights(), known, self._tell())

    def _tell(self) -> Progress:
        done, n = self._read, len(self._reader.turns)
        self._read += 1
        return lambda i, _: self._progress(done * n + i, self._readings * n) if self._progress else None

    def _weights(self) -> ModelWeights:
        """② and the folder under work. Nothing but `base.fnv` in it is nothing mounted."""
        assert self._engine.bare is not None
        mounted = Mounted.open(self._engine.config, self._zchain, self._work.folder)
        return mount(self._engine.bare, mounted, self._engine.device)

    def _fitted(self, before: Decisions) -> Mask:
        """All points, and others evenly as far as there is room for them."""
        fit_N = before.point_N.copy()
        others = np.flatnonzero(~before.point_N)
        if len(others) > self._rule.others:
            others = others[np.linspace(0, len(others) - 1, self._rule.others).round().astype(int)]
        fit_N[others] = True
        return fit_N

    def _put(self, s_ED: F32) -> None:
        same = lambda p: bool(np.array_equal(read_gains(p, *self._shape), s_ED))  # noqa: E731 - of two lines
        self.digest = self._work.put(self.path.name, encode_gains(s_ED), same)


def _taken_over(work: WorkFolder, under: Path | None, n_layers: int) -> dict[str, str]:
    """Files of the layers below the last one."""
    if under is None:
        return {}
    found = list_folder(under, n_layers).gains
    return {
        path.name: work.put(path.name, path.read_bytes(), lambda p, q=path: p.read_bytes() == q.read_bytes())  # type: ignore[misc]
        for layer, path in sorted(found.items())
        if layer < n_layers - 1
    }


def _kept_at(before: Decisions, now: Decisions) -> F64:
    """What margins are to be that are to stay: what they were; against a token that was not looked at then, what the
    least of that decision was, which is no more than it had.
    """
    was = dict(
        zip(zip(before.at_M.tolist(), before.b_M.tolist(), strict=True), before.margin_M.tolist(), strict=True)
    )
    least_N = np.full(len(before), np.inf)
    np.minimum.at(least_N, before.at_M, before.margin_M)
    pairs = zip(now.at_M.tolist(), now.b_M.tolist(), strict=True)
    return np.array([was.get((i, b), float(least_N[i])) for i, b in pairs])


def _correlation(a_N: F64, b_N: F64) -> float | None:
    if len(a_N) < 2 or not (a_N.std() and b_N.std()):
        return None
    return float(np.corrcoef(a_N, b_N)[0, 1])


def report(manifest: Mapping[str, Any]) -> str:
    """manifest.txt."""
    f = manifest["figures"]
    lines = [
        f"Post-training by the margin solve, on sidecar {manifest['base_fnv']}.",
        f"{len(f['points'])} points, {f['wrong']} not led by their token before; {f['flipped']:.1%} of those now.",
        f"{f['others']} other decisions, {f['kept']:.2%} keep their strongest token.",
        f"Predicted margins correlate with a real forward's at {_number(f['correlation'])}, their changes in the "
        f"first round at {_number(f['rounds'][0]['of_changes'])}.",
        "",
        " turn        a     before      after   against  predicted       real   verdict",
    ]
    lines += [
        f"{p['turn']:5d} {p['a']:8d} {p['before']:10.3f} {p['after']:10.3f} {p['b']:9d} {p['predicted']:10.3f} "
        f"{p['real']:10.3f}   {p['verdict']}"
        for p in f["points"]
    ]
    return "\n".join(lines) + "\n"


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.5f}"


def turns_digest(turns: Sequence[Turn]) -> str:
    """SHA-256 of what is fed and wanted."""
    text = json.dumps([[t.prompt, t.answer, t.wanted] for t in turns])
    return hashlib.sha256(text.encode()).hexdigest()


def _mark(folder: Path, engine: Engine) -> str:
    return format_fingerprint(*sidecar_fingerprint(folder, engine.config.num_hidden_layers)).strip()


def _plain(value: Any) -> Any:
    """As it reads back from a file."""
    return json.loads(json.dumps(value))
