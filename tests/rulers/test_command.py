"""`ds4 ruler` as a person or a program uses it: the embedded model, a few windows of its judge text."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ds4 import embedded
from ds4.cli import ruler
from ds4.cli.main import COMMANDS
from ds4.model.config import ModelConfig
from ds4.settings import device_settings
from rulers.identity import folder_mark
from rulers.reading import Reading
from tests.cli.commands import ok, refused
from tests.embedded.conftest import base  # noqa: F401 - fixtures
from tests.engine.conftest import DATA, bases  # noqa: F401
from tests.reference_sidecar import write_sidecar

SMALL = ["--domain", "code", "--tokens", 96, "--length", 32, "--floor-tokens", 40]


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Scores and journals of a test go here; kernels stay where they are."""
    monkeypatch.setattr(ruler, "device_settings", lambda: replace(device_settings(), cache=tmp_path))
    return tmp_path


@pytest.fixture
def model(base: Path) -> list[object]:  # noqa: F811
    return ["-m", base, "--engram-dir", embedded.checkpoint()]


def test_run_compare_and_report(capsys: pytest.CaptureFixture[str], model: list[object], cache: Path) -> None:
    a, b = cache / "a.npz", cache / "b.npz"
    first = json.loads(ok(capsys, "ruler", "run", *model, *SMALL, "-o", a, "--json"))
    assert first["domain"] == "code" and first["tokens"] == 3 * 31 and first["documents"] >= 2
    assert list(first["sigma_min"]) == ["mean", "se", "median", "p5"] and list(first["ppl_ratio"]) == ["value", "se"]
    assert 0.5 < first["sigma_min"]["mean"] < 0.95 and first["kl"]["mean"] > 0 and first["floor"]["tokens"] == 2 * 31
    assert Reading.load(a).to_json() == first
    (kept,) = (cache / "teacher").glob("*.npz")
    stamp = kept.stat().st_mtime_ns
    text = ok(capsys, "ruler", "run", *model, *SMALL, "--path", "decode", "-o", b)
    assert "Sigma-min" in text and "A/A floor: the same weights by the other path" in text
    assert kept.stat().st_mtime_ns == stamp and list((cache / "rulers").iterdir()) == []
    difference = json.loads(ok(capsys, "ruler", "compare", a, b, "--json"))
    assert abs(difference["sigma_min"]["mean"]) < 0.05 and difference["a"]["path"] == "prefill"
    assert "B - A, paired" in ok(capsys, "ruler", "compare", a, b)
    written = ok(capsys, "ruler", "report", b, "--before", a, "-o", cache / "report").splitlines()
    assert [Path(line).name for line in written] == ["report.md", "report.json", "report.html"]
    assert json.loads(Path(written[1]).read_text())["differences"][0]["sigma_min"] == difference["sigma_min"]
    other = cache / "c.npz"
    ok(capsys, "ruler", "run", *model, *SMALL[:-2], "--floor-tokens", 0, "--slice", "fit", "-o", other)
    said = refused(capsys, 2, "ruler", "compare", a, other)
    assert str(a) in said and "original's split is 'judge' in the first and 'fit'" in said


def test_a_mounted_sidecar_is_read_and_named(
    capsys: pytest.CaptureFixture[str], model: list[object], cache: Path
) -> None:
    """Random factors around 1 on every down row: worse than the base, and the reading says whose it is."""
    config = ModelConfig.load(embedded.checkpoint())
    write_sidecar(cache / "noise", config, 1)
    argv = ["ruler", "run", *model, *SMALL[:-2], "--floor-tokens", 0, "--json"]
    plain = json.loads(ok(capsys, *argv, "-o", cache / "a.npz"))
    noisy = json.loads(ok(capsys, *argv, "--zchain", cache / "noise", "-o", cache / "b.npz"))
    mark = folder_mark(cache / "noise")
    assert noisy["weights"] == plain["weights"] + f" + zchain noise {mark}" and noisy["text"] == plain["text"]
    found = json.loads(ok(capsys, "ruler", "compare", cache / "a.npz", cache / "b.npz", "--json"))
    assert found["sigma_min"]["mean"] < -2 * found["sigma_min"]["se"] and found["floor"] == {"a": None, "b": None}


def test_what_cannot_be_judged_is_refused_before_the_work(
    capsys: pytest.CaptureFixture[str],
    model: list[object],
    cache: Path,
    bases: Callable[[str], Path],  # noqa: F811
) -> None:
    other = ["-m", bases("oracle-a"), "--engram-dir", DATA / "oracle-a"]
    said = refused(capsys, 2, "ruler", "run", *other, *SMALL)
    assert "oracle-a.gguf is of model" in said and "judge a base by the checkpoint" in said
    for flags, expected in (
        (["--prefill", "replay"], "--prefill replay computes only some rows"),
        (["--floor-tokens", -1], "--floor-tokens is -1"),
        (["--length", 3], "windows of 3 tokens are too short"),
        (["--domain", "cooking"], "'cooking': neither a folder nor an embedded domain"),
        (["-o", cache], "is a folder"),
    ):
        assert expected in refused(capsys, 2, "ruler", "run", *model, *SMALL, *flags)
    assert not (cache / "teacher").exists()
    assert "nothing.npz: cannot be read" in refused(capsys, 1, "ruler", "report", cache / "nothing.npz", "-o", cache)


def test_endings_of_a_model_that_never_stops(
    capsys: pytest.CaptureFixture[str],
    cache: Path,
    bases: Callable[[str], Path],  # noqa: F811
) -> None:
    """Random weights, greedy: an answer fills the context of 256 tokens unless it happens to end."""
    prompts = cache / "p.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    argv = ["ruler", "endings", "-m", bases("oracle-a"), "--engram-dir", DATA / "oracle-a", "--prompts", prompts]
    told = json.loads(ok(capsys, *argv, "--temp", 0, "--json"))
    (answer,) = told["answers"]
    assert answer["reason"] in ("end", "context") and told[answer["reason"]]["mean"] == 1
    assert answer["reason"] == "end" or 200 < answer["tokens"] < 256
    assert list((cache / "rulers").iterdir()) == [] and told["thinking_closed"] is None
    assert "temperature" in refused(capsys, 2, *argv, "--temp", -1)


def test_the_command_is_listed() -> None:
    assert COMMANDS["ruler"] == "ds4.cli.ruler"
