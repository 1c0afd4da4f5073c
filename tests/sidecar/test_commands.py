"""Sidecars from the command line and in the server: shown, verified, mounted, told."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ds4.cli.main import run
from ds4.cli.serve import parse
from ds4.cli.serve import run as run_server
from ds4.engine import Engine
from ds4.errors import FileFormatError
from ds4.model.config import ModelConfig
from ds4.sidecar.fingerprint import format_fingerprint, sidecar_fingerprint
from tests.base.toys import toy_base, toy_dir
from tests.conftest import opened
from tests.reference_sidecar import write_sidecar
from tests.server.standin import serve

NAME = "oracle-a"
CONFIG = ModelConfig.load(toy_dir(NAME))


@pytest.fixture(scope="module")
def base() -> Path:
    return toy_base(NAME, bits=6)


@pytest.fixture
def law(tmp_path: Path) -> Path:
    write_sidecar(tmp_path / "law", CONFIG, 1)
    return tmp_path / "law"


def mark(folder: Path | None) -> str:
    return format_fingerprint(*sidecar_fingerprint(folder, CONFIG.num_hidden_layers)).strip()


def test_show(capsys: pytest.CaptureFixture[str], law: Path) -> None:
    assert run(["sidecar", "show", str(law), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fingerprint"] == mark(law) and told["solved_on"] is None and told["files"] == 12
    assert told["bytes"] == 6 * (12 + 8 * 64 // 32 * 17 + 8 + 4 * 8)
    assert [layer["layer"] for layer in told["layers"]] == [0, 2, 3, 4, 5, 6]
    gains = told["layers"][0]["gains"]
    assert (gains["type"], gains["experts"], gains["width"]) == ("fp4x32", 8, 64)
    assert gains["least"] < 1 < gains["largest"] and 0.05 < gains["rms"] < 1 and 0 < gains["ones"] < 0.5
    (law / "base.fnv").write_text(mark(None))
    assert run(["sidecar", "show", str(law)]) == 0
    said = capsys.readouterr().out
    assert mark(law) in said and f"solved on {mark(None)}" in said and "fp4x32 8 x 64" in said


@pytest.mark.parametrize("raw", [b"", b"\0" * 12, b"\xff" * 12, np.array([8, 64, 43], "<i4").tobytes() + b"\0" * 5])
def test_show_refuses_a_broken_file_by_name(capsys: pytest.CaptureFixture[str], law: Path, raw: bytes) -> None:
    (law / "gr_L03.bin").write_bytes(raw)
    assert run(["sidecar", "show", str(law)]) == 1
    assert "gr_L03.bin" in capsys.readouterr().err


def test_verify(capsys: pytest.CaptureFixture[str], law: Path, base: Path, tmp_path: Path) -> None:
    """Every problem, not the first; a post-training folder against the sidecar that it is mounted on."""
    model = ["-m", str(base), "--engram-dir", str(toy_dir(NAME))]
    assert run(["sidecar", "verify", str(law), *model]) == 0
    assert "mounts as --zchain" in capsys.readouterr().out
    third = tmp_path / "tuned"
    write_sidecar(third, CONFIG, 2, biases=False)
    (third / "base.fnv").write_text(mark(law))
    assert run(["sidecar", "verify", str(third), *model, "--zchain", str(law)]) == 0
    assert "mounts as --posttrain" in capsys.readouterr().out
    assert run(["sidecar", "verify", str(third), *model]) == 1
    assert "base.fnv" in capsys.readouterr().out
    for name in ("gr_L00.bin", "rb_L04.bin"):
        (law / name).write_bytes((law / name).read_bytes()[:-1])
    (law / "amp_L00.bin").write_bytes(b"")
    (law / "gr_L07.bin").write_bytes(b"")
    assert run(["sidecar", "verify", str(law), *model, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    names = ["amp_L00.bin", "gr_L00.bin", "gr_L07.bin", "rb_L04.bin"]
    assert not told["sound"] and len(told["problems"]) == 4
    assert all(name in problem for name, problem in zip(names, told["problems"]))
    assert run(["sidecar", "verify", str(tmp_path / "none"), *model]) == 1
    assert "is not a folder" in capsys.readouterr().err


def test_scored_and_generated_with_a_sidecar(
    capsys: pytest.CaptureFixture[str], law: Path, base: Path, tmp_path: Path
) -> None:
    """What the engine gives by itself; a post-training folder that names no sidecar is mounted with a warning."""
    third = tmp_path / "tuned"
    write_sidecar(third, CONFIG, 2, biases=False)
    ids = np.array([0, 5, 9, 13, 5, 200, 7], np.int64)
    np.save(tmp_path / "ids.npy", ids)
    where = ["-m", str(base), "--engram-dir", str(toy_dir(NAME)), "--ids", str(tmp_path / "ids.npy")]
    out = tmp_path / "out.npz"
    mounts = ["--zchain", str(law), "--posttrain", str(third)]
    assert run(["score", *where, *mounts, "-o", str(out), "--json"]) == 0
    said = capsys.readouterr()
    assert "warning: " in said.err and "base.fnv is missing" in said.err
    told = json.loads(said.out)["sidecars"]
    assert told == {
        "zchain": {"name": "law", "fingerprint": mark(law)},
        "posttrain": {"name": "tuned", "fingerprint": mark(third)},
    }
    engine = Engine.open(
        base, engram_dir=toy_dir(NAME), device=opened("fast", "greedy"), zchain=law, posttrain=third, prefill="full"
    )
    with np.load(out) as found:
        assert np.array_equal(found["logits_TV"], engine.session().sync([int(i) for i in ids], logits="all"))
    engine.close()
    (law / "gr_L00.bin").write_bytes(b"")
    assert run(["generate", *where, "--zchain", str(law), "-n", "2"]) == 1
    assert "gr_L00.bin" in capsys.readouterr().err


def test_settings_of_the_server(tmp_path: Path) -> None:
    (tmp_path / "ds4.toml").write_text('model = "a"\nzchain = "law"\nposttrain = "tuned"\n')
    args = parse(["--dir", str(tmp_path), "--zchain", "medicine"])
    assert (args.zchain, args.posttrain) == ("medicine", "tuned")
    assert (parse(["-m", "a"]).zchain, parse(["-m", "a"]).posttrain) == (None, None)


def test_a_server_looks_at_sidecars_before_listening(law: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds4.cli.serve.make_server", lambda *_: pytest.fail("the server was made"))
    (law / "rb_L02.bin").write_bytes(b"")
    with pytest.raises(FileFormatError, match=r"rb_L02\.bin"):
        run_server(["-m", str(base), "--engram-dir", str(toy_dir(NAME)), "--port", "0", "--zchain", str(law)])


def test_a_server_tells_what_is_mounted(law: Path, base: Path) -> None:
    """In /health and in the model's card; null where nothing is."""
    device = opened("fast", "greedy")
    for zchain in (law, None):
        engine = Engine.open(base, engram_dir=toy_dir(NAME), device=device, zchain=zchain)
        want = {"zchain": zchain and {"name": "law", "fingerprint": mark(law)}, "posttrain": None}
        with serve(engine) as server:  # type: ignore[arg-type]
            assert server.get("/health").json()["sidecars"] == want
            (card,) = server.get("/v1/models").json()["data"]
            assert card["sidecars"] == want and card["id"] == engine.name
            assert server.get(f"/v1/models/{engine.name}").json() == card
