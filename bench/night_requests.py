"""Fourteen days of requests by script, from a seed: what people ask again and again, and what they ask once.

A seed chooses six facts and six preferences of night_subjects.py (`Recurring` says otherwise). Each day every one of
them is asked in words that no other day has, four of them twice; and more besides: subjects that the seed did not
choose, which nobody corrects, and passages of the embedded model's `fit` text (code, law, medicine, Chinese,
English), also uncorrected. Requests are shuffled; some have a system line, some follow an earlier turn. The engine
answers them itself, greedily or at temperature 1 by a seed of the request's own, and the answers are logged as the
server logs them. What is asked again and again and was not answered as wanted gets a correction, through
ds4.posttrain as any correction does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from random import Random
from typing import Any

from night_subjects import COMMON, FACTS, PREFERENCES, Subject

from ds4 import embedded
from ds4.engine import Engine
from ds4.engine.sampling import Sampling
from ds4.model.chat import other_turns, render
from ds4.model.tokenizer import EOS
from ds4.posttrain.log import append, make_folder, row_bytes

FIRST_DAY = date(2026, 11, 1)
DAYS = 14
UNCHOSEN, PASSAGES = 12, 12  # of the other requests a day
MAX_TOKENS = 12
SYSTEM, EARLIER, GREEDY = 0.25, 0.3, 0.5  # shares of requests
LONGEST = 150  # characters of a passage
SYSTEMS = ("You are a helpful assistant.", "Be brief.", "Answer in one sentence.", "You help with short questions.")
EARLIER_TURNS = (
    ("Say: the water is cold", "the water is cold"),
    ("Spell {word}.", "I would rather not."),
    ("Is there the letter \"a\" in \"{word}\"?", "Yes."),
    ("Write {word} in capital letters.", "As you wish."),
    ("{name} is here.", "Then let us begin."),
)  # fmt: skip
ASKS = {
    "code": ("Summarise this code.\n\n{text}", "What does this do?\n\n{text}"),
    "law": ("What does this clause say?\n\n{text}", "{text}\n\nWhat kind of clause is this?"),
    "medicine": ("Explain: {text}", "What is meant by this?\n\n{text}"),
    "chinese": ("{text}", "请解释：{text}"),
    "general": ("Continue this passage:\n\n{text}", "Go on from here: {text}"),
}


@dataclass(frozen=True)
class Recurring:
    """chosen: facts, and as many preferences. twice: how many of all of them are asked twice a day."""

    chosen: int = 6
    twice: int = 4

    def __post_init__(self) -> None:
        most = min(len(FACTS), len(PREFERENCES))
        if not 1 <= self.chosen <= most or not 0 <= self.twice <= 2 * self.chosen:
            raise SystemExit(
                f"{self.chosen} facts and preferences of {most} each, {self.twice} of them twice: cannot be"
            )


@dataclass(frozen=True)
class Asked:
    """A request of the script: its subject, None where nobody will correct it."""

    id: str
    messages: tuple[dict[str, str], ...]
    subject: Subject | None
    greedy: bool
    seed: int


def day_of(number: int) -> date:
    """Day 1 is the first."""
    return FIRST_DAY + timedelta(days=number - 1)


def subjects(seed: int, recurring: Recurring | None = None) -> tuple[Subject, ...]:
    """Those that a seed has chosen."""
    n, rng = (recurring or Recurring()).chosen, Random(f"{seed} subjects")
    return (*rng.sample(FACTS, n), *rng.sample(PREFERENCES, n))


def requests(seed: int, number: int, recurring: Recurring | None = None) -> list[Asked]:
    """The requests of a day, in the order in which they come; numbers from 1."""
    recurring = recurring or Recurring()
    chosen = subjects(seed, recurring)
    others = [s for s in (*FACTS, *PREFERENCES) if s not in chosen]
    rng = Random(f"{seed} day {number}")
    asked: list[tuple[Subject | None, str]] = []
    for s in (*chosen, *rng.sample(chosen, recurring.twice)):
        again = sum(before is s for before, _ in asked)
        asked.append((s, wording(s, seed, 2 * (number - 1) + again)))
    for s in rng.sample(others, min(UNCHOSEN, len(others))):
        asked.append((None, _filled(rng.choice(s.frames), s, rng)))
    asked += [(None, _passage(rng)) for _ in range(PASSAGES)]
    rng.shuffle(asked)
    return [_asked(seed, number, i, s, text, rng) for i, (s, text) in enumerate(asked)]


def wording(subject: Subject, seed: int, number: int) -> str:
    """The subject's question number 0, 1, ...: none is like one before it."""
    rng = Random(f"{seed} words of {subject.name}")
    found: dict[str, None] = {}
    while len(found) <= number:  # frames in turn, slots by chance; the least of them has fillings by the hundred
        found.setdefault(_filled(subject.frames[len(found) % len(subject.frames)], subject, rng))
        found.setdefault(_filled(rng.choice(subject.frames), subject, rng))
    return list(found)[number]


