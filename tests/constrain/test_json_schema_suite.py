"""The JSON Schema Test Suite (tests/data/json-schema-suite.tar.xz): every schema is compiled or refused by keyword.

Of what compiles, instances go through the matcher byte by byte: valid ones are let through, invalid ones are not, but
for the lists below, which are the whole difference (docs/structured-output.md).
"""

from __future__ import annotations

import functools
import itertools
import json
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds4.constrain import Answer, Compiler, read_format
from ds4.constrain.schema import FORMATS, subschemas
from ds4.errors import RequestError
from tests.server.standin import EOS, FIRST_BYTE, TOKENIZER

ARCHIVE = Path(__file__).parent.parent / "data" / "json-schema-suite.tar.xz"
DRAFTS = ("draft3", "draft4", "draft6", "draft7", "draft2019-09", "draft2020-12", "draft-next")
FILES = 432
COMPILER = Compiler()

# Invalid instances that are let through, by file: what no schema of the drafts that the compiler follows says, or a
# regular expression cannot.
PASSED = {
    "optional/format/date": "days of a month that the calendar lacks",
    "optional/format/date-time": "leap seconds at other times than theirs, and as above",
    "optional/format/time": "leap seconds at other times than theirs",
    "optional/ecmascript-regex": r"\S takes U+FEFF",
    "optional/content": "contentEncoding and contentMediaType say nothing, as in later drafts",
    "ref": "an id beside $ref moves what it points to, as in later drafts",
}
# Valid instances that are held back.
HELD = {
    "format": "a format is held, and not an annotation",
    "optional/format/email": "no quoted names",
    "optional/format/ipv6": "no IPv4 inside",
    "optional/ecmascript-regex": r"\s does not take U+FEFF",
    "optional/format/time": "of draft 3: a time has an offset",
    "optional/float-overflow": "no exponents where whole numbers are asked for",
    "ref": "what stands beside $ref counts, as in later drafts",
}


@functools.cache
def suite() -> dict[str, list[dict[str, Any]]]:
    """ "draft7/optional/format/date" and the like, to the cases of the file."""
    out = {}
    with tarfile.open(ARCHIVE) as archive:
        for member in archive:
            if member.name.endswith(".json"):
                file = archive.extractfile(member)
                assert file is not None
                out[member.name.removeprefix("tests/").removesuffix(".json")] = json.load(file)
    return out


def compiled(schema: Any) -> Answer | RequestError:
    """The state of an answer that is a value of `schema`, or why there is none."""
    wrapped = schema if isinstance(schema, dict) else {"allOf": [schema]}
    try:
        made = COMPILER.compile(TOKENIZER, content=read_format({"type": "json_schema", "schema": wrapped}, "f"))
    except RequestError as e:
        return e
    assert made is not None
    return made.start()


def takes(answer: Answer, value: Any) -> bool:
    """Whether the value's text is an answer, with its members in the order of the schema: so in any order."""
    for one in itertools.islice(orders(value), 150):
        text = [FIRST_BYTE + b for b in json.dumps(one, ensure_ascii=False).encode("utf-8", "surrogatepass")] + [EOS]
        if answer.valid(text) == len(text):
            return True
    return False


def orders(value: Any) -> Iterator[Any]:
    """The same value with its objects' members in other orders."""
    if isinstance(value, dict):
        for keys in itertools.islice(itertools.permutations(value), 24):
            inner = [list(itertools.islice(orders(value[k]), 6)) for k in keys]
            for values in itertools.islice(itertools.product(*inner), 12):
                yield dict(zip(keys, values))
    elif isinstance(value, list):
        inner = [list(itertools.islice(orders(v), 6)) for v in value]
        for values in itertools.islice(itertools.product(*inner), 12):
            yield list(values)
    else:
        yield value


def whole_float(value: Any) -> bool:
    """Whether it holds a number like 1.0, which is equal to an integer and spelled otherwise."""
    if isinstance(value, float):
        return value.is_integer()
    return any(
        map(whole_float, value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
    )


def judge(name: str) -> tuple[Counter[str], list[str]]:
    """What became of a file's schemas and instances, and what should not have."""
    seen: Counter[str] = Counter()
    wrong = []
    kind = name.split("/", 1)[1]
    for case in suite()[name]:
        schema, answer = case["schema"], compiled(case["schema"])
        where = f"{name}: {case['description']}"
        keywords = {k for _, s in subschemas({"allOf": [schema]}) for k in s} | {"false"}
        if isinstance(answer, RequestError):
            seen["refused"] += 1
            named = str(answer).split("'")[1]
            if answer.param != "f.schema" or named not in keywords:
                wrong.append(f"{where}: refused without a keyword of it: {answer}")
            continue
        seen["compiled"] += 1
        formats = {s["format"] for _, s in subschemas(schema) if isinstance(s.get("format"), str)}
        for test in case["tests"]:
            got = takes(answer, test["data"])
            seen[f"{'valid' if test['valid'] else 'invalid'} {'taken' if got else 'held back'}"] += 1
            if got and not test["valid"] and kind not in PASSED and formats <= FORMATS:
                wrong.append(f"{where}: {test['description']}: taken, and is invalid")
            if test["valid"] and not got and kind not in HELD and not whole_float(test["data"]):
                wrong.append(f"{where}: {test['description']}: held back, and is valid")
    return seen, wrong


def test_the_suite_is_whole() -> None:
    assert len(suite()) == FILES
    assert {name.split("/")[0] for name in suite()} == set(DRAFTS)


def of(draft: str, optional: bool) -> list[str]:
    return [n for n in suite() if n.startswith(f"{draft}/") and ("/optional/" in n) == optional]


def test_a_part_of_it() -> None:
    """The newest draft that is out, without what is optional."""
    seen, wrong = Counter[str](), []
    for name in of("draft2020-12", optional=False):
        counts, complaints = judge(name)
        seen += counts
        wrong += complaints
    assert wrong == []
    assert seen["valid taken"] > 350 and seen["invalid held back"] > 200 and seen["compiled"] > 150
    assert seen["invalid taken"] == 0


@pytest.mark.long
@pytest.mark.parametrize("draft", DRAFTS)
def test_all_of_it(draft: str) -> None:
    seen, wrong = Counter[str](), []
    for name in of(draft, optional=False) + of(draft, optional=True):
        counts, complaints = judge(name)
        assert counts["compiled"] + counts["refused"] == len(suite()[name])
        seen += counts
        wrong += complaints
    print(draft, dict(sorted(seen.items())))
    assert wrong == []
