"""The refit solve: gains of a post-training folder ③, from the text of requests against the original.

    minimise  sum_i | sum_k s_{e_ik} * y_ik + ysh_i - y_i^orig |^2  +  ridge        (gains.py, the rule BEST)

as a sidecar's, on rows of the requests' own text, with the sidecar ② mounted: y_ik has ②'s gain inside, and s = 1
means ② as it is. No router bias, which a ③ cannot have; ②'s stay on. All layers one after the other, each with those
before it mounted, or the last one alone.

Rows are held out by document, a document being a request (or the requests of one conversation): what was asked once
is either fitted or judged by, never both, when choices are made; the rule then fits all rows once more. What windows
begin with in common (the begin-of-sentence token, a template, a system message) counts in the first of them only, or
the same rows would be fitted in one and judged by in another.

Gains of a layer are kept if they take half a percent off the error of the requests held out and add no more than that
to the error of the text beside them, both measured against ② with one factor for all its experts together
(`level_of`). That factor is there because ② is louder than the least error would have it (gains.py), and undoing that
says nothing about the day.

The folder is made as a sidecar is (sidecar.py): NAME.part until all layers are there, taken up after a kill with the
same bytes. `base.fnv` in it names the ② that it was solved on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ds4.base.codebook import Workers
from ds4.engine import Engine
from ds4.errors import UsageError
from ds4.sidecar.files import FINGERPRINT, GAIN_FP4, gain_bytes
from ds4.sidecar.fingerprint import check_base, format_fingerprint, sidecar_fingerprint
from ds4.teacher.run import Teacher
from rulers.text import Text
from solvers.capture import Captured, Captures
from solvers.day_text import SOURCE
from solvers.fixture import Fixture, Target
from solvers.gains import BEST, LEAST_GAIN, GainSolution
from solvers.layer import LayerWork, Progress, gains_record, within
from solvers.workfolder import WorkFolder, finished

Layers = Literal["all", "last"]
LAYERS: tuple[Layers, ...] = ("all", "last")
EVERY = 4  # every fourth document is held out
MOST_LOSS = 0.005  # share that may be added to the held-out error of the text beside

F32 = NDArray[np.float32]
Mask = NDArray[np.bool_]
Say = Callable[[str], None]


def refit(
    engine: Engine,
    teacher: Teacher,
    fixture: Fixture,
    zchain: Path | None,
    out: Path,
    about: Mapping[str, Any],
    *,
    layers: Layers = "all",
    workers: Workers | None = None,
    say: Say | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Solve a post-training folder into `out`; goes on where a killed run of the same job stopped.

    Args:
        engine: on the base, bf16 and fp4. What it has mounted and how it prefills does not matter and is not changed:
            captures are made on its bare weights with `zchain` on, windows prefilled in full.
        teacher: the original that the fixture is of.
        fixture: of the day's text (day_text.py), and of text beside it that is not to suffer.
        zchain: the sidecar that is mounted under it; None: none.
        about: what the bytes depend on beside the fixture and the sidecar: JSON values.
        layers: "all", or the "last" one alone.
        say: gets a line a layer.

    Returns:
        The manifest. A layer without gains is one where they would not have helped; none of them may have.

    Raises:
        UsageError: no such layers, fewer than four requests, a folder that is something else's, or another process
            at work on it.
        FileFormatError: a broken fixture or sidecar.
        CapacityError: the disk cannot hold it, known before the work.
        Ds4Error: captures are not what the engine computes, the fixture's routing is not its input's, or what is
            mounted is not what was solved.
    """
    if layers not in LAYERS:
        raise UsageError(f"layers {layers!r} are unknown; there are {', '.join(LAYERS)}")
    c = engine.config
    n_layers = c.num_hidden_layers
    under = format_fingerprint(*sidecar_fingerprint(zchain, n_layers))
    head = _head(fixture, about, under.strip(), layers)
    done = finished(out, head)
    if done is not None:
        check_base(out, zchain, n_layers)
        return done
    held_T, requests, held_requests = hold_out(fixture)
    asked_T = np.array([source == SOURCE for source in fixture.sources])
    fresh_T = first_seen(fixture.text)
    captures = Captures(_bare(engine), fixture.text)
    wanted = range(n_layers) if layers == "all" else range(n_layers - 1, n_layers)
    room = len(wanted) * gain_bytes(c.n_routed_experts, c.hidden_size, GAIN_FP4)
    with WorkFolder(out, head, room + (1 << 16)) as work:
        work.put(FINGERPRINT, under.encode(), lambda p: p.read_bytes() == under.encode())

        def mount() -> None:
            captures.mount(zchain, work.folder)

        mount()
        for done_before, layer in list(enumerate(wanted))[len(work.records) :]:
            tell = within(progress, done_before, len(wanted))
            job = _Layer(captures, work, mount, teacher, layer, held_T, workers, tell, asked_T, fresh_T)
            record = job.solve(fixture.layer(layer))
            work.add(record)
            if say is not None:
                say(describe(record))
        judged = int((held_T & fresh_T).sum())
        manifest = {
            **head, "fingerprint": format_fingerprint(*sidecar_fingerprint(work.folder, n_layers)).strip(),
            "requests": requests, "held_out_requests": held_requests, "held_out_rows": judged,
            "repeated_rows": int((~fresh_T).sum()), "layers": work.records,
        }  # fmt: skip
        text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
        work.publish({"manifest.json": text, "manifest.txt": report(manifest)})
    return manifest


