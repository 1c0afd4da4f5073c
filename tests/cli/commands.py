"""A command run in this process: what it prints, or how it refuses."""

from __future__ import annotations

import pytest

from ds4.cli.main import run


def ok(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert run([str(a) for a in argv]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], code: int, *argv: object) -> str:
    assert run([str(a) for a in argv]) == code
    got = capsys.readouterr()
    assert got.err.startswith("error: ") and "Traceback" not in got.err
    return got.err
