"""A sidecar from a text: what is written, that it mends rows that were not fitted, kills, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4.base.codebook import Workers
from ds4.cli import main
from ds4.device import Device
from ds4.engine import Engine
from ds4.errors import CapacityError, Ds4Error, FileFormatError, UsageError
from ds4.sidecar.files import list_folder, read_gains
from ds4.sidecar.fingerprint import format_fingerprint, sidecar_fingerprint
from solvers import layer, sidecar, workfolder
from solvers.capture import Captures
from solvers.fixture import Fixture
from solvers.gains import RECIPE, solve_gains
from solvers.rows import BlockRows
from solvers.windows import held_out
from tests.engine.conftest import bases, fast_device  # noqa: F401 - fixtures
from tests.solvers.solving import ABOUT, NAME, engine_on, fixture_in, solve, teacher_of

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def engine(bases: Callable[[str], Path], fast_device: Device) -> Engine:  # noqa: F811
    return engine_on(bases(NAME), fast_device)


@pytest.fixture(scope="module")
def fixture(tmp_path_factory: pytest.TempPathFactory) -> Fixture:
    return fixture_in(tmp_path_factory.mktemp("fixture"), 64)


@pytest.fixture(scope="module")
def solved(engine: Engine, fixture: Fixture, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("solved") / "made"
    return out, solve(engine, fixture, out)


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def test_each_layer_is_solved_on_those_before_it(
    engine: Engine, fixture: Fixture, solved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """The whole again by hand, for the last layer with gains: the captures with the rest mounted, the same rule."""
    out, manifest = solved
    found = list_folder(out, engine.config.num_hidden_layers)
    assert found.gains and found.biases, "nothing was written: this tested nothing"
    layer = max(found.gains)
    rest = tmp_path / "rest"
    rest.mkdir()
    for path in out.iterdir():
        if path.name != found.gains[layer].name and path.suffix == ".bin" and int(path.stem[-2:]) <= layer:
            (rest / path.name).write_bytes(path.read_bytes())
    captures = Captures(engine, fixture.text)
    captures.mount(rest)
    c, target = captures.layer(layer), fixture.layer(layer)
    rows = BlockRows(c.slots_TKD, c.picks_TK, c.shared_TD, target.output_TD, engine.config.n_routed_experts)
    held_T = held_out(fixture.text.documents, np.array([s == "news" for s in fixture.sources]))
    again = solve_gains(rows, held_T)
    np.testing.assert_array_equal(read_gains(found.gains[layer], *again.s_ED.shape), again.s_ED)
    record = manifest["layers"][layer]
    assert record["gains"]["lambda"] == again.lam and record["gains"]["held_out_gain"] == again.held_out_gain
    assert record["held_out_error"]["with_bias"] == pytest.approx(again.held_out_before, rel=1e-5)


def test_what_the_manifest_says(engine: Engine, fixture: Fixture, solved: tuple[Path, dict[str, Any]]) -> None:
    out, manifest = solved
    n = engine.config.num_hidden_layers
    assert json.loads((out / "manifest.json").read_text()) == manifest
    assert [r["layer"] for r in manifest["layers"]] == list(range(n))
    assert manifest["base"] == ABOUT["base"] and manifest["text"] == fixture.text.digest and manifest["tokens"] == 512
    assert manifest["fingerprint"] == format_fingerprint(*sidecar_fingerprint(out, n)).strip()
    named = {name for r in manifest["layers"] for name in r["files"]}
    assert {p.name for p in out.iterdir()} == named | {"manifest.json", "manifest.txt"}
    for r in manifest["layers"]:
        assert r["shares"] == {"sums": 1.0, "sets": 1.0, "original_routing": 1.0}
        assert [a["alpha"] for a in r["bias"]["by_alpha"]] == [0.5, 1.0, 1.5, 2.5]
        assert [g["lambda"] for g in r["gains"]["by_lambda"]] == [0.01, 0.1, 1, 10, 100, 1000]
        assert r["bias"]["written"] == (r["bias"]["same_set_after"] > r["bias"]["same_set"])
        assert r["gains"]["written"] == (r["gains"]["held_out_gain"] > 0.005)
        assert (f"gr_L{r['layer']:02d}.bin" in r["files"]) == r["gains"]["written"]
        if r["gains"]["written"]:
            assert r["held_out_error"]["with_gains"] < r["held_out_error"]["with_bias"]
    text = (out / "manifest.txt").read_text()
    assert "512 tokens of its fit slice" in text and f"\n   {n - 1:02d}   " in text
    Engine.open(engine.base.path, engram_dir=ROOT / "tests/data" / NAME, device=engine.device, zchain=out)


def test_a_bias_that_does_not_serve_the_block_is_taken_off(
    engine: Engine, fixture: Fixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a threshold that no bias reaches: what a solve without biases gives, and the manifest tells."""
    ways = {"strict": sidecar.Way(RECIPE, 1, 1.0), "none": sidecar.Way(RECIPE, 0)}
    monkeypatch.setattr(sidecar, "WAYS", ways)
    strict, none = (solve(engine, fixture, tmp_path / way, way=way) for way in ways)
    bins = [{n: d for n, d in files(tmp_path / way).items() if n.endswith(".bin")} for way in ways]
    assert bins[0] == bins[1] and not any(n.startswith("rb") for n in bins[0])
    tried = [r["bias"] for r in strict["layers"] if r["bias"]["tried"]]
    assert tried and not any(b["written"] or b["alpha"] for b in tried)
    assert not any(r["bias"]["tried"] for r in none["layers"])
    assert all(r["held_out_error"]["with_bias"] == r["held_out_error"]["before"] for r in strict["layers"])


