"""An engine reads a text, and its logits meet the original's.

The engine is used through the door that users use: `prefill` asks for all rows of one prompt, `decode` steps through
it by the kernels that a served answer takes. Each window is a session of its own. A part of the text is read by the
other path as well: what the two paths differ by is the floor under every difference between two engines (A/A).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds4.engine import Engine
from ds4.engine.segments import Tap
from ds4.engine.slots import MAX_ROWS
from ds4.errors import UsageError
from rulers.journal import Journal
from rulers.numbers import FIGURES, position_figures
from rulers.reading import Reading
from rulers.routing import EnginePicks, same_experts
from rulers.scores import Meta, Scores

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
Progress = Callable[[int, int], None]  # positions read, positions in all
PATHS = ("prefill", "decode")


def window_logits(
    engine: Engine,
    ids: list[int],
    path: str,
    passed: Callable[[int], None] | None = None,
    tap: Tap | None = None,
) -> F32:
    """Logits f32 [n, V] of one window. `passed` hears how many positions are done, `tap` sees the layers' streams.

    Decode steps take up to 8 known tokens a pass, which gives the bits of one at a time (tests/engine hold it).
    """
    session = engine.session()
    report = passed or (lambda n: None)
    if path == "prefill":
        out = session.sync(ids, logits="all", on_progress=lambda done, _: report(done), tap=tap)
        assert out is not None
        return out
    first = session.sync(ids[:1], logits="all", tap=tap)
    assert first is not None
    rows = [first]
    for i in range(1, len(ids), MAX_ROWS):
        rows.append(session.step(ids[i : i + MAX_ROWS], tap=tap))
        report(min(i + MAX_ROWS, len(ids)))
    return np.concatenate(rows)


@dataclass(frozen=True)
class Ruler:
    """One text and the original's scores of it, to hold an engine against.

    Args:
        floor_tokens: about how many tokens the other path reads; 0: the floor is not measured.
        picks: i32 [L, n, k], the original's experts (routing.py), to compare ours with; None: not compared.
    """

    teacher: Scores
    floor_tokens: int = 4096
    picks: I32 | None = None

    def floor_windows(self) -> list[int]:
        """Evenly over the text, so that they are of as many documents as may be."""
        n = len(self.teacher.text.slices)
        if self.floor_tokens <= 0:
            return []
        count = min(n, max(2, round(n * self.floor_tokens / len(self.teacher.text))))
        return sorted({(2 * i + 1) * n // (2 * count) for i in range(count)})

    def job(self, ours: Meta) -> str:
        """Names the work: what an interrupted run of it finished, another may take."""
        parts = [self.teacher.meta.to_json(), ours.to_json(), self.teacher.text.digest]
        return " ".join([*parts, str(self.floor_tokens), "no picks" if self.picks is None else "picks"])

    def read(self, engine: Engine, ours: Meta, journal: Journal, progress: Progress | None = None) -> Reading:
        """Read every window by `ours.path`, some by the other path too.

        Args:
            journal: of `job(ours)`; windows that it has are not read again.

        Raises:
            UsageError: the engine's model is not the teacher's.
            FileFormatError: logits that are not finite.
        """
        check_same_model(self.teacher, ours, engine.config.vocab_size)
        text = self.teacher.text
        other = PATHS[1 - PATHS.index(ours.path)]
        units = [(str(w), w, ours.path) for w in range(len(text.slices))]
        units += [(f"floor {w}", w, other) for w in self.floor_windows()]
        sizes = [text.slices[w].stop - text.slices[w].start for _, w, _ in units]
        done = 0
        for (unit, w, path), size in zip(units, sizes):
            if unit not in journal.done:
                compared = path == ours.path
                journal.add(unit, self._window(engine, w, path, compared, _within(progress, done, sum(sizes))))
            done += size
            if progress is not None:
                progress(done, sum(sizes))
        return self._reading(ours, journal)

    def _window(
        self, engine: Engine, window: int, path: str, compared: bool, passed: Callable[[int], None]
    ) -> dict[str, list[list[float]]]:
        """One window's figures, and which layers chose the original's experts, where that is asked for."""
        where = self.teacher.text.slices[window]
        ids = self.teacher.text.ids[where]
        tap = EnginePicks(engine, len(ids)) if compared and self.picks is not None else None
        logits = window_logits(engine, ids.tolist(), path, passed, tap)
        figures = position_figures(self.teacher.rows(where)[:-1], logits[:-1], ids[1:])
        same: list[list[float]] = []
        if tap is not None and self.picks is not None:
            same = same_experts(self.picks[:, where], tap.picks)[:, :-1].tolist()
        return {"figures": figures.tolist(), "same_experts": same}

    def _reading(self, ours: Meta, journal: Journal) -> Reading:
        text = self.teacher.text
        starts = np.cumsum([0, *(s.stop - s.start - 1 for s in text.slices)])
        floor = self.floor_windows()
        positions = [np.arange(starts[w], starts[w + 1]) for w in floor]
        records = [journal.done[str(w)] for w in range(len(text.slices))]
        same = np.zeros((0, len(text.scored)))
        if self.picks is not None:
            same = np.concatenate([np.array(r["same_experts"]) for r in records], axis=1)
        return Reading(
            text,
            _joined([r["figures"] for r in records]),
            _joined([journal.done[f"floor {w}"]["figures"] for w in floor]),
            np.concatenate([np.zeros(0, np.int64), *positions]).astype(np.int64),
            same.astype(np.uint8),
            self.teacher.meta,
            ours,
        )


def check_same_model(teacher: Scores, ours: Meta, vocab_size: int) -> None:
    """Raises UsageError, which names both."""
    if teacher.meta.model != ours.model or teacher.vocab_size != vocab_size:
        raise UsageError(
            f"{ours.weights} is of model {ours.model} ({vocab_size} tokens), {teacher.meta.weights} of model "
            f"{teacher.meta.model} ({teacher.vocab_size} tokens): judge a base by the checkpoint it was made from"
        )


def read_text(
    teacher: Scores, ours: Meta, logits: Callable[[list[int]], F32], progress: Progress | None = None
) -> Reading:
    """As `Ruler.read` for anything that gives logits f32 [n, V] of a window's ids; without floor or journal."""
    check_same_model(teacher, ours, teacher.vocab_size)
    text, parts = teacher.text, []
    for where in text.slices:
        ids = text.ids[where]
        parts.append(position_figures(teacher.rows(where)[:-1], logits(ids.tolist())[:-1], ids[1:]))
        if progress is not None:
            progress(where.stop, len(text))
    none = np.zeros((len(FIGURES), 0))
    experts = np.zeros((0, len(text.scored)), np.uint8)
    return Reading(text, np.concatenate(parts, axis=1), none, np.zeros(0, np.int64), experts, teacher.meta, ours)


def _joined(parts: list[list[list[float]]]) -> F64:
    return np.concatenate([np.zeros((len(FIGURES), 0)), *(np.array(p, np.float64) for p in parts)], axis=1)


def _within(progress: Progress | None, done: int, total: int) -> Callable[[int], None]:
    return lambda n: progress(done + n, total) if progress is not None else None
