"""Decision points: decisions with the logits that the model has there, and the file that solvers read.

    m = logit of a - logit of b;    a: the token that was wanted, b: the strongest other one

b is not simply what the wrong answer wrote: at a temperature that may have been any token, and the one to be beaten
is the likeliest. Logits are taken as a request makes them: a timeline of its own, the prompt through prefill, the
answer's tokens through the decode kernels, whose caches and index keys differ from prefill's in their last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ds4.errors import Ds4Error, FileFormatError, UsageError
from ds4.posttrain.decisions import Decision
from ds4.posttrain.log import parse_row, replace_file, row_bytes

KIND, VERSION = "ds4-points", 1


class PointSession(Protocol):
    """Of ds4.engine's Session what is needed here."""

    def sync(self, tokens: Sequence[int]) -> object: ...
    def step(self, tokens: Sequence[int], *, logits: bool) -> object: ...
    def logits(self) -> NDArray[np.float32]: ...


@dataclass(frozen=True)
class Point:
    """A decision and what the model does there.

    Attributes:
        prompt, answer: ids before the decision.
        a, b: the wanted token, and the strongest other one.
        logit_a, logit_b: float32 values.
        given: the token that the answer had there; None: it ended.
    """

    line: int
    request_id: str | None
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    a: int
    b: int
    logit_a: float
    logit_b: float
    given: int | None
    texts_sha256: tuple[str, ...] = ()

    @property
    def position(self) -> int:
        """The place of `a` in prompt and answer, from 0; the logits of the place before it decide."""
        return len(self.prompt) + len(self.answer)

    @property
    def margin(self) -> float:
        return self.logit_a - self.logit_b


def score_points(
    found: Sequence[Decision],
    new_session: Callable[[], PointSession],
    split: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Point]:
    """A point a decision.

    Args:
        new_session: an empty timeline each, as a request has.
        split: the first place whose token goes through decode; None: where the answer begins, as in a request. From
            the decision on or beyond it: everything goes through prefill.

    Raises:
        Ds4Error: logits that are not finite.
    """
    points = []
    for i, d in enumerate(found):
        points.append(_scored(d, new_session(), split))
        if progress is not None:
            progress(i + 1, len(found))
    return points


def _scored(d: Decision, session: PointSession, split: int | None) -> Point:
    tokens = [*d.prompt, *d.answer]
    cut = min(len(d.prompt) if split is None else split, len(tokens))
    session.sync(tokens[:cut])
    if cut < len(tokens):
        session.step(tokens[cut:], logits=False)
    logits_V = session.logits()
    if not np.isfinite(logits_V).all():
        raise Ds4Error(f"line {d.line}: logits after {len(tokens)} tokens are not finite; is the base sound?")
    others_V = logits_V.copy()
    others_V[d.a] = -np.inf
    b = int(others_V.argmax())
    return Point(
        d.line, d.request_id, d.prompt, d.answer, d.a, b, float(logits_V[d.a]), float(logits_V[b]), d.given,
        d.texts_sha256,
    )  # fmt: skip


def check_target(path: Path) -> None:
    """Refuse to write points over what is no file of points.

    Raises:
        UsageError: something else has the name.
    """
    if not path.exists():
        return
    try:
        with open(path, "rb") as f:
            head = parse_row(f.readline(1 << 16))
    except (OSError, ValueError):
        head = {}
    if head.get("kind") != KIND:
        raise UsageError(f"{path}: is there and is no file of points; name another one to write")


def write_points(path: Path, head: Mapping[str, Any], points: Iterable[Point]) -> None:
    """The file: a line that says what the points were taken on, then a point a line. Its owner's alone, as it holds
    requests as ids.

    Raises:
        CapacityError: the disk is full. Ds4Error: it cannot be written.
    """
    rows = [{"kind": KIND, "version": VERSION, **head}, *map(_row, points)]
    replace_file(path, b"".join(map(row_bytes, rows)))


def _row(p: Point) -> dict[str, Any]:
    return {
        "line": p.line, "request_id": p.request_id, "position": p.position, "a": p.a, "b": p.b,
        "logit_a": p.logit_a, "logit_b": p.logit_b, "given": p.given, "prompt_ids": p.prompt, "answer_ids": p.answer,
        "texts_sha256": p.texts_sha256,
    }  # fmt: skip


def read_points(path: str | Path) -> tuple[dict[str, Any], list[Point]]:
    """What the points were taken on, and the points; `ds4 forget` may have taken some.

    Raises:
        FileFormatError: names the file and the line.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as e:
        raise FileFormatError(f"{path}: cannot be read ({e.strerror or e})") from e
    head: dict[str, Any] | None = None
    points = []
    for n, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = parse_row(line)
            if head is None:
                if row.get("kind") != KIND or row.get("version") != VERSION:
                    raise ValueError(f"is not the head of a points file of version {VERSION}")
                head = row
            else:
                points.append(_point(row))
        except ValueError as e:
            raise FileFormatError(f"{path}: line {n} {e}; make it with ds4 posttrain points") from None
    if head is None:
        raise FileFormatError(f"{path}: is empty; make it with ds4 posttrain points")
    return head, points


def _point(row: Mapping[str, Any]) -> Point:
    try:
        logit_a, logit_b, given, request_id = (row[k] for k in ("logit_a", "logit_b", "given", "request_id"))
        point = Point(
            row["line"], request_id, tuple(row["prompt_ids"]), tuple(row["answer_ids"]), row["a"], row["b"],
            float(logit_a), float(logit_b), given, tuple(row["texts_sha256"]),
        )  # fmt: skip
        ids = [*point.prompt, *point.answer, point.a, point.b, point.line, *([] if given is None else [given])]
        if not all(type(i) is int and i >= 0 for i in ids) or not point.prompt or point.a == point.b:
            raise ValueError
        if row["position"] != point.position or not np.isfinite([point.logit_a, point.logit_b]).all():
            raise ValueError
        if request_id is not None and not isinstance(request_id, str):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise ValueError("is no point") from None
    return point
