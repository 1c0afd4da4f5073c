"""A pytest plugin for bench/gpu_stages.py: one JSON line a test as it ends, and a stop in time.

Lines are written at once, so a test that hangs or brings the process down is known by name: it began and never ended.
`GPU_CHECK_REPORT` names the file, `GPU_CHECK_STOP` the time (Unix seconds) after which no test is begun, and
`GPU_CHECK_EVERY` thins the tests out.
"""

from __future__ import annotations

import json
import os
import time

import pytest


def _write(**line: object) -> None:
    with open(os.environ["GPU_CHECK_REPORT"], "a") as out:
        out.write(json.dumps(line) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    every = int(os.environ.get("GPU_CHECK_EVERY", "1"))
    config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % every])
    items[:] = items[::every]
    _write(event="collected", count=len(items))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(event="end", test=report.nodeid, outcome="error", seconds=0.0, text=str(report.longrepr)[-600:])


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(event="begin", test=nodeid)


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if time.time() > float(os.environ.get("GPU_CHECK_STOP", "inf")):
        item.session.shouldstop = "out of time"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    outcome = report.outcome
    if report.failed and report.when != "call":
        outcome = "error"  # type: ignore[assignment]
    if report.when == "call" or outcome != "passed":
        text = str(report.longrepr)[-600:] if report.failed else ""
        _write(event="end", test=report.nodeid, outcome=outcome, seconds=round(report.duration, 3), text=text)
