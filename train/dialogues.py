"""Short synthetic dialogues, made by script from the corpora.

    python -m train.dialogues [--work DIR] [--count N]

Rows `{"messages", "tools"?, "thinking", "kind"}`, one a line, for `ds4.model.chat` to render: one to three turns,
in chat and in thinking mode, some with a system message, about one in eight with tools. Every call block is
parsed back by the strict parser before the row is kept. The same corpora give the same rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from ds4.checkpoint.writer import replace_file
from ds4.errors import Ds4Error, FileFormatError
from ds4.model.completion import argument_values, parse_segments
from ds4.model.tokenizer import ASSISTANT, EOS, Segment, Special, segments_text
from train import data, tool_kinds
from train.config import DIALOGUES, WORK, corpus_path
from train.kinds import KINDS, Exchange, closing, greeting, short_thing, yes_no
from train.material import Material, gather

COUNT = 7500
JUDGE_COUNT = 400
SEED = 1
TOOL_SHARE = 0.12
THINKING_SHARE = 0.45
SYSTEM_SHARE = 0.18
LONGEST = 2200  # characters of a rendered dialogue without tools
SYSTEMS = (
    "You are a helpful assistant.", "You are a helpful assistant. Keep answers short.", "Answer in one sentence.",
    "Be brief.", "You are ds4's embedded model.", "You are a friendly assistant. Be honest.",
    "Answer concisely and correctly.", "You help with short questions.", "You are a careful assistant.",
    "Keep it short and plain.",
)  # fmt: skip
TOOL_SYSTEMS = ("", "", "", "You are a helpful assistant.", "Use tools where they help.", "Be brief.")
EFFORTS = (None, None, None, None, None, None, "low", "max")


def make_row(rng: Random, material: Material) -> dict[str, Any]:
    """One dialogue."""
    thinking = rng.random() < THINKING_SHARE
    row = _with_tools(rng, material) if rng.random() < TOOL_SHARE else _plain(rng, material)
    row["thinking"] = thinking
    effort = rng.choice(EFFORTS)
    if thinking and effort:
        row["effort"] = effort
    return row


def _plain(rng: Random, material: Material) -> dict[str, Any]:
    name = rng.choices(list(KINDS), [share for _, share in KINDS.values()])[0]
    kind = KINDS[name][0]
    turns = [kind(rng, material)]
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
        following = rng.choice((kind, kind, short_thing, yes_no, closing))
        if name == "chinese":
            following = kind
        elif name == "greeting":
            following = rng.choice(list(KINDS.values()))[0]
        turns.append(following(rng, material))
    if name != "greeting" and len(turns) < 3 and rng.random() < 0.08:
        turns.insert(0, greeting(rng, material))
    messages: list[dict[str, Any]] = []
    if rng.random() < SYSTEM_SHARE:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    for turn in turns:
        messages += _messages(turn)
    return {"kind": name, "messages": messages}


def _messages(turn: Exchange) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": turn.user},
        {"role": "assistant", "content": turn.answer, "reasoning_content": turn.reasoning},
    ]


def _with_tools(rng: Random, material: Material) -> dict[str, Any]:
    kind = rng.choice(tool_kinds.SCENES)
    scene = kind(rng, material)
    rest = [k for k in dict.fromkeys(tool_kinds.SCENES) if k is not kind]
    others = [k(rng, material).declared[0] for k in rng.sample(rest, rng.choice((0, 0, 1, 1, 2)))]
    direct = None
    if rng.random() < 0.12:
        turn = rng.choice((greeting, short_thing, yes_no))(rng, material)
        direct = (turn.user, "No tool is needed. " + turn.reasoning, turn.answer)
    messages, tools = tool_kinds.conversation(rng, scene, others, direct)
    system = rng.choice(TOOL_SYSTEMS)
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return {"kind": "tools, none needed" if direct else "tools", "messages": messages, "tools": tools}


def check_row(row: dict[str, Any]) -> None:
    """Render a row and parse its last answer back; calls must come out as they went in.

    Raises:
        FileFormatError: they do not: the script that made the row is wrong.
    """
    messages = row["messages"]
    for end in range(1, len(messages) + 1):
        if messages[end - 1]["role"] != "assistant":
            continue
        answer = messages[end - 1]
        part = {**row, "messages": messages[:end]}
        got = parse_segments(last_answer(data.render_row(part)), thinking=row["thinking"])
        wanted = [
            (c["function"]["name"], json.loads(c["function"]["arguments"])) for c in answer.get("tool_calls") or []
        ]
        found = [(c.name, argument_values(c)) for c in got.calls]
        thought = answer["reasoning_content"] if row["thinking"] else ""
        if got.malformed or found != wanted or got.content != answer["content"] or got.reasoning != thought:
            raise FileFormatError(f"a dialogue of kind {row['kind']} does not parse back: {answer!r} gave {got!r}")


def last_answer(segments: list[Segment]) -> list[Segment]:
    """What the model writes in its last turn: from behind the header's <think> or </think> to EOS."""
    at = max(i for i, s in enumerate(segments) if s == Special(ASSISTANT))
    if segments[-1] != Special(EOS):
        raise FileFormatError("a dialogue does not end with an answer")
    return segments[at + 2 :]


def make(material: Material, count: int, split: str) -> list[dict[str, Any]]:
    """`count` different rows; each has a generator of its own, so their number changes none of them."""
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    for n in range(4 * count):
        row = make_row(Random(f"{SEED} {split} {n}"), material)
        text = segments_text(data.render_row(row))
        if text in seen or (len(text) > LONGEST and "tools" not in row):
            continue
        seen.add(text)
        check_row(row)
        rows.append(row)
        if len(rows) == count:
            return rows
    raise FileFormatError(f"only {len(rows)} different dialogues of {count} came out of the {split} text; give more")


def write(work: Path, split: str, count: int) -> Counter[str]:
    """Make and write a split; returns how many there are of each kind."""
    rows = make(gather(work, split), count, split)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    replace_file(corpus_path(work, DIALOGUES, split), lines.encode())
    return Counter(row["kind"] for row in rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m train.dialogues", description="Make the synthetic dialogues.")
    parser.add_argument("--work", type=Path, default=WORK, help=f"working folder (default {WORK})")
    parser.add_argument("--count", type=int, default=COUNT, help=f"dialogues to train on (default {COUNT})")
    args = parser.parse_args(argv)
    if args.count < 1:
        parser.error(f"--count is {args.count}; it must be at least 1")
    try:
        for split, count in (("train", args.count), ("judge", JUDGE_COUNT)):
            kinds = write(args.work, split, count)
            print(f"{split}: {sum(kinds.values())} dialogues")
            for kind, n in kinds.most_common():
                print(f"  {n:5} {kind}")
    except Ds4Error as e:
        print(f"dialogues: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
