"""Days of requests for the nightly tests: asked of the embedded model, logged, corrected where it hesitated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from ds4.engine import Engine, Sampling
from ds4.model.chat import other_turns, render
from ds4.posttrain.log import append, make_folder, row_bytes

ASKED = (
    "What is a contract?", "What is a bond?", "What does a heart do?", "What is a protein?",
    "Explain what a function is in a program.", "What is a court?", "What is a cell?", "What is a share?",
    "What is a vaccine?", "What does a loop do?", "What is a judge?", "What is a market?",
)  # fmt: skip
ANSWER = 12


def request(engine: Engine, number: int, question: str, day: date) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """A row of the log, its answer drawn greedily; and a correction: the word that nearly came, where the model was
    least sure among words that begin a token with a blank; None where there is no such place.
    """
    messages = [{"role": "user", "content": question}]
    tokenizer = engine.tokenizer
    prompt = tokenizer.encode_segments(render(messages, thinking=False), spell_missing=True)
    ends = other_turns(tokenizer) | {engine.config.eos_token_id}
    session = engine.session()
    session.sync(prompt)
    ids: list[int] = []
    rivals: list[tuple[float, int, int]] = []
    while len(ids) < ANSWER and not (ids and ids[-1] in ends):
        logits_V = session.logits()
        first, second = (int(i) for i in np.argsort(logits_V)[::-1][:2])
        ids.append(session.next(Sampling(temperature=0.0)))
        words = [tokenizer.decode([i]) for i in (first, second)]
        if len(ids) > 1 and all(w.startswith(" ") and w.strip().isalpha() for w in words):
            rivals.append((float(logits_V[first] - logits_V[second]), len(ids) - 1, second))
    ended = ids[-1] in ends
    content = tokenizer.decode(ids[:-1] if ended else ids)
    name = f"chatcmpl-{day:%m%d}{number:016d}"
    row = {
        "id": name, "at": f"{day}T12:00:00.000+00:00", "path": "/v1/chat/completions", "model": engine.name,
        "sidecars": engine.sidecars, "messages": messages, "thinking": False, "effort": None,
        "answer": {"content": content}, "answer_ids": ids, "finish_reason": "stop" if ended else "length",
    }  # fmt: skip
    if not rivals:
        return row, None
    _, at, wanted = min(rivals)
    return row, {"request_id": name, "wanted": tokenizer.decode([*ids[:at], wanted]) + " of it."}


def make_log(
    engine: Engine, folder: Path, days: Sequence[date], a_day: int, corrected: int, first: int = 0
) -> list[dict[str, Any]]:
    """Log `a_day` requests each day, and corrections.jsonl with `corrected` of each day; the corrections."""
    make_folder(folder)
    corrections: list[dict[str, Any]] = []
    for d, day in enumerate(days):
        rows, wanted = [], []
        for i in range(a_day):
            row, correction = request(engine, i, ASKED[(first + d * a_day + i) % len(ASKED)], day)
            rows.append(row_bytes(row))
            wanted += [] if correction is None else [correction]
        append(folder, day, rows)
        corrections += wanted[:corrected]
    text = "".join(json.dumps(c, ensure_ascii=False) + "\n" for c in corrections)
    (folder / "corrections.jsonl").write_text(text, encoding="utf-8")
    return corrections
