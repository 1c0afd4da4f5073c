"""bench/tool_schemas.py takes what its collection has, and says what does not come back."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.bench.test_benches import run

GOOD = {
    "name": "a.b",
    "parameters": {"type": "dict", "properties": {"x": {"type": "string"}, "y": {"type": "array"}}},
}


@pytest.mark.parametrize(("functions", "faults"), [([GOOD], 0), ([GOOD, {**GOOD, "name": 'a"b'}], 1), ([], 0)])
def test_tool_schemas(functions: list[dict[str, Any]], faults: int, tmp_path: Path) -> None:
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        rows = [{"id": "1", "function": functions}, {"id": "2", "question": "\u2028 no line ends here"}]
        archive.writestr("e/data/asked.json", "\n".join(json.dumps(r, ensure_ascii=False) for r in rows))
        archive.writestr("e/data/answers.json", json.dumps({"ground_truth": [{"a.b": {"x": ["</\n", "or"]}}]}))
        archive.writestr("e/other.json", "no rows")
    code, out, text = run("tool_schemas.py", str(wheel))
    assert out == {"files": 2, "schemas": len(functions), "calls": len(functions) + 1, "faults": faults}, text
    assert code == (1 if faults or not functions else 0)
    assert ("refused" in text) == bool(faults)
