"""Gains of a post-training folder from requests: on the sidecar that is mounted, judged by requests not fitted."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4.base.codebook import Workers
from ds4.device import Device
from ds4.engine import Engine
from ds4.errors import CapacityError, Ds4Error, FileFormatError, UsageError
from ds4.sidecar.files import gain_path, list_folder, read_gains
from ds4.sidecar.fingerprint import format_fingerprint, sidecar_fingerprint
from rulers.text import Text
from solvers import refit as module
from solvers import workfolder
from solvers.capture import Captures
from solvers.fixture import Fixture
from solvers.gains import BEST, solve_gains
from solvers.refit import first_seen
from solvers.rows import BlockRows
from tests.engine.conftest import bases, fast_device  # noqa: F401 - fixtures
from tests.reference_sidecar import sign, write_sidecar
from tests.solvers.refitting import REQUESTS, Wanting, gained, requests_in, solve
from tests.solvers.solving import NAME, engine_on

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def engine(bases: Callable[[str], Path], fast_device: Device) -> Engine:  # noqa: F811
    return engine_on(bases(NAME), fast_device)


@pytest.fixture(scope="module")
def fixture(tmp_path_factory: pytest.TempPathFactory) -> Fixture:
    return requests_in(tmp_path_factory.mktemp("fixture"))


@pytest.fixture(scope="module")
def zchain(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sidecar of any factors and biases, so that there is much to mend."""
    folder = tmp_path_factory.mktemp("zchain") / "second"
    write_sidecar(folder, engine.config, 5)
    return folder


