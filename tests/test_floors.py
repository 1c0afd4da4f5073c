"""The house rules, enforced: a room imports from itself and from the floors below it.

Also: the environment is read in ds4/settings.py only, a file stays under 500 lines, and no name is private to
another room.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLOORS: list[set[str]] = [  # ground floor first
    {"ds4.errors", "ds4.disk"},  # the ground floor has a step: everybody may raise
    {"ds4.model", "ds4.settings", "ds4.embedded"},
    {"ds4.device"},
    {"ds4.checkpoint", "ds4.work"},
    {"ds4.base", "ds4.sidecar", "ds4.engram", "ds4.corpus", "ds4.posttrain", "ds4.hub", "ds4.constrain"},
    {"ds4.engine", "ds4.teacher"},
    {"rulers", "ds4.server"},
    {"solvers"},
    {"ds4.cli"},
]
OUTSIDE = {"train", "bench", "tests"}  # tools around the product; it knows none of them
SIDEWAYS: set[tuple[str, str]] = set()
SOURCES = [p for top in ("ds4", "rulers", "solvers") for p in sorted((ROOT / top).rglob("*.py"))]


def room(name: str) -> str | None:
    """The room that `name` is, or is in; None if it is not ours."""
    rooms = (r for floor in FLOORS for r in floor)
    return next((r for r in rooms if name == r or name.startswith(r + ".")), None)


def floor(r: str) -> int:
    return next(i for i, rooms in enumerate(FLOORS) if r in rooms)


def imports(text: str, where: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{where}: write the full name, not a relative one"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def wrong_imports(module: str, text: str) -> list[str]:
    """What `module` may not import, one line each."""
    here, wrong = room(module), []
    for name in imports(text, module):
        there = room(name)
        if name.split(".")[0] in OUTSIDE:
            wrong.append(f"{module} imports {name}: the product does without it")
        if there is None or there == here:
            continue
        if here is None or (floor(there) >= floor(here) and (here, there) not in SIDEWAYS):
            wrong.append(f"{module} imports {name}: not on a floor below")
        elif any(part.startswith("_") for part in name.split(".")):
            wrong.append(f"{module} imports {name}: private to {there}")
    return wrong


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_imports_go_down() -> None:
    assert [line for path in SOURCES for line in wrong_imports(module_of(path), path.read_text())] == []


def test_the_rule_itself() -> None:
    assert wrong_imports("ds4.device.build", "from ds4.engine.step import Step") != []
    assert wrong_imports("ds4.base.reader", "import ds4.engram.store") != []  # sideways
    assert wrong_imports("rulers.score", "from solvers.gains import solve") != []
    assert wrong_imports("ds4.cli.install", "from train.export import export") != []
    assert wrong_imports("ds4.engine.step", "from ds4.device.launch import _split") != []
    assert wrong_imports("ds4.engine.step", "from ds4.device import Device\nimport ds4.errors") == []


def test_only_settings_reads_the_environment() -> None:
    readers = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"):
                readers.append(module_of(path))
    assert set(readers) <= {"ds4.settings"}


def test_a_file_stays_under_500_lines() -> None:
    extra = [p for top in ("tests", "bench") for p in (ROOT / top).rglob("*.py")]
    extra += [p for p in (ROOT / "train").rglob("*.py") if ".venv" not in p.parts]
    extra += [p for kind in ("*.cu", "*.cuh", "*.h", "*.cpp") for p in (ROOT / "cuda").rglob(kind)]
    lengths = {str(p.relative_to(ROOT)): len(p.read_bytes().splitlines()) for p in [*SOURCES, *extra]}
    assert {name: n for name, n in lengths.items() if n >= 500} == {}
