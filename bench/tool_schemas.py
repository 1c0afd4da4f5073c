"""Tool schemas and calls of a public collection through the prompt and back: `python bench/tool_schemas.py WHEEL`.

WHEEL is the wheel of `bfcl-eval` (`pip download --no-deps bfcl-eval`), which is read and not installed. Every
function that it declares goes through what a request's `tools` go through, and its line of the prompt must be the
schema again. Every call that it knows as an answer, and one of sample values for every schema, is rendered, cut into
tokens of the embedded model, and read back token by token: name and arguments must be equal, and nothing may be left
as text. The last line of output is JSON; the exit code is 1 if anything is wrong, or there was nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ds4 import embedded
from ds4.errors import RequestError
from ds4.model.call_stream import Begun, CallStream, Event, Grown, Said
from ds4.model.tokenizer import Tokenizer, segments_text
from ds4.model.tools import render_calls, render_tools
from ds4.server.fields import Fields
from ds4.server.tool_fields import read_tools

SAMPLES: dict[str, Any] = {
    "string": "a \"b\"\n</c> \u00e9\U0001f600", "integer": -(10**20), "number": 1.5e-7, "float": 0.1, "boolean": True,
    "array": [1, ["x"], None], "dict": {"k": {"": []}}, "object": {}, "tuple": [1, 2], "null": None,
}  # fmt: skip


def rows_of(text: str) -> list[Any]:
    """The rows of a JSONL file, or of a JSON value, whatever the file is called."""
    try:
        whole = json.loads(text)
    except ValueError:
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    return whole if isinstance(whole, list) else [whole]


def functions_in(row: Any) -> Iterator[Mapping[str, Any]]:
    """Functions that a row declares, at whatever depth."""
    if isinstance(row, Mapping):
        if isinstance(row.get("name"), str) and isinstance(row.get("parameters"), Mapping):
            yield row
        else:
            for value in row.values():
                yield from functions_in(value)
    elif isinstance(row, list):
        for value in row:
            yield from functions_in(value)


def answers_in(row: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Calls that a row of answers lists: of each parameter the first value that is right."""
    for entry in row.get("ground_truth", ()) if isinstance(row, Mapping) else ():
        if isinstance(entry, Mapping):
            for name, given in entry.items():
                if isinstance(given, Mapping):
                    yield name, {k: v[0] if isinstance(v, list) and v else v for k, v in given.items()}


def sample(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A value of its kind for every property."""
    found = parameters.get("properties")
    properties = found if isinstance(found, Mapping) else {}
    return {
        name: SAMPLES.get(str(schema.get("type")) if isinstance(schema, Mapping) else "", "any")
        for name, schema in properties.items()
    }


def schema_back(function: Mapping[str, Any], tokenizer: Tokenizer) -> str | None:
    """What is wrong with a function's way into the prompt; None: nothing."""
    try:
        tools = read_tools(Fields({"tools": [{"type": "function", "function": function}]}), tokenizer)
    except RequestError as e:
        return f"refused: {e}"
    assert tools is not None
    text = segments_text(render_tools(tools.declared, tokenizer.tool_text))
    around = len(tokenizer.tool_text.prefix), len(text) - len(tokenizer.tool_text.suffix)
    told = json.loads(text[slice(*around)])
    wanted = {k: v for k, v in function.items() if v is not None and k != "strict"}
    return None if told == wanted else "is told otherwise"


def call_back(name: str, arguments: dict[str, Any], tokenizer: Tokenizer) -> str | None:
    """What is wrong with a call that was rendered and read again; None: nothing."""
    stream, events = CallStream(tokenizer), list[Event]()
    for token in tokenizer.encode_segments(["\n\n", *render_calls([{"name": name, "arguments": arguments}])]):
        events += stream.push(token)
    events += stream.finish()
    names = [e.name for e in events if isinstance(e, Begun)]
    if names != [name] or any(isinstance(e, Said) for e in events) or stream.parser.malformed:
        return f"is read as calls of {names}, with text beside"
    got = json.loads("".join(e.text for e in events if isinstance(e, Grown)))
    return None if got == arguments else "comes back with other arguments"


def check(wheel: Path, tokenizer: Tokenizer) -> tuple[dict[str, int], list[str]]:
    """How many files, schemas and calls there were, and what was wrong."""
    counts, wrong = {"files": 0, "schemas": 0, "calls": 0}, []
    seen: set[str] = set()
    with zipfile.ZipFile(wheel) as archive:
        for path in sorted(p for p in archive.namelist() if "/data/" in p and p.endswith(".json")):
            counts["files"] += 1
            calls: list[tuple[str, dict[str, Any]]] = []
            for row in rows_of(archive.read(path).decode("utf-8")):
                calls += answers_in(row)
                for function in functions_in(row):
                    key = json.dumps(function)
                    if key not in seen:
                        seen.add(key)
                        counts["schemas"] += 1
                        if fault := schema_back(function, tokenizer):
                            wrong.append(f"{path}: {function['name']!r}: {fault}")
                        calls.append((function["name"], sample(function["parameters"])))
            for name, arguments in calls:
                counts["calls"] += 1
                if fault := call_back(name, arguments, tokenizer):
                    wrong.append(f"{path}: call of {name!r}: {fault}")
    return counts, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    counts, wrong = check(parser.parse_args().wheel, Tokenizer.from_file(embedded.checkpoint()))
    for fault in wrong:
        print(fault)
    print(json.dumps({**counts, "faults": len(wrong)}))
    return 1 if wrong or not counts["schemas"] else 0


if __name__ == "__main__":
    sys.exit(main())
