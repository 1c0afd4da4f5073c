"""Run one test against kernels with one line broken.

A mutant is one line of one product kernel, changed the way a slip would change it, and the name of the test that
notices. The mutation is applied to a copy of `cuda/`, the test runs in another process with DS4_CUDA_DIR set to the
copy, and it has to fail: by an assertion or by the CPU driver's report, not because the mutant does not compile.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ds4.device.build import default_cuda_dir

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Mutant:
    """One broken line.

    Attributes:
        name: what is broken, in words.
        file: below cuda/.
        line: text that stands in exactly one place of the file (or in one line, with `at` naming which).
        broken: what replaces it.
        node: the pytest node that must fail.
        says: a pattern that its report must contain.
        at: which occurrence of `line`, from 0; None: the only one.
    """

    name: str
    file: str
    line: str
    broken: str
    node: str
    says: str = r"AssertionError|DeviceError"
    at: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What the test said: pytest's exit code (1: a test failed) and its output."""

    code: int
    output: str


def mutate(text: str, mutant: Mutant) -> str:
    """`text` with the mutant's line broken.

    Raises:
        ValueError: the line is not there, or stands in several places and `at` does not say which.
    """
    places = [m.start() for m in re.finditer(re.escape(mutant.line), text)]
    if mutant.at is None and len(places) != 1:
        raise ValueError(
            f"{mutant.name}: {mutant.line!r} stands in {len(places)} places of {mutant.file}, not in one"
        )
    if mutant.at is not None and mutant.at >= len(places):
        raise ValueError(f"{mutant.name}: {mutant.line!r} stands in {len(places)} places of {mutant.file}")
    if mutant.line == mutant.broken:
        raise ValueError(f"{mutant.name}: nothing is broken")
    start = places[mutant.at or 0]
    return text[:start] + mutant.broken + text[start + len(mutant.line) :]


class Runner:
    """A process that runs one mutant's test after the other: interpreter and imports are paid for once."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, mutant: Mutant, where: Path) -> Outcome:
        """Apply the mutant to a copy of the sources below `where` and run its test."""
        copy = where / "cuda"
        shutil.copytree(default_cuda_dir(), copy)
        path = copy / mutant.file
        path.write_text(mutate(path.read_text(), mutant))
        if self._process is None:
            command = [sys.executable, "-m", "tests.mutants.runner"]
            env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, text=True)
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps({"cuda_dir": str(copy), "node": mutant.node}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:  # it died with the mutant; the next one gets a new process
            code = self._process.wait()
            self._process = None
            return Outcome(code, f"the process ended with {code}")
        return Outcome(**json.loads(answer))

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._process.stdin:
            self._process.stdin.close()
            self._process.wait()


def complaint(mutant: Mutant, outcome: Outcome) -> str | None:
    """Why the mutant does not count as caught; None if it does."""
    if outcome.code == 0:
        return f"{mutant.name}: survives {mutant.node}"
    if outcome.code != 1:
        return f"{mutant.name}: pytest could not run {mutant.node} (exit code {outcome.code})"
    if "BuildError" in outcome.output:
        return f"{mutant.name}: the mutant does not compile"
    if not re.search(mutant.says, outcome.output):
        return f"{mutant.name}: the failure of {mutant.node} does not say {mutant.says!r}"
    return None
