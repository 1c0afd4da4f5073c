"""Every tool schema of the function-calling benchmark `bfcl-eval`: told to the model and read back equal.

Needs the package's files (`pip install --no-deps bfcl-eval`; 2026.3.23 was tried); without it this is skipped.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds4.model.call_stream import MARK, Begun, CallParser, Ended, Grown, Said
from ds4.model.tokenizer import DSML, Special
from ds4.model.tools import OWN_TOOL_TEXT, render_calls
from ds4.server.fields import Fields
from ds4.server.messages import ask_messages
from ds4.server.openai import ask_chat
from ds4.server.request import Limits
from ds4.server.responses import ask_response
from ds4.server.responses_store import ResponseStore
from tests.server.standin import TOKENIZER, StandIn, StandInConfig

FOUND = importlib.util.find_spec("bfcl_eval")
DATA = Path("/nonexistent") if FOUND is None or FOUND.origin is None else Path(FOUND.origin).parent / "data"
HI: Any = [{"role": "user", "content": "x"}]
ENGINE, STORE = StandIn(config=StandInConfig(1 << 22)), ResponseStore()
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(FOUND is None, reason="no bfcl-eval: pip install --no-deps bfcl-eval"),
]


def rows(folder: Path) -> Iterator[Any]:
    """JSON of the files of a folder, a line each or a file each."""
    for path in sorted(folder.glob("*.json")):
        text = path.read_text("utf-8")
        try:
            yield from [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError:
            yield json.loads(text)


def tools() -> dict[str, dict[str, Any]]:
    """Every function that is declared anywhere, once; of one name several versions."""
    found: dict[str, dict[str, Any]] = {}

    def walk(value: Any) -> None:
        if isinstance(value, dict) and isinstance(value.get("name"), str) and "parameters" in value:
            found[json.dumps(value, sort_keys=True)] = value
        elif isinstance(value, (dict, list)):
            for v in value.values() if isinstance(value, dict) else value:
                walk(v)

    for folder in (DATA, DATA / "multi_turn_func_doc", DATA / "unused_datasets" / "question"):
        for row in rows(folder):
            walk(row)
    return found


def batches() -> Iterator[list[dict[str, Any]]]:
    """All tools, some hundred at a time, names once in each."""
    left = [*tools().values()]
    while left:
        names: set[str] = set()
        batch, rest = [], []
        for tool in left:
            (rest if tool["name"] in names or len(batch) == 200 else batch).append(tool)
            names.add(tool["name"])
        yield batch
        left = rest


def told(ids: Any) -> list[Any]:
    """Schemas out of a prompt, as a model is told of them."""
    prompt = TOKENIZER.decode(ids)
    begin = prompt.index("### Available Tool Schemas\n\n") + len("### Available Tool Schemas\n\n")
    return [json.loads(line) for line in prompt[begin : prompt.index(OWN_TOOL_TEXT.suffix, begin)].split("\n")]


def test_schemas() -> None:
    n = 0
    for batch in batches():
        chat = [{"type": "function", "function": t} for t in batch]
        flat = [{"type": "function", **t} for t in batch]
        named = [
            {"input_schema": t["parameters"], **{k: v for k, v in t.items() if k != "parameters"}} for t in batch
        ]
        asked = ask_chat(Fields({"messages": HI, "tools": chat}), ENGINE, Limits())
        assert told(asked.generation.prompt_ids) == batch
        plain = [{k: v for k, v in t.items() if k in ("name", "description", "parameters")} for t in batch]
        asked = ask_messages(Fields({"messages": HI, "tools": named}), ENGINE, Limits())
        assert told(asked.generation.prompt_ids) == plain
        asked = ask_response(Fields({"input": "x", "tools": flat}), ENGINE, Limits(), STORE).asked
        assert told(asked.generation.prompt_ids) == plain
        n += len(batch)
    print(f"{n} schemas")
    assert n > 1000


def parsed(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls rendered as an answer has them, and read out of it a character at a time."""
    parser, out = CallParser(), []
    pieces = ["\n\n", *(MARK if isinstance(s, Special) and s.name == DSML else s for s in render_calls(calls))]
    events = [e for piece in pieces for c in str(piece) for e in parser.push(c)] + parser.finish()
    for event in events:
        assert isinstance(event, (Said, Begun, Grown, Ended)), event
        if isinstance(event, Begun):
            out.append({"name": event.name, "arguments": ""})
        elif isinstance(event, Grown):
            out[event.index]["arguments"] += event.text
        else:
            assert not isinstance(event, Said) or not event.text.strip()
    return [{**c, "arguments": json.loads(c["arguments"])} for c in out]


def test_calls() -> None:
    """The benchmark's own answers, every value that it takes for right."""
    n = 0
    for row in rows(DATA / "possible_answer"):
        for answer in row.get("ground_truth") or []:
            if not isinstance(answer, dict):
                continue  # of several turns: code, not calls
            for name, values in answer.items():
                for i in range(max((len(v) for v in values.values()), default=1)):
                    arguments = {k: v[min(i, len(v) - 1)] for k, v in values.items() if v}
                    call = {"name": name, "arguments": arguments}
                    assert parsed([call, call]) == [call, call]
                    n += 1
    print(f"{n} calls")
    assert n > 3000