@pytest.fixture(scope="module")
def solved(
    engine: Engine, fixture: Fixture, zchain: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("solved") / "third"
    return out, solve(engine, fixture, zchain, out)


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def test_each_layer_is_solved_on_the_sidecar_and_those_before_it(
    engine: Engine, fixture: Fixture, zchain: Path, solved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """The whole again by hand, for the last layer with gains, and what those gains do to requests not fitted."""
    out, manifest = solved
    found = list_folder(out, engine.config.num_hidden_layers)
    assert found.gains and not found.biases
    layer = max(found.gains)
    rest = tmp_path / "rest"
    rest.mkdir()
    for name, data in files(out).items():
        if name != found.gains[layer].name:
            (rest / name).write_bytes(data)
    captures = Captures(engine, fixture.text)
    captures.mount(zchain, rest)
    c, target = captures.layer(layer), fixture.layer(layer)
    at_T = np.arange(len(fixture.text))
    fresh_T = (at_T < 48) | (at_T % 48 >= 4)  # what all windows begin with counts in the first
    arrays = (a[fresh_T] for a in (c.slots_TKD, c.picks_TK, c.shared_TD, target.output_TD))
    held_T = np.isin(fixture.text.documents, (3, 7, 11))  # every fourth, the requests first
    again = solve_gains(BlockRows(*arrays, engine.config.n_routed_experts), held_T[fresh_T], BEST)
    held_T &= fresh_T
    np.testing.assert_array_equal(read_gains(found.gains[layer], *again.s_ED.shape), again.s_ED)
    record = manifest["layers"][layer]
    assert record["gains"]["lambda"] == again.lam
    of_requests = held_T & (fixture.text.documents < REQUESTS)
    added_TD = (c.slots_TKD * again.first_ED[c.picks_TK]).sum(axis=1) + c.shared_TD
    for rows_T, error in ((of_requests, record["held_out_error"]["requests"]),):
        off = np.square((added_TD - target.output_TD)[rows_T], dtype=np.float64).sum()
        assert error["with_gains"] == pytest.approx(off, rel=1e-5)
        off = np.square((c.slots_TKD.sum(axis=1) + c.shared_TD - target.output_TD)[rows_T], dtype=np.float64).sum()
        assert error["before"] == pytest.approx(off, rel=1e-5)
        assert error["with_gains"] < error["levelled"] <= error["before"]
    both = sum(e["with_gains"] for e in record["held_out_error"].values())
    assert both == pytest.approx(again.held_out_after, rel=1e-5)


def test_what_the_folder_says_and_where_it_mounts(
    engine: Engine, fixture: Fixture, zchain: Path, solved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    out, manifest = solved
    n = engine.config.num_hidden_layers
    assert json.loads((out / "manifest.json").read_text()) == manifest
    assert (manifest["requests"], manifest["held_out_requests"], manifest["solved_layers"]) == (REQUESTS, 2, "all")
    assert (manifest["held_out_rows"], manifest["repeated_rows"]) == (3 * 44, 11 * 4)
    assert [r["layer"] for r in manifest["layers"]] == list(range(n))
    under = format_fingerprint(*sidecar_fingerprint(zchain, n))
    assert (out / "base.fnv").read_text() == under and manifest["solved_on"] == under.strip()
    named = {name for r in manifest["layers"] for name in r["files"]}
    assert {p.name for p in out.iterdir()} == named | {"manifest.json", "manifest.txt", "base.fnv"}
    for r in manifest["layers"]:
        gained = r["held_out_gain"]
        assert (
            r["gains"]["written"] == (gained["requests"] > 0.005 and gained["beside"] >= -0.005) == bool(r["files"])
        )
    text = (out / "manifest.txt").read_text()
    assert f"of {REQUESTS} requests and what stands beside them" in text and f"\n   {n - 1:02d}   " in text
    engine.remount(zchain, out)
    assert not engine.warnings
    write_sidecar(tmp_path / "other", engine.config, 6)
    for other in (tmp_path / "other", None):
        with pytest.raises(FileFormatError, match=r"base\.fnv: solved on sidecar"):
            engine.remount(other, out)
    engine.remount(None, None)


def test_rows_that_repeat() -> None:
    text = Text.of([[0, 5, 6, 7], [0, 5, 7, 6], [5, 6], [0, 5, 6, 7, 8], [5, 6]], [0, 1, 2, 3, 4])
    assert first_seen(text).astype(int).tolist() == [1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 0, 0]


@pytest.mark.long
def test_the_sidecar_under_it_matters(engine: Engine, fixture: Fixture, zchain: Path, tmp_path: Path) -> None:
    """What is mended on it is not what would be on the base; and an engine that serves with replay, and has ② and
    another ③ on, does as well."""
    n = engine.config.num_hidden_layers
    wanting = Wanting(fixture, gained(engine, fixture, zchain)[0])
    (record,) = solve(engine, wanting, zchain, tmp_path / "on it", layers="last")["layers"]
    assert record["layer"] == n - 1 and record["gains"]["written"] and record["held_out_gain"]["requests"] > 0.5
    manifest = solve(engine, wanting, None, tmp_path / "on none", layers="last")
    assert manifest["solved_on"] == format_fingerprint(*sidecar_fingerprint(None, n)).strip()
    assert manifest["layers"][0]["held_out_gain"]["requests"] < 0.9 * record["held_out_gain"]["requests"]
    served = engine.with_prefill("replay")
    other = tmp_path / "other"
    write_sidecar(other, engine.config, 6, biases=False)
    sign(other, zchain, engine.config)
    served.remount(zchain, other)
    solve(served, wanting, zchain, tmp_path / "served", layers="last")
    assert files(tmp_path / "served") == files(tmp_path / "on it")
    assert served.mounted is not None and served.mounted.posttrain == other and served.options.prefill == "replay"


def test_held_out_requests_decide_and_are_not_fitted(
    engine: Engine, fixture: Fixture, zchain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other targets on their rows the fit of every lambda is the same to the bit, and so is the file where the
    choice is. With other targets on a fitted row neither is."""
    monkeypatch.setattr(module, "BEST", replace(BEST, refit=False))  # without the last fit of all rows
    output_TD = gained(engine, fixture, zchain, noise=0.5)[0]
    name = gain_path(tmp_path, engine.config.num_hidden_layers - 1).name

    def found(where: str, documents: tuple[int, ...]) -> tuple[dict[str, Any], list[float], bytes]:
        other_T1 = np.isin(fixture.text.documents, documents)[:, None]
        wanting = Wanting(fixture, np.where(other_T1, output_TD * np.float32(1.01), output_TD))
        (record,) = solve(engine, wanting, zchain, tmp_path / where, layers="last")["layers"]
        return record, [c["fitted"] for c in record["gains"]["by_lambda"]], files(tmp_path / where)[name]

    first, held, fitted = found("first", ()), found("held", (3, 7, 11)), found("fitted", (4,))
    assert first[0]["gains"]["lambda"] == held[0]["gains"]["lambda"], "this tested nothing"
    assert first[1] == held[1] and first[2] == held[2]
    assert first[1] != fitted[1] and first[2] != fitted[2]
    for group in ("requests", "beside"):
        before = [x[0]["held_out_error"][group]["before"] for x in (first, held, fitted)]
        assert before[0] != before[1] and before[0] == before[2]


def test_nothing_is_written_where_it_does_not_help(engine: Engine, fixture: Fixture, tmp_path: Path) -> None:
    """On a sidecar that was solved on the same text by the same rule, and is louder than the least error: against
    what is mounted gains would seem to help, since they undo that."""
    wanting = Wanting(fixture, gained(engine, fixture, None, noise=1.0)[0])
    (once,) = solve(engine, wanting, None, tmp_path / "once", layers="last")["layers"]
    assert once["gains"]["written"] and once["gains"]["louder"] > 1.05
    second = tmp_path / "second"
    second.mkdir()
    (name,) = once["files"]
    (second / name).write_bytes((tmp_path / "once" / name).read_bytes())
    (again,) = solve(engine, wanting, second, tmp_path / "twice", layers="last")["layers"]
    assert not again["gains"]["written"] and not again["files"]
    error = again["held_out_error"]["requests"]
    assert 1 - error["with_gains"] / error["before"] > 0.005 and error["levelled"] < error["before"]
    assert {p.name for p in (tmp_path / "twice").iterdir()} == {"base.fnv", "manifest.json", "manifest.txt"}
    assert "0 of 1 layers have gains" in (tmp_path / "twice" / "manifest.txt").read_text()


def test_text_beside_must_not_lose(engine: Engine, fixture: Fixture, zchain: Path, tmp_path: Path) -> None:
    """Its held-out rows want what they have already, so that whatever changes is for the worse."""
    wanted_TD, ours_TD = gained(engine, fixture, zchain)
    wanting = Wanting(fixture, np.where(fixture.text.documents[:, None] == 11, ours_TD, wanted_TD))
    (record,) = solve(engine, wanting, zchain, tmp_path / "third", layers="last")["layers"]
    assert record["held_out_gain"]["requests"] > 0.5 and record["held_out_gain"]["beside"] < -0.005
    assert not record["gains"]["written"] and not record["files"]


KILLED = """
import os, signal, sys
from pathlib import Path
from solvers.fixture import Fixture
from solvers.workfolder import WorkFolder
from tests.conftest import opened
from tests.solvers.refitting import solve
from tests.solvers.solving import engine_on

add, count = WorkFolder.add, [int(sys.argv[5])]

def dies(*args):
    if count[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    count[0] -= 1
    add(*args)

WorkFolder.add = dies
base, fixture, zchain, out = map(Path, sys.argv[1:5])
solve(engine_on(base, opened("fast", "greedy")), Fixture.open(fixture), zchain, out)
"""


@pytest.mark.long
def test_a_killed_run_gives_the_same_bytes(
    engine: Engine, fixture: Fixture, zchain: Path, solved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Killed in the first layer, whose file is there and not recorded, and taken up and killed in the third; the rest
    by two workers. A second run does nothing."""
    out, part = tmp_path / "third", tmp_path / "third.part"
    argv = [sys.executable, "-c", textwrap.dedent(KILLED), *map(str, (engine.base.path, fixture.path, zchain, out))]
    for count, recorded in ((0, None), (2, 2)):
        run = subprocess.run([*argv, str(count)], check=False, cwd=ROOT, capture_output=True)
        assert run.returncode == -9, run.stderr.decode()
        assert not out.exists() and {p.name for p in part.iterdir()} >= {"base.fnv", "gr_L00.bin"}
        state = tmp_path / "third.part.json"
        assert (len(json.loads(state.read_text())["records"]) if state.exists() else None) == recorded
    said: list[str] = []
    told: list[tuple[int, int]] = []
    with Workers(2) as workers:
        solve(engine, fixture, zchain, out, said.append, workers=workers, progress=lambda *a: told.append(a))
    assert len(said) == engine.config.num_hidden_layers - 2
    assert told[-1] == (1000 * engine.config.num_hidden_layers,) * 2
    assert files(out) == files(solved[0]) and sorted(p.name for p in tmp_path.iterdir()) == ["third"]
    assert solve(engine, fixture, zchain, out, said.append) == solved[1]
    assert len(said) == engine.config.num_hidden_layers - 2


def test_another_job_and_a_broken_folder_are_refused(
    engine: Engine, fixture: Fixture, zchain: Path, solved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, data in files(solved[0]).items():
        (copy / name).write_bytes(data)
    with pytest.raises(UsageError, match=r"holds another .* \(solved_on differ\)"):
        solve(engine, fixture, None, copy)
    with pytest.raises(UsageError, match=r"holds another .* \(solved_layers differ\)"):
        solve(engine, fixture, zchain, copy, layers="last")
    (copy / "base.fnv").write_text("0123456789abcdef 3\n")
    with pytest.raises(FileFormatError, match=r"base\.fnv: solved on sidecar '0123456789abcdef 3'"):
        solve(engine, fixture, zchain, copy)
    with pytest.raises(UsageError, match="layers 'first' are unknown; there are all, last"):
        solve(engine, fixture, zchain, tmp_path / "new", layers="first")
    with pytest.raises(FileFormatError, match="none: is not a folder"):
        solve(engine, fixture, tmp_path / "none", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_too_few_requests_and_a_full_disk(
    engine: Engine, zchain: Path, fixture: Fixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = Fixture(
        fixture.path, {**fixture.head, "sources": {**fixture.head["sources"], **dict.fromkeys("01234", "x")}}
    )
    with pytest.raises(UsageError, match="has text of 3 different requests; a refit needs at least 4"):
        solve(engine, few, zchain, tmp_path / "third")
    with monkeypatch.context() as m:
        m.setattr(workfolder.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 100}))
        with pytest.raises(CapacityError, match=r"takes up to [\d,]+ bytes, 100 are free"):
            solve(engine, fixture, zchain, tmp_path / "third")
    assert not list(tmp_path.iterdir()) or not (tmp_path / "third").exists()


def test_what_is_mounted_must_be_what_was_solved(
    engine: Engine, fixture: Fixture, zchain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = Captures.mount
    wanting = Wanting(fixture, gained(engine, fixture, zchain)[0])
    monkeypatch.setattr(Captures, "mount", lambda self, zchain, posttrain=None: put(self, zchain))  # ③ is never on
    with pytest.raises(Ds4Error, match=r"layer 6: with the gains mounted the engine's slots are off by"):
        solve(engine, wanting, zchain, tmp_path / "third", layers="last")
    assert not list((tmp_path / "third.part").glob("gr_*"))