def hold_out(fixture: Fixture) -> tuple[Mask, int, int]:
    """Which rows are never fitted, bool [T]; how many requests there are, and how many of them are held out.

    Every fourth document whole, counted source by source in text order, on from one source to the next.

    Raises:
        UsageError: fewer than four requests.
    """
    documents_T, sources_T = fixture.text.documents, np.array(fixture.sources)
    documents, first, which_T = np.unique(documents_T, return_index=True, return_inverse=True)
    sources = sources_T[first]
    requests = int((sources == SOURCE).sum())
    require_requests(requests, str(fixture.path))
    order = np.lexsort((first, sources, sources != SOURCE))
    held = np.zeros(len(documents), np.bool_)
    held[order[EVERY - 1 :: EVERY]] = True
    return held[which_T], requests, int(held[sources == SOURCE].sum())


def first_seen(text: Text) -> Mask:
    """bool [T], False on rows that repeat one: a window's tokens as far as another window before it begins with the
    same ones. A model computes the same there.
    """
    fresh_T = np.zeros(len(text), np.bool_)
    children: dict[tuple[int, int], int] = {}  # (node, token) -> node; a node is a beginning of some window
    for part in text.slices:
        node = 0
        for at, token in enumerate(text.ids[part].tolist(), start=part.start):
            fresh_T[at] = (node, token) not in children
            node = children.setdefault((node, token), len(children) + 1)
    return fresh_T


def require_requests(n: int, where: str) -> None:
    """Raises UsageError: `n` requests, or conversations, are too few to hold one out."""
    if n < EVERY:
        raise UsageError(
            f"{where}: has text of {n} different requests; a refit needs at least {EVERY}, to hold one out: "
            "take more days together"
        )


def level_of(found: Captured, output_TD: F32, rows_T: Mask) -> float:
    """The one factor for all experts of a layer that leaves the least error on some rows."""
    both, ours = 0.0, 0.0
    for rows in _pieces(rows_T):
        routed_TD, wanted_TD = _routed(found, rows, None), _wanted(found, output_TD, rows)
        both += _inner(routed_TD, wanted_TD)
        ours += _inner(routed_TD, routed_TD)
    return both / ours if ours > 0 else 1.0


def error_with(found: Captured, output_TD: F32, rows_T: Mask, s_ED: F32 | None = None, factor: float = 1.0) -> float:
    """Sum of squared differences of the block's parts from the original's output on some rows, with gains on.

    Args:
        s_ED: gains f32 [E, D]; None: 1. factor: of all experts beside that.
    """
    total = 0.0
    for rows in _pieces(rows_T):
        off_TD = _wanted(found, output_TD, rows) - factor * _routed(found, rows, s_ED)
        total += _inner(off_TD, off_TD)
    return total


def _pieces(rows_T: Mask) -> list[NDArray[np.int64]]:
    rows = np.flatnonzero(rows_T)
    return [rows[i : i + 256] for i in range(0, len(rows), 256)]


def _routed(found: Captured, rows: NDArray[np.int64], s_ED: F32 | None) -> NDArray[np.float64]:
    """What the experts add together, [rows, D]."""
    slots_TKD = found.slots_TKD[rows]
    if s_ED is not None:
        slots_TKD = slots_TKD * s_ED[found.picks_TK[rows]]
    return np.asarray(slots_TKD.sum(axis=1, dtype=np.float64))


