"""install.sh --domain: what is offered, copied, refused, mounted, and told."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from ds4.cli import install, service
from ds4.cli.domain import NONE, SHIPPED, Choice, as_before, mounted, shipped
from ds4.cli.home import Home
from ds4.cli.main import run as ds4
from ds4.errors import CapacityError, Ds4Error, FileFormatError, UsageError
from ds4.model.config import ModelConfig
from ds4.sidecar.fingerprint import format_fingerprint, sidecar_fingerprint
from tests.base.toys import toy_base
from tests.install.test_install import CHECKPOINT, free_port, run
from tests.reference_sidecar import write_sidecar

CONFIG = ModelConfig.load(CHECKPOINT)


def make(folder: Path, seed: int, **more: object) -> Path:
    """A sidecar with a manifest, as a solver leaves them; `more` stands in it too."""
    write_sidecar(folder, CONFIG, seed)
    files = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}
    (folder / "manifest.json").write_text(json.dumps({"layers": [{"files": files}], **more}))
    return folder


@pytest.fixture
def there(tmp_path: Path) -> Path:
    (tmp_path / "sidecars").mkdir()
    make(tmp_path / "sidecars" / "law", 1)
    make(tmp_path / "sidecars" / "code", 2)
    (tmp_path / "sidecars" / "README.md").write_text("no domain")
    (tmp_path / "sidecars" / "half.part").mkdir()
    return tmp_path / "sidecars"


def test_what_is_offered(there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shipped(there) == ("code", "law")
    assert Choice.of("law", there) == Choice("law", there / "law", own=False)
    assert Choice.of(NONE, there) == Choice(NONE, None, own=False)
    with pytest.raises(UsageError, match=r"--domain poetry: is unknown; there are code, law, none, or the path"):
        Choice.of("poetry", there)
    with pytest.raises(UsageError, match="has no sidecars, none"):
        Choice.of("law", tmp_path)
    with pytest.raises(UsageError, match="no such folder"):
        Choice.of("./law", there)
    monkeypatch.chdir(tmp_path)
    mine = make(tmp_path / "law", 3)
    assert Choice.of("law", there).folder == there / "law"  # a name comes first
    assert Choice.of("./law", there) == Choice("law", mine, own=True)


def test_a_copy_that_outlives_the_checkout(there: Path, tmp_path: Path) -> None:
    home = Home(tmp_path / "d")
    home.make()
    copy = Choice.of("law", there).install(home)
    assert copy is not None and copy.name == "law" and copy.parent.parent == home.sidecars
    assert {p.name: p.read_bytes() for p in copy.iterdir()} == {
        p.name: p.read_bytes() for p in (there / "law").iterdir()
    }
    before = copy.stat().st_mtime_ns
    assert Choice.of("law", there).install(home) == copy and copy.stat().st_mtime_ns == before
    settings: dict[str, Any] = {"zchain": str(copy)}
    assert mounted(settings) == "law" and mounted({}) == NONE
    shutil.rmtree(there / "law")
    make(there / "law", 9)  # a newer checkout
    newer = as_before(home, settings, there).install(home)
    assert newer not in (None, copy) and newer is not None and newer.name == "law"
    shutil.rmtree(there / "law")  # or one that has it no more: the copy goes on
    assert as_before(home, settings, there) == Choice("law", copy, own=True)
    assert as_before(home, {}, there).folder is None
    with pytest.raises(UsageError, match="zchain is 7"):
        as_before(home, {"zchain": 7}, there)


def test_a_damaged_one_is_named(there: Path, tmp_path: Path) -> None:
    gains = there / "law" / "gr_L03.bin"
    whole = gains.read_bytes()
    gains.write_bytes(whole[:-1] + b"\x00")
    with pytest.raises(FileFormatError, match=r"gr_L03\.bin: is not the file that manifest\.json lists"):
        Choice.of("law", there)
    gains.unlink()
    with pytest.raises(FileFormatError, match=r"gr_L03\.bin: the file is missing"):
        Choice.of("law", there)
    gains.write_bytes(whole)
    (there / "law" / "gr_L01.bin").write_bytes(whole)
    with pytest.raises(FileFormatError, match=r"gr_L01\.bin: manifest\.json does not list it"):
        Choice.of("law", there)
    for text in ("{", "[]", '{"layers": [{}]}'):
        (there / "law" / "manifest.json").write_text(text)
        with pytest.raises(FileFormatError, match=r"manifest\.json: is no manifest"):
            Choice.of("law", there)


def test_a_full_disk_leaves_nothing(there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path / "d")
    home.make()
    chosen = Choice.of("law", there)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ds4.cli.domain.os.fsync", full)
    with pytest.raises(CapacityError, match="the disk is full"):
        chosen.install(home)
    assert os.listdir(home.sidecars) == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--domain", "poetry"], f"--domain poetry: is unknown; there are .*{NONE}"),
        (["--domain", ""], "--domain is empty"),
        (["--domain", "/no/such/folder"], "no such folder"),
        (["start", "--domain", "poetry"], "is unknown"),
        (["start", "--domain", "none"], "nothing is installed"),
        (["stop", "--domain", "none"], "--domain belongs to the installation and to start"),
        (["status", "--domain", "none"], "--domain belongs to the installation and to start"),
    ],
)
def test_usage(tmp_path: Path, flags: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        install.run([*flags, "--dir", str(tmp_path / "d")])
    assert not (tmp_path / "d").exists()


def test_an_unknown_domain_ends_with_2(tmp_path: Path) -> None:
    done = run(tmp_path / "d", "--domain", "poetry")
    assert done.returncode == 2 and all(name in done.stderr for name in (*shipped(), NONE))


@pytest.fixture
def installed(tmp_path: Path) -> Home:
    home = Home(tmp_path / "d")
    home.make()
    home.link_venv(Path(sys.prefix))
    base = str(toy_base("oracle-a", bits=6))
    home.save_settings({"model": base, "engram_dir": str(CHECKPOINT), "port": free_port()})
    return home


def test_a_sidecar_of_another_model_is_refused(installed: Home, tmp_path: Path) -> None:
    """Of other dimensions, or of a model that only its manifest tells apart; the settings stay as they were."""
    before = installed.settings()
    for folder, said in (
        (make(tmp_path / "other", 1, model="0123456789abcdef"), "solved for model 0123456789abcdef"),
        (tmp_path / "wide", "gr_L00.bin"),
    ):
        if not folder.exists():
            folder.mkdir()
            (folder / "gr_L00.bin").write_bytes(b"\x08\0\0\0\x20\0\0\0\x01\0\0\0" + b"\0\0\x80\x3f" * 256)
        with pytest.raises(Ds4Error, match="cannot mount this sidecar(.|\n)*" + said):
            install.choose(installed, str(folder))
        assert installed.settings() == before


def test_a_model_that_cannot_mount_what_was_chosen_before(installed: Home, tmp_path: Path) -> None:
    """Another --model on a later run: it says so, and --domain none goes on."""
    folder = make(tmp_path / "mine", 1, model="0123456789abcdef")
    flags = ["--dir", str(installed.root), "--venv", sys.prefix, "--no-start"]
    installed.save_settings(installed.settings() | {"zchain": str(folder)})
    with pytest.raises(Ds4Error, match=r"--domain mine: .*cannot mount"):
        install.run(flags)
    assert install.run([*flags, "--domain", "none"]) == 0
    assert "zchain" not in installed.settings()


def told(home: Home, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{home.settings()['port']}{path}", timeout=60) as answer:
        return json.load(answer)


def test_from_one_domain_to_another(installed: Home, tmp_path: Path) -> None:
    """As the guide says it: start with one, stop and start with another, back to none; told on every way."""
    home = installed
    law, code = make(tmp_path / "law", 1), make(tmp_path / "code", 2)
    try:
        for flags, name, folder in (
            (["--domain", str(law)], "law", law),
            ([], "law", law),  # a restart keeps it
            (["--domain", f"{code}/"], "code", code),
            (["--domain", "none"], NONE, None),
        ):
            done = run(home.root, "start", *flags)
            assert done.returncode == 0 and f"domain {name}," in done.stdout, done.stdout + done.stderr
            mark = None if folder is None else format_fingerprint(*sidecar_fingerprint(folder, 43)).strip()
            want = None if folder is None else {"name": name, "fingerprint": mark}
            assert told(home, "/health")["sidecars"]["zchain"] == want
            assert told(home, "/v1/models")["data"][0]["sidecars"]["zchain"] == want
            now = service.status(home)
            assert (now.domain, json.loads(now.json())["domain"]) == (name, name)
            if name == "law":
                assert run(home.root, "stop").stdout == "stopped\n"
                assert service.status(home).state == "stopped"
    finally:
        run(home.root, "stop")


@pytest.mark.long
@pytest.mark.skipif(not shipped(), reason="no sidecars in this checkout")
def test_a_shipped_domain_and_an_answer(tmp_path: Path) -> None:
    """`install.sh --domain` on the embedded model; the copy is what is served."""
    home, port, name = Home(tmp_path / "d"), free_port(), shipped()[0]
    try:
        done = run(home.root, "--venv", sys.prefix, "--port", str(port), "--domain", name, timeout=1500)
        assert done.returncode == 0, done.stdout + done.stderr
        assert told(home, "/health")["sidecars"]["zchain"]["name"] == name
        folder = Path(home.settings()["zchain"])
        assert folder.parent.parent == home.sidecars
        assert ds4(["sidecar", "show", str(folder)]) == 0 and ds4(["sidecar", "show", str(SHIPPED / name)]) == 0
    finally:
        run(home.root, "stop")