KILLED = """
import os, signal, sys
from pathlib import Path
from solvers.fixture import Fixture
from solvers.workfolder import WorkFolder
from tests.conftest import opened
from tests.solvers.solving import engine_on, solve

name, count = sys.argv[4], [int(sys.argv[5])]
work = getattr(WorkFolder, name)

def dies(*args):
    if count[0] == 0:
        if name == "put":
            work(*args)
        os.kill(os.getpid(), signal.SIGKILL)
    count[0] -= 1
    return work(*args)

setattr(WorkFolder, name, dies)
solve(engine_on(Path(sys.argv[1]), opened("fast", "greedy")), Fixture.open(sys.argv[2]), Path(sys.argv[3]))
"""


@pytest.mark.parametrize("where, count", [("put", 1), pytest.param("add", 2, marks=pytest.mark.long)])
def test_a_killed_run_gives_the_same_bytes(
    engine: Engine, fixture: Fixture, solved: tuple[Path, dict[str, Any]], tmp_path: Path, where: str, count: int
) -> None:
    out = tmp_path / "made"
    argv = [str(engine.base.path), str(fixture.path), str(out), where, str(count)]
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), *argv], check=False, cwd=ROOT, capture_output=True
    )
    assert run.returncode == -9, run.stderr.decode()
    assert not out.exists() and (tmp_path / "made.part").is_dir()
    before = json.loads((tmp_path / "made.part.json").read_text())["records"]
    left = {p.name for p in (tmp_path / "made.part").iterdir()} - {name for r in before for name in r["files"]}
    assert left and all(name.endswith(f"_L{len(before):02d}.bin") for name in left), "not killed within a layer"
    said: list[str] = []
    with Workers(2) as workers:
        solve(engine, fixture, out, said.append, workers=workers)
    assert len(said) == engine.config.num_hidden_layers - len(before)
    assert files(out) == files(solved[0])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["made"]