def _wanted(found: Captured, output_TD: F32, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """What they should add, [rows, D]."""
    return output_TD[rows].astype(np.float64) - found.shared_TD[rows]


def _inner(a_TD: NDArray[np.float64], b_TD: NDArray[np.float64]) -> float:
    """sum a b, not by BLAS, whose number of threads would be seen in the last bits."""
    return float(np.multiply(a_TD, b_TD).sum())


def _bare(engine: Engine) -> Engine:
    """The engine as captures want it, on the same device memory: nothing mounted, prompts prefilled in full."""
    return replace(engine.with_prefill("full"), weights=engine.bare or engine.weights, mounted=None)


def _head(fixture: Fixture, about: Mapping[str, Any], under: str, layers: str) -> dict[str, Any]:
    h = fixture.head
    kept = {name: h[name] for name in ("model", "arithmetic", "domain", "split", "dtype", "tokens", "text")}
    rule = json.loads(json.dumps(asdict(BEST)))  # as it reads back, so that a changed rule is another job
    return {
        "format": 1, "kind": "refit", **about, **kept, "solved_on": under, "solved_layers": layers, "rule": rule,
        "least_gain": LEAST_GAIN, "most_loss": MOST_LOSS,
    }  # fmt: skip


@dataclass
class _Layer(LayerWork):
    """One layer's work.

    asked_T: bool [T], rows of requests, not of what stands beside them. fresh_T: rows that are neither fitted nor
        judged by are False.
    """

    asked_T: Mask
    fresh_T: Mask

    def solve(self, target: Target) -> dict[str, Any]:
        """Solve, write, mount; the layer's record."""
        routing = self.original_routing(target)
        found = self.capture(0.0)
        shares = {"sums": found.sums, "sets": found.sets, "original_routing": routing}
        same = (np.sort(found.picks_TK, axis=1) == np.sort(target.picks_Tk, axis=1)).all(axis=1)
        judged_T = self.held_T & self.fresh_T
        factor = level_of(found, target.output_TD, ~self.held_T & self.fresh_T)
        gains = self.solve_gains(found, target, BEST, self.fresh_T)
        groups = {"requests": judged_T & self.asked_T, "beside": judged_T & ~self.asked_T}
        error = {
            name: _errors(found, target.output_TD, rows, factor, gains) for name, rows in groups.items() if rows.any()
        }
        gained = {name: _gained(e) for name, e in error.items()}
        written = gained["requests"] > LEAST_GAIN and gained.get("beside", 0.0) >= -MOST_LOSS
        files = self.put_gains(found, gains) if written else {}
        self.tell(1.0)
        return {
            "layer": self.layer, "shares": shares, "same_set": float(same[judged_T].mean()), "level": factor,
            "held_out_error": error, "held_out_gain": gained, "gains": {**gains_record(gains), "written": written},
            "files": files,
        }  # fmt: skip


def _errors(found: Captured, output_TD: F32, rows_T: Mask, factor: float, gains: GainSolution) -> dict[str, float]:
    """Of held-out rows: with ② as it is, with one factor for all experts, with gains of the fitted rows."""
    return {
        "before": error_with(found, output_TD, rows_T),
        "levelled": error_with(found, output_TD, rows_T, factor=factor),
        "with_gains": error_with(found, output_TD, rows_T, gains.first_ED),
    }


def _gained(error: Mapping[str, float]) -> float:
    """Share of the error that gains take away beyond what one factor does, if that does anything."""
    least = min(error["before"], error["levelled"])
    return 1 - error["with_gains"] / least if least > 0 else 0.0


# -- for people --


def describe(record: Mapping[str, Any]) -> str:
    """One layer in a line."""
    gains = record["gains"]
    found = f"{_shares(record)} (lambda {gains['lambda']:g})"
    found += f", made {gains['louder']:.3f} times as loud" if gains["louder"] != 1 else ""
    return f"layer {record['layer']:02d}: " + (
        f"gains take {found}" if gains["written"] else f"no gains: they would take {found}"
    )


def _shares(record: Mapping[str, Any]) -> str:
    gained = record["held_out_gain"]
    also = f" and {gained['beside']:.2%} of the text's beside them" if "beside" in gained else ""
    return f"{gained['requests']:.2%} of the held-out requests' error{also}"


def report(manifest: Mapping[str, Any]) -> str:
    """manifest.txt: what was solved, and what each layer's gains do on requests that were not fitted."""
    layers = manifest["layers"]
    lines = [
        f"Gains for requests ({manifest['split']}), refitted on {manifest['tokens']:,} tokens of "
        f"{manifest['requests']} requests and what stands beside them,\n{manifest['held_out_rows']:,} tokens and "
        f"{manifest['held_out_requests']} of the requests held out; on sidecar {manifest['solved_on']}; fingerprint "
        f"{manifest['fingerprint']}.\nFigures are of what is held out, each layer with those before it mounted: the "
        "share of the error that gains take\nbeyond what one factor for all experts does.\n",
        "layer   same experts   factor   of requests   beside them    lambda   louder   written",
    ]
    for record in layers:
        gains, gained = record["gains"], record["held_out_gain"]
        beside = f"{gained['beside']:.2%}" if "beside" in gained else "-"
        lines.append(
            f"   {record['layer']:02d}   {record['same_set']:>12.2%}   {record['level']:>6.3f}   "
            f"{gained['requests']:>11.2%}   {beside:>11}  {gains['lambda']:>8g}  {gains['louder']:>7.3f}   "
            f"{'yes' if gains['written'] else 'no'}"
        )
    lines.append(f"\n{sum(r['gains']['written'] for r in layers)} of {len(layers)} layers have gains.")
    return "\n".join(lines) + "\n"
