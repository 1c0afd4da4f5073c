"""How answers end: the termination ruler.

A model that was damaged often still predicts well and no longer stops. Answers are drawn freely, without a limit but
the context's, and each is one of

    end       it said its end-of-sentence token, or opened another turn
    loop      its last tokens repeat themselves: period p of at most 256, held for 512 tokens and for 8 periods
    context   neither: the context is full

A loop ends the drawing, since what follows would only fill the context (a million tokens at the released size).
Where the prompt opens a reasoning part, it is also told whether `</think>` closed it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ds4.engine import Engine, Sampling
from ds4.errors import FileFormatError
from ds4.model.chat import other_turns, render
from ds4.model.tokenizer import END_THINK
from rulers.journal import Journal
from rulers.numbers import Mean, clustered_mean

MOST_PERIOD, LOOP_TOKENS, LOOP_PERIODS, LOOK_EVERY = 256, 512, 8, 64
REASONS = ("end", "loop", "context")
PROMPTS = (
    "Hello!",
    "Who are you?",
    "What is a contract?",
    "What is a protein?",
    "What is a bond?",
    "Explain what a function is in a program.",
    "Write a Python function that adds two numbers.",
    "Count from one to ten.",
    "Name three fruits.",
    "What is the capital of France?",
    "What does a heart do?",
    "你好",
)


@dataclass(frozen=True)
class Ending:
    """One answer. `period` of its loop, else 0; `closed`: whether its reasoning part was, None without one."""

    prompt: str
    reason: str
    tokens: int
    period: int
    closed: bool | None


@dataclass(frozen=True)
class Endings:
    """All answers of a run, and shares of them with standard errors over prompts."""

    answers: tuple[Ending, ...]

    def share(self, reason: str) -> Mean:
        return _share([a.reason == reason for a in self.answers])

    @property
    def closed(self) -> Mean | None:
        """Share of reasoning parts that were closed; None where there was none."""
        found = [a.closed for a in self.answers if a.closed is not None]
        return _share(found) if found else None

    def to_json(self) -> dict[str, object]:
        shares = {reason: _json(self.share(reason)) for reason in REASONS}
        closed = None if self.closed is None else _json(self.closed)
        lengths = [a.tokens for a in self.answers]
        return {
            "prompts": len(self.answers), **shares, "thinking_closed": closed,
            "median_tokens": float(np.median(lengths)), "answers": [asdict(a) for a in self.answers],
        }  # fmt: skip


def load_prompts(path: str | Path) -> list[str]:
    """Questions of a JSONL file, {"prompt": text} a line.

    Raises:
        FileFormatError: unreadable, or a line without a prompt; names file and line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as e:
        raise FileFormatError(f"{path}: cannot be read ({getattr(e, 'strerror', None) or e})") from e
    out = []
    for n, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            raise FileFormatError(f"{path}: line {n} is no JSON object with a prompt") from e
        if not isinstance(prompt, str) or not prompt:
            raise FileFormatError(f"{path}: line {n}: prompt is {prompt!r}; expected text")
        out.append(prompt)
    if not out:
        raise FileFormatError(f"{path}: holds no prompt")
    return out


def loop_period(ids: Sequence[int]) -> int:
    """The shortest period that the end of `ids` has kept for LOOP_TOKENS tokens and LOOP_PERIODS periods; 0: none."""
    tail = np.asarray(ids[-(LOOP_PERIODS + 1) * MOST_PERIOD - LOOP_TOKENS :])
    for period in range(1, MOST_PERIOD + 1):
        n = max(LOOP_TOKENS, LOOP_PERIODS * period)
        if len(tail) >= n and (tail[-n:][period:] == tail[-n:][:-period]).all():
            return period
    return 0


def draw(
    engine: Engine,
    prompt: str,
    thinking: bool,
    sampling: Sampling,
    drawn: Callable[[int], None] | None = None,
    limit: int | None = None,
) -> Ending:
    """One answer to a user's `prompt`; see `draw_ids`."""
    tokenizer = engine.tokenizer
    ids = tokenizer.encode_segments(
        render([{"role": "user", "content": prompt}], thinking=thinking), spell_missing=True
    )
    end_think = tokenizer.special_id(END_THINK) if tokenizer.has_special(END_THINK) else -1
    answer, reason, period = draw_ids(engine, ids, sampling, limit, drawn)
    return Ending(prompt, reason, len(answer), period, end_think in answer if thinking else None)


def draw_ids(
    engine: Engine,
    ids: Sequence[int],
    sampling: Sampling,
    limit: int | None = None,
    drawn: Callable[[int], None] | None = None,
) -> tuple[list[int], str, int]:
    """One answer to a prompt's ids: its tokens, how it ended, and the period of its loop or 0.

    Args:
        limit: tokens at most, beside the context's own limit; an answer that reaches it ends as `context`.
        drawn: hears how many tokens there are.

    Raises:
        RequestError: the prompt does not fit the context.
    """
    tokenizer, config = engine.tokenizer, engine.config
    ends = other_turns(tokenizer) | {config.eos_token_id}
    session = engine.session()
    session.sync(list(ids))
    room = config.max_position_embeddings - len(ids)
    room = room if limit is None else min(room, limit)
    answer: list[int] = []
    while len(answer) < room:
        answer.append(session.next(sampling, left=room - len(answer)))
        if answer[-1] in ends:
            return answer, "end", 0
        if len(answer) % LOOK_EVERY == 0:
            period = loop_period(answer)
            if period:
                return answer, "loop", period
            if drawn is not None:
                drawn(len(answer))
    return answer, "context", 0


def endings(
    engine: Engine,
    prompts: Sequence[str],
    *,
    thinking: bool,
    temperature: float,
    seed: int,
    journal: Journal,
    progress: Callable[[int, int], None] | None = None,
    limit: int | None = None,
) -> Endings:
    """Answers to all prompts, each drawn with a seed of its own; those that the journal has are not drawn again.
    `limit` as for `draw_ids`.
    """
    answers = []
    for i, prompt in enumerate(prompts):
        if str(i) not in journal.done:
            sampling = Sampling(temperature, 0, 1.0, 0.0, seed + i, seeded=True)
            journal.add(str(i), asdict(draw(engine, prompt, thinking, sampling, limit=limit)))
        answers.append(Ending(**journal.done[str(i)]))
        if progress is not None:
            progress(i + 1, len(prompts))
    return Endings(tuple(answers))


def _share(found: Sequence[bool]) -> Mean:
    return clustered_mean(np.array(found, np.float64), np.arange(len(found)))


def _json(m: Mean) -> dict[str, object]:
    return {"mean": m.value, "se": m.se}