def test_a_finished_folder_is_used_and_another_is_refused(
    engine: Engine, fixture: Fixture, solved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    out, manifest = solved
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, data in files(out).items():
        (copy / name).write_bytes(data)
    said: list[str] = []
    assert solve(engine, fixture, copy, said.append) == manifest and said == []
    with pytest.raises(UsageError, match=r"holds another sidecar \(way, rule differ\)"):
        solve(engine, fixture, copy, way="best")
    name = next(n for r in manifest["layers"] for n in r["files"])
    (copy / name).write_bytes(b"no")
    with pytest.raises(FileFormatError, match=f"{name}: is not what manifest.json says"):
        solve(engine, fixture, copy)
    (copy / "manifest.json").unlink()
    with pytest.raises(UsageError, match="is there and is no sidecar"):
        solve(engine, fixture, copy)
    with pytest.raises(UsageError, match="no such folder to make"):
        solve(engine, fixture, tmp_path / "none" / "made")


def test_a_full_disk_and_a_second_process(
    engine: Engine, fixture: Fixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "made"
    with workfolder.WorkFolder(out, {"format": 0}, 1), pytest.raises(UsageError, match="by another process"):
        solve(engine, fixture, out)
    with monkeypatch.context() as m:
        usage = type("Usage", (), {"free": 100})
        m.setattr(workfolder.shutil, "disk_usage", lambda _: usage)
        with pytest.raises(CapacityError, match=r"takes up to [\d,]+ bytes, 100 are free"):
            solve(engine, fixture, out)
    assert not out.exists()


def test_what_is_mounted_must_be_what_was_solved(
    engine: Engine, fixture: Fixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "made"
    with monkeypatch.context() as m:
        m.setattr(Captures, "mount", lambda *_: None)  # nothing is ever put on
        with pytest.raises(Ds4Error, match=r"layer \d+: .*(not kept|chose)"):
            solve(engine, fixture, out)
    assert not list((tmp_path / "made.part").glob("gr_*"))
    encode = layer.encode_gains
    with monkeypatch.context() as m:
        m.setattr(layer, "encode_gains", lambda s: encode(np.roll(s, 1, axis=1)))
        with pytest.raises(Ds4Error, match="a reader finds other values"):
            solve(engine, fixture, out)
    assert not list((tmp_path / "made.part").glob("*gr_*"))


def test_the_fixture_must_be_the_checkpoints(
    engine: Engine, fixture: Fixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Fixture.layer

    def other(self: Fixture, layer: int) -> Any:
        return read(self, (layer + 1) % self.n_layers)

    monkeypatch.setattr(Fixture, "layer", other)
    with pytest.raises(Ds4Error, match=r"layer 0: the original's router chooses .* do not belong together"):
        solve(engine, fixture, tmp_path / "made")
    with pytest.raises(UsageError, match="way 'quick' is unknown"):
        sidecar.solve_sidecar(engine, teacher_of(), fixture, tmp_path / "made", ABOUT, way="quick")


def test_the_command_refuses_what_does_not_belong_together(
    bases: Callable[[str], Path],  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = ROOT / "tests" / "data" / NAME
    argv = ["solve", "sidecar", "--domain", "code", "-o", str(tmp_path / "made")]
    assert main.run([*argv, "-m", str(bases(NAME)), "--engram-dir", str(data)]) == 2  # against the embedded original
    assert "solve a base against the checkpoint that it was made from" in capsys.readouterr().err
    assert main.run([*argv[:3], "nonsense", "-o", str(tmp_path / "made")]) == 2
    assert "neither a folder nor an embedded domain" in capsys.readouterr().err
    assert main.run([*argv, "--workers", "0"]) == 2 and "expected at least 1" in capsys.readouterr().err
    taken = tmp_path / "taken"
    taken.write_text("mine")
    assert main.run([*argv[:-1], str(taken)]) == 2 and "is no sidecar that was solved" in capsys.readouterr().err
    taken.unlink()
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_the_embedded_model_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["solve", "sidecar", "--domain", "code", "-o", str(tmp_path / "code"), "--tokens", "1024", "--json"]
    argv += ["--beside-tokens", "1024"]
    assert main.run(argv) == 0
    manifest = json.loads(capsys.readouterr().out)
    beside = manifest["beside"]
    assert beside["domain"] == "general" and manifest["tokens"] > beside["tokens"] > 0
    assert "slice and of general's" in (tmp_path / "code" / "manifest.txt").read_text()
    assert manifest["domain"] == "code" and len(manifest["layers"]) == 6
    assert all(r["gains"]["held_out_gain"] > 0.02 for r in manifest["layers"])
    first = files(tmp_path / "code")
    assert main.run(argv) == 0 and files(tmp_path / "code") == first  # done already
    assert json.loads(capsys.readouterr().out) == manifest
