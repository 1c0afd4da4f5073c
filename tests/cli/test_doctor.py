"""`ds4 doctor`: what is sound is called so, and every fault is found, named and comes with its fix."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4 import embedded
from ds4.base.reader import Base
from ds4.cli import probes
from ds4.cli.embedded_base import embedded_base
from ds4.cli.main import run
from ds4.errors import DeviceError
from ds4.model.tokenizer import Tokenizer
from tests.cli.commands import refused
from tests.conftest import opened
from tests.server.standin import StandIn, ids_of, serve

SIDECARS = Path(__file__).resolve().parents[2] / "sidecars"
Finding = dict[str, str]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    opened("fast", "greedy")
    monkeypatch.setattr(probes, "PROBE_S", 0.05)


@pytest.fixture
def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """A base and its shards that tests may break, if they mend them."""
    folder = tmp_path_factory.mktemp("model")
    base = Path(shutil.copy(embedded_base(), folder))
    tables = [Base.open(embedded_base(), embedded.checkpoint()).engram_table(g).path for g in range(2)]
    return base, [Path(shutil.copy(t, folder)) for t in tables]


@pytest.fixture
def mended(copied: tuple[Path, list[Path]]) -> Iterator[tuple[Path, list[Path]]]:
    base, shards = copied
    kept = {p: p.read_bytes() for p in (base, *shards)}
    yield base, shards
    for path, data in kept.items():
        path.write_bytes(data)


def examined(capsys: pytest.CaptureFixture[str], code: int, *argv: object) -> list[Finding]:
    assert run(["doctor", "--json", *(str(a) for a in argv)]) == code
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert told["sound"] is (code == 0)
    for f in told["findings"]:
        assert f["level"] in ("ok", "warning", "fault") and f["message"]
        assert bool(f["fix"]) is (f["level"] != "ok") and "\n" not in f["fix"], f
    return list(told["findings"])


def of(found: list[Finding], check: str, level: str) -> str:
    """The message and fix of the one finding of that check and level."""
    (f,) = [f for f in found if (f["check"], f["level"]) == (check, level)]
    return f"{f['message']} | {f['fix']}"


def test_a_sound_model(capsys: pytest.CaptureFixture[str], copied: tuple[Path, list[Path]], free_port: int) -> None:
    base, shards = copied
    argv = ["-m", base, "--port", free_port, "--context", 512, "--zchain", SIDECARS / "code", "--full"]
    found = examined(capsys, 0, *argv)
    checks = ["cache", "driver", "kernels", "base", "whole file", "tokenizer", "sidecars", "engram", "disk", "memory"]
    assert list(dict.fromkeys(f["check"] for f in found)) == [*checks, "port"]
    assert "CPU driver plays the device" in of(found, "driver", "warning")
    assert "right numbers" in of(found, "kernels", "ok")
    assert [f["level"] for f in found if f["check"] == "engram"] == ["ok"] * len(shards)
    assert "zchain code" in of(found, "sidecars", "ok")
    assert "512 tokens" in of(found, "memory", "ok")
    assert "is free" in of(found, "port", "ok")
    assert run(["doctor", "-m", str(base), "--port", str(free_port), "--context", "512"]) == 0
    out = capsys.readouterr().out
    assert "ok      base: " in out and "fix: " in out and " 0 faults, 1 warnings" in out


def test_without_a_model_only_the_machine(capsys: pytest.CaptureFixture[str], free_port: int) -> None:
    found = examined(capsys, 0, "--port", free_port)
    assert [f["check"] for f in found] == ["cache", "driver", "kernels", "port"]


def test_a_shard_that_is_cut_or_gone(
    capsys: pytest.CaptureFixture[str], mended: tuple[Path, list[Path]], free_port: int
) -> None:
    base, shards = mended
    shards[1].write_bytes(shards[1].read_bytes()[:-5])
    cut = of(examined(capsys, 1, "-m", base, "--port", free_port), "base", "fault")
    assert shards[1].name in cut and "--engram-dir" in cut
    shards[1].unlink()
    found = examined(capsys, 1, "-m", base, "--port", free_port)
    assert f"{shards[1].name} is not in" in of(found, "base", "fault")
    assert of(found, "port", "ok"), "the other checks go on"


def test_a_row_of_nan(capsys: pytest.CaptureFixture[str], mended: tuple[Path, list[Path]], free_port: int) -> None:
    base, shards = mended
    table = Base.open(base).engram_table(0)
    data = np.frombuffer(shards[0].read_bytes(), np.uint8).copy()
    data[table.weight_offset + 3] = 0x7F
    shards[0].write_bytes(data.tobytes())
    said = of(examined(capsys, 1, "-m", base, "--port", free_port, "--context", 512), "engram", "fault")
    assert "row 0 holds NaN" in said and "fetch the shard again" in said


def test_full_reads_values_and_the_published_sum(
    capsys: pytest.CaptureFixture[str], mended: tuple[Path, list[Path]], free_port: int
) -> None:
    base, _ = mended
    sums = base.with_name("SHA256SUMS")
    try:
        sums.write_text(f"{'0' * 64}  {base.name}\n")
        argv = ["-m", base, "--port", free_port, "--context", 512]
        assert examined(capsys, 0, *argv), "headers alone do not tell"
        assert f"SHA256SUMS beside it says {'0' * 64}" in of(
            examined(capsys, 1, *argv, "--full"), "whole file", "fault"
        )
    finally:
        sums.unlink()


def test_another_models_sidecar(
    capsys: pytest.CaptureFixture[str], copied: tuple[Path, list[Path]], free_port: int, tmp_path: Path
) -> None:
    (tmp_path / "gr_L00.bin").write_bytes(b"no sidecar")
    argv = ["-m", copied[0], "--port", free_port, "--context", 512, "--zchain", tmp_path]
    found = examined(capsys, 1, *argv)
    said = [f["message"] for f in found if f["level"] == "fault" and f["check"] == "sidecars"]
    assert len(said) == 1 and "gr_L00.bin" in said[0]


def test_no_room_for_it(capsys: pytest.CaptureFixture[str], copied: tuple[Path, list[Path]], free_port: int) -> None:
    argv = ["-m", copied[0], "--port", free_port, "--context", 512, "--mem-budget-mb", 1]
    assert "raise it" in of(examined(capsys, 1, *argv), "memory", "fault")


def test_a_slow_disk_is_a_warning(
    capsys: pytest.CaptureFixture[str], copied: tuple[Path, list[Path]], free_port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(probes, "SLOW_TOKENS_S", 1e12)
    found = examined(capsys, 0, "-m", copied[0], "--port", free_port, "--context", 512)
    assert "NVMe" in of(found, "disk", "warning")


def test_a_tokenizer_that_loses_text(
    capsys: pytest.CaptureFixture[str], copied: tuple[Path, list[Path]], free_port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    decode = Tokenizer.decode
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids: decode(self, ids).replace("\ufffd", "?"))
    found = examined(capsys, 1, "-m", copied[0], "--port", free_port, "--context", 512)
    assert "another model's tokenizer" in of(found, "tokenizer", "fault")


def test_a_cache_that_others_can_write(
    capsys: pytest.CaptureFixture[str], free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_to_all = tmp_path / "cache"
    open_to_all.mkdir(mode=0o700)
    open_to_all.chmod(0o777)
    monkeypatch.setenv("DS4_CACHE", str(open_to_all))
    found = examined(capsys, 1, "--port", free_port)
    assert "chmod 700" in of(found, "cache", "fault")


def test_no_device_and_a_device_that_is_wrong(
    capsys: pytest.CaptureFixture[str], free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("ds4.engine.ops.norm.rms_norm", lambda *_: None)  # y stays zero
        assert "numbers are off" in of(examined(capsys, 1, "--port", free_port), "kernels", "fault")

    def no_device(**_: object) -> None:
        raise DeviceError("NVIDIA's driver does not work here")

    monkeypatch.setattr("ds4.device.Device.open", no_device)
    found = examined(capsys, 1, "--port", free_port)
    assert "DS4_DRIVER=simt" in of(found, "driver", "fault")
    assert [f["check"] for f in found] == ["cache", "driver", "port"]


def test_who_is_on_the_port(capsys: pytest.CaptureFixture[str]) -> None:
    with serve(StandIn(ids_of("ok"))) as server:
        port = server.url.rsplit(":", 1)[1]
        assert "a ds4 server with" in of(examined(capsys, 0, "--port", port), "port", "ok")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        other.settimeout(0.1)
        taken = other.getsockname()[1]
        probes_wait = probes.ANSWER_S
        probes.ANSWER_S = 0.3
        try:
            said = of(examined(capsys, 1, "--port", taken), "port", "fault")
        finally:
            probes.ANSWER_S = probes_wait
        assert "no ds4 server" in said and "another --port" in said


def test_what_it_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--zchain needs the base" in refused(capsys, 2, "doctor", "--zchain", "x")
    assert "--full needs the base" in refused(capsys, 2, "doctor", "--full")
    assert "between 1 and 65535" in refused(capsys, 2, "doctor", "--port", 0)
