"""The termination ruler: what counts as an end, a loop, a full context; nothing is drawn twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds4 import embedded
from ds4.errors import FileFormatError
from ds4.model.config import ModelConfig
from ds4.model.tokenizer import END_THINK, Tokenizer
from rulers.endings import LOOK_EVERY, LOOP_TOKENS, MOST_PERIOD, Ending, Endings, endings, load_prompts, loop_period
from rulers.journal import Journal
from rulers.numbers import Mean


class Scripted:
    """An engine whose sessions say what a script says; counts what was asked for."""

    def __init__(self, scripts: Sequence[Iterator[int]], context: int = 4000) -> None:
        config = ModelConfig.load(embedded.checkpoint())
        self.tokenizer = Tokenizer.from_file(embedded.checkpoint() / "tokenizer.json", config)
        self.config = SimpleNamespace(eos_token_id=config.eos_token_id, max_position_embeddings=context)
        self.scripts, self.asked, self.seeds, self.prompts = list(scripts), 0, list[int](), list[list[int]]()

    def session(self) -> Any:
        script = self.scripts.pop(0)

        def following(sampling: Any, left: int) -> int:
            self.asked += 1
            assert left >= 1
            if sampling.seed not in self.seeds:
                self.seeds.append(sampling.seed)
            return next(script)

        return SimpleNamespace(sync=self.prompts.append, next=following)


def run(engine: Scripted, n: int, path: Path, *, thinking: bool = False) -> Endings:
    prompts = [f"question {i}" for i in range(n)]
    with Journal(path, "job") as journal:
        return endings(engine, prompts, thinking=thinking, temperature=0.5, seed=7, journal=journal)  # type: ignore[arg-type]


def forever(*period: int) -> Iterator[int]:
    while True:
        yield from period


def counting() -> Iterator[int]:
    """Never repeats within the periods that are looked at."""
    n = 0
    while True:
        n += 1
        yield 300 + n % 1500


def test_loops_of_every_period_are_seen_and_nothing_else() -> None:
    text = list(range(1000, 3000))
    assert loop_period(text) == 0
    for period in (1, 2, 7, 63, MOST_PERIOD):
        n = max(LOOP_TOKENS, 8 * period)
        repeated = [i % period for i in range(n)]
        assert loop_period(text + repeated) == period
        assert loop_period(text + repeated[:-1]) == 0  # not long enough yet
        assert loop_period(text + repeated + [9999]) == 0  # and over
    assert loop_period([5] * LOOP_TOKENS) == 1
    assert loop_period([i % (MOST_PERIOD + 1) for i in range(9000)]) == 0


def test_each_answer_is_an_end_a_loop_or_a_full_context(tmp_path: Path) -> None:
    eos = Scripted([]).config.eos_token_id
    engine = Scripted([iter([5, 6, 7, eos]), forever(8, 9, 10), counting()])
    got = run(engine, 3, tmp_path / "j")
    ended, loops, full = got.answers
    assert ended == Ending("question 0", "end", 4, 0, None)
    assert (loops.reason, loops.period) == ("loop", 3) and LOOP_TOKENS <= loops.tokens < LOOP_TOKENS + LOOK_EVERY
    assert full.reason == "context" and full.tokens == 4000 - len(engine.prompts[2])
    assert [got.share(r) for r in ("end", "loop", "context")] == [Mean(1 / 3, pytest.approx(1 / 3))] * 3
    assert engine.seeds == [7, 8, 9] and got.closed is None
    told = got.to_json()
    assert told["prompts"] == 3 and told["thinking_closed"] is None and told["median_tokens"] == loops.tokens


def test_a_turn_of_somebody_else_ends_an_answer(tmp_path: Path) -> None:
    tokenizer = Scripted([]).tokenizer
    engine = Scripted([iter([5, tokenizer.special_id("<｜User｜>"), 5])])
    assert run(engine, 1, tmp_path / "j").answers[0].reason == "end" and engine.asked == 2


def test_thinking_that_closes_and_that_does_not(tmp_path: Path) -> None:
    made = Scripted([])
    eos, close = made.config.eos_token_id, made.tokenizer.special_id(END_THINK)
    engine = Scripted([iter([5, close, 6, eos]), iter([5, 6, eos])])
    got = run(engine, 2, tmp_path / "j", thinking=True)
    assert [a.closed for a in got.answers] == [True, False] and got.closed == Mean(0.5, 0.5)
    assert engine.prompts[0][-1] == made.tokenizer.special_id("<think>")


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b", "id": 3}\n')
    assert load_prompts(path) == ["a", "b"]
    for line, said in (("[]", "no JSON object"), ("{", "no JSON object"), ('{"prompt": 3}', "prompt is 3")):
        path.write_text(f'{{"prompt": "a"}}\n{line}\n')
        with pytest.raises(FileFormatError, match=rf"p\.jsonl: line 2.*{said}"):
            load_prompts(path)
    path.write_text("\n")
    with pytest.raises(FileFormatError, match="holds no prompt"):
        load_prompts(path)


def test_an_interrupted_run_draws_nothing_twice(tmp_path: Path) -> None:
    eos = Scripted([]).config.eos_token_id
    first = Scripted([iter([5, eos]), iter([])])
    with pytest.raises(StopIteration):
        run(first, 2, tmp_path / "j")
    second = Scripted([iter([5, 6, eos])])
    got = run(second, 2, tmp_path / "j")
    assert [a.tokens for a in got.answers] == [2, 3] and second.asked == 3 and second.seeds == [8]