def _filled(frame: str, subject: Subject | None, rng: Random) -> str:
    slots = {**COMMON, **({} if subject is None else subject.slots)}
    while match := re.search(r"\{([a-z]+)\}", frame):
        frame = frame[: match.start()] + rng.choice(slots[match[1]]) + frame[match.end() :]
    return frame[0].upper() + frame[1:] if rng.random() < 0.8 else frame


def _passage(rng: Random) -> str:
    domain = rng.choice(list(ASKS))
    document = rng.choice(embedded.slice(domain, "fit"))
    at = rng.randrange(max(1, len(document) - LONGEST))
    text = document[at : at + rng.randint(LONGEST // 3, LONGEST)].strip() or document[:LONGEST]
    return rng.choice(ASKS[domain]).replace("{text}", text)


def _asked(seed: int, number: int, place: int, subject: Subject | None, text: str, rng: Random) -> Asked:
    messages: list[dict[str, str]] = []
    if rng.random() < SYSTEM:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    if rng.random() < EARLIER:
        user, answer = rng.choice(EARLIER_TURNS)
        messages += [
            {"role": "user", "content": _filled(user, None, rng)},
            {"role": "assistant", "content": answer},
        ]
    messages.append({"role": "user", "content": text})
    name = f"chatcmpl-{seed}-{day_of(number):%m%d}-{place:02d}"
    return Asked(name, tuple(messages), subject, rng.random() < GREEDY, rng.randrange(2**31))


def answer(engine: Engine, asked: Asked) -> dict[str, Any]:
    """The engine's answer as a row of the log."""
    tokenizer = engine.tokenizer
    prompt = tokenizer.encode_segments(render(asked.messages, thinking=False), spell_missing=True)
    enders = {*other_turns(tokenizer), tokenizer.special_id(EOS)}
    sampling = Sampling(temperature=0.0 if asked.greedy else 1.0, seed=asked.seed)
    session = engine.session()
    session.sync(prompt)
    drawn: list[int] = []
    while len(drawn) < MAX_TOKENS and not (drawn and drawn[-1] in enders):
        drawn.append(session.next(sampling, left=MAX_TOKENS - len(drawn)))
    ended = drawn[-1] in enders
    said = drawn[:-1] if ended else drawn
    return {
        "id": asked.id, "model": engine.name, "sidecars": engine.sidecars, "messages": list(asked.messages),
        "thinking": False, "answer": {"content": tokenizer.decode(said)}, "answer_ids": drawn,
        "finish_reason": "stop" if ended else "length",
        "sampling": {"temperature": sampling.temperature, "seed": sampling.seed, "max_tokens": MAX_TOKENS},
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(drawn)},
    }  # fmt: skip


def write_log(folder: Path, number: int, rows: Iterable[dict[str, Any]]) -> None:
    """Rows to their day's file of a log, as the server puts them there."""
    make_folder(folder)
    append(folder, day_of(number), [row_bytes(row) for row in rows])


def correction(asked: Asked, row: dict[str, Any]) -> dict[str, str] | None:
    """What people say of an answer; None where it is as wanted, or nobody minds."""
    if asked.subject is None:
        return None
    given = row["answer"]["content"]
    wanted = nearest(given, asked.subject.wanted)
    return None if wanted == given else {"request_id": asked.id, "wanted": wanted, "note": asked.subject.name}


def nearest(given: str, ways: Sequence[str]) -> str:
    """Of what could be wanted the text that shares most words with the given one's beginning; the first of equals. An
    answer that begins as wanted is as wanted.
    """
    for way in ways:
        head = way.replace("{given}", "").rstrip(" .!\n")
        if given.lower().startswith(head.lower()):
            return given
    texts = [way.replace("{given}", given) for way in ways]
    return max(texts, key=lambda text: _shared(given, text))


def _shared(one: str, other: str) -> int:
    """Words in which two texts begin alike."""
    words, others = one.split(), other.split()
    return next((i for i, (x, y) in enumerate(zip(words, others)) if x != y), min(len(words), len(others)))
