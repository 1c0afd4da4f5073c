"""What an engine does with a night's points, requests and free answers: the figures that gates are given.

Everything is read on the path that requests take: the prompt through prefill as the engine is opened, the answer
through decode. Positions are told with the base and its sidecar alone, and again with a candidate on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ds4.engine import Engine, Sampling
from ds4.errors import Ds4Error, RequestError
from ds4.posttrain.log import Logged, Problem
from ds4.posttrain.points import Point
from ds4.server.fields import Fields
from ds4.server.openai import read_chat, read_completion
from ds4.server.request import Limits, ServedModel
from rulers.compare import compare
from rulers.endings import draw_ids, endings
from rulers.journal import Journal
from rulers.numbers import clustered_mean
from rulers.reading import Reading
from rulers.run import Ruler
from rulers.scores import Meta, Scores

Progress = Callable[[int, int], None]

POSITIONS = 4096  # tokens of answers whose likeliest token is watched, of the newest requests
BLOCK = 64  # tokens whose logits are held at once
TRAINED = 12  # prompts of points that are answered freely, evenly over all of them


@dataclass(frozen=True)
class Transcript:
    """A logged request as tokens."""

    id: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def transcripts(requests: Sequence[Logged], model: ServedModel) -> tuple[list[Transcript], list[Problem]]:
    """Requests as the tokens that the engine had, and those that have none, by their line, and why."""
    found: list[Transcript] = []
    problems = []
    for logged in requests:
        try:
            prompt = prompt_ids(logged.row, model)
            answer = logged.row.get("answer_ids")
            if not isinstance(answer, list) or not answer:
                raise ValueError("has no answer_ids")
            given = [model.tokenizer.check_id(i) for i in answer]
            if len(prompt) + len(given) > model.config.max_position_embeddings:
                raise ValueError(f"has {len(prompt) + len(given)} tokens, beyond the context")
        except (ValueError, RequestError) as e:
            problems.append(Problem(logged.line, str(e)))
            continue
        except RecursionError:
            problems.append(Problem(logged.line, "has messages that are nested too deep"))
            continue
        found.append(Transcript(logged.id, tuple(prompt), tuple(given)))
    return found, problems


def prompt_ids(row: Mapping[str, Any], model: ServedModel) -> list[int]:
    """The prompt of a logged request, as the server made it.

    Raises:
        ValueError, RequestError: it is no request's.
    """
    if "messages" in row:
        fields = {"messages": row["messages"], "thinking": row.get("thinking"), "reasoning_effort": row.get("effort"),
                  "tools": row.get("tools")}  # fmt: skip
        return list(read_chat(Fields(fields), model, Limits()).prompt_ids)
    if "prompt" in row:
        return list(read_completion(Fields({"prompt": row["prompt"]}), model, Limits()).prompt_ids)
    raise ValueError("has neither messages nor a prompt")


# -- points --


def margins(
    engine: Engine, points: Sequence[Point], against: Sequence[int] | None = None, progress: Progress | None = None
) -> list[dict[str, float]]:
    """A row a point: `lead`, logit a minus the strongest other now, which decides; `against`, minus that of a token
    a point, its own b without.

    Raises:
        Ds4Error: logits that are not finite.
    """
    out = []
    for i, p in enumerate(points):
        session = engine.session()
        session.sync(list(p.prompt))
        if p.answer:
            session.step(list(p.answer), logits=False)
        logits_V = session.logits()
        if not np.isfinite(logits_V).all():
            raise Ds4Error(f"line {p.line}: logits after {p.position} tokens are not finite; is the candidate sound?")
        others_V = logits_V.copy()
        others_V[p.a] = -np.inf
        own, b = float(logits_V[p.a]), p.b if against is None else against[i]
        out.append({"lead": own - float(others_V.max()), "against": own - float(logits_V[b])})
        if progress is not None:
            progress(i + 1, len(points))
    return out


def carried(points: Sequence[Point], before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    """Points that a solve did not see: how many are right before and after, and what their margins gained."""
    gained = np.array(after, np.float64) - np.array(before, np.float64)
    mean = clustered_mean(gained, np.arange(len(gained)))
    return {
        "points": len(points), "right_before": int(sum(m > 0 for m in before)),
        "right_after": int(sum(m > 0 for m in after)), "margin_gain": {"mean": mean.value, "se": mean.se},
    }  # fmt: skip


# -- other positions --


def watched(found: Sequence[Transcript], most: int = POSITIONS) -> list[Transcript]:
    """The newest requests with at most about `most` tokens of answers, oldest first."""
    out: list[Transcript] = []
    total = 0
    for t in reversed(found):
        if total >= most:
            break
        out.append(t)
        total += len(t.answer)
    return out[::-1]


def likeliest(engine: Engine, some: Sequence[Transcript], progress: Progress | None = None) -> list[list[int]]:
    """For every token of the answers, which one the engine has in its place."""
    out = []
    for i, t in enumerate(some):
        session = engine.session()
        session.sync(list(t.prompt))
        row = [int(session.logits().argmax())]
        for at in range(0, len(t.answer) - 1, BLOCK):  # of all of a long answer's logits nobody would hold two
            row += session.step(list(t.answer[at : min(at + BLOCK, len(t.answer) - 1)])).argmax(axis=1).tolist()
        out.append(row)
        if progress is not None:
            progress(i + 1, len(some))
    return out


def kept(
    some: Sequence[Transcript],
    before: Sequence[Sequence[int]],
    after: Sequence[Sequence[int]],
    points: Sequence[Point],
) -> tuple[int, int]:
    """(positions whose likeliest token is the same, positions). Left out is what follows a point in its own answer:
    the decision, and words behind a wrong one, which are not written any more.
    """
    same = total = 0
    for t, b, a in zip(some, before, after, strict=True):
        n = min((len(p.answer) for p in points if corrected(t, p)), default=len(t.answer))
        same += sum(x == y for x, y in zip(b[:n], a[:n], strict=True))
        total += n
    return same, total


def corrected(t: Transcript, p: Point) -> bool:
    """Whether a point is of this request, or of one with the same tokens."""
    return t.prompt == p.prompt and t.answer[: len(p.answer)] == p.answer


# -- free answers --


def free_answers(
    engine: Engine, prompts: Sequence[str], points: Sequence[Point], limit: int, journal: Journal,
    progress: Progress | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Answers drawn freely: of `prompts` at temperature 1, each with a seed of its own, and of prompts of points at
    temperature 0. An answer of `limit` tokens counts as one that does not end.

    Returns:
        {"ended", "answers", "points", "said"}: of the drawn answers to prompts of points, `said` has the wanted token
        in its place, behind the same words.
    """
    told = endings(
        engine, prompts, thinking=False, temperature=1.0, seed=0, journal=journal, progress=progress, limit=limit
    )  # fmt: skip
    ended = [a.reason == "end" for a in told.answers]
    n = min(TRAINED, len(points))
    some = [points[(2 * i + 1) * len(points) // (2 * n)] for i in range(n)]
    said = 0
    for i, p in enumerate(some):
        unit = f"point {i}"
        if unit not in journal.done:
            ids, reason, _ = draw_ids(engine, list(p.prompt), Sampling(temperature=0.0), limit)
            wanted = [*p.answer, p.a]
            journal.add(unit, {"ended": reason == "end", "said": ids[: len(wanted)] == wanted})
        ended.append(journal.done[unit]["ended"])
        said += journal.done[unit]["said"]
        if progress is not None:
            progress(len(prompts) + i + 1, len(prompts) + len(some))
    return {"ended": sum(ended), "answers": len(ended), "points": len(some), "said": said}


# -- rulers --


def read(engine: Engine, scores: Scores, ours: Meta, folder: Path, name: str, progress: Progress | None) -> Path:
    """A reading of the original's text, kept as folder/NAME.npz; goes on where an interrupted one stopped."""
    out = folder / f"{name}.npz"
    if out.exists():
        return out
    ruler = Ruler(scores, floor_tokens=0)
    with Journal(folder / f"{name}.journal.jsonl", ruler.job(ours)) as journal:
        ruler.read(engine.with_prefill("full"), ours, journal, progress).save(out)
        journal.discard()
    return out


def difference(before: Path, after: Path) -> dict[str, Any]:
    """After minus before, as `ds4 ruler compare --json` has it."""
    return dict(compare(Reading.load(before), Reading.load(after), ("before", "after")).to_json())
