"""The build cache: private, verified, published whole, one build for two processes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ds4.device.build import Builder, Unit, defines_of
from ds4.device.cache import Cache
from ds4.errors import BuildError, DeviceError

KEY = "ab" * 32


def write(text: str, calls: list[str]) -> object:
    def build(out: Path) -> None:
        calls.append(text)
        (out / "file").write_text(text)

    return build


def test_an_entry_is_built_once_and_private(tmp_path: Path) -> None:
    calls: list[str] = []
    cache = Cache(tmp_path / "c")
    first = cache.get("host", KEY, write("one", calls))
    second = Cache(tmp_path / "c").get("host", KEY, write("two", calls))
    assert first == second and (second / "file").read_text() == "one" and calls == ["one"]
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o700
    assert [p.name for p in (tmp_path / "c").iterdir() if p.name.startswith("tmp")] == []


@pytest.mark.parametrize("damage", ["content", "gone", "manifest", "cut"])
def test_a_damaged_entry_is_built_again(tmp_path: Path, damage: str) -> None:
    calls: list[str] = []
    cache = Cache(tmp_path / "c")
    entry = cache.get("host", KEY, write("one", calls))
    if damage == "content":
        (entry / "file").write_text("One")
    elif damage == "gone":
        (entry / "file").unlink()
    else:
        text = (entry / "entry.json").read_text()
        (entry / "entry.json").write_text("{}" if damage == "manifest" else text[: len(text) // 2])
    again = cache.get("host", KEY, write("two", calls))
    assert (again / "file").read_text() == "two" and calls == ["one", "two"]


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def build(out: Path) -> None:
        (out / "file").write_text("half")
        raise BuildError("no")

    with pytest.raises(BuildError, match=r"^no$"):
        Cache(tmp_path / "c").get("host", KEY, build)
    assert [p for p in (tmp_path / "c").rglob("*") if p.is_file() and p.parent.name != "locks"] == []


def test_a_cache_open_to_others_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "c"
    root.mkdir()
    root.chmod(0o755)
    with pytest.raises(DeviceError, match="chmod 700"):
        Cache(root)


def test_a_cache_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "c"
    root.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: root.stat().st_uid + 1)
    with pytest.raises(DeviceError, match="belongs to user"):
        Cache(root)


def test_an_unwritable_cache_is_named(tmp_path: Path) -> None:
    """A path below a file can be made by nobody, not even root."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DeviceError, match=r"file/cache.*set DS4_CACHE"):
        Cache(tmp_path / "file" / "cache")


def tiny_sources(where: Path) -> Path:
    (where / "lib").mkdir(parents=True)
    (where / "common.cuh").write_text('#pragma once\n#include "lib/add.cuh"\n')
    (where / "lib" / "add.cuh").write_text("inline int add(int a, int b) { return a + b; }\n")
    (where / "k.cu").write_text('#include "common.cuh"\nextern "C" int k(int a) { return add(a, WIDTH); }\n')
    (where / "g.cu").write_text('extern "C" __global__ void g(int* p) { p[0] = 1; }\n')
    return where


UNIT = Unit("k.cu", defines_of({"WIDTH": 3}))
KERNEL_UNIT = Unit("g.cu")


def test_two_processes_build_at_once(tmp_path: Path) -> None:
    """Both get the same entry, whole; a compiler that writes its pid beside shows that it ran once."""
    sources = tiny_sources(tmp_path / "cuda")
    compiler = tmp_path / "slow++"
    log = tmp_path / "runs"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *--version*) echo slow 1;; *) echo $$ >> {log}; g++ "$@";; esac\n')
    compiler.chmod(0o755)
    code = (
        "import sys, ctypes; from pathlib import Path; from ds4.device.build import Builder, Unit\n"
        "sys.stdin.readline()\n"
        f"so = Builder(Path({str(sources)!r}), Path({str(tmp_path / 'c')!r}), {str(compiler)!r})"
        ".host(Unit('k.cu', (('WIDTH', '3'),)), 'fast')\n"
        "print(so, ctypes.CDLL(str(so)).k(4))"
    )
    workers = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for w in workers:  # both are waiting at their line: start them together
        assert w.stdin is not None
        w.stdin.write("go\n")
        w.stdin.flush()
    outputs = [w.communicate(timeout=120)[0].split() for w in workers]
    assert [w.returncode for w in workers] == [0, 0]
    assert outputs[0] == outputs[1] and outputs[0][1] == "7"
    assert len(log.read_text().split()) == 1


def test_the_key_covers_everything_that_changes_the_binary(tmp_path: Path) -> None:
    sources = tiny_sources(tmp_path / "cuda")
    cache = tmp_path / "c"
    seen = {Builder(sources, cache).host(UNIT, "fast")}
    seen.add(Builder(sources, cache).host(UNIT, "check"))
    seen.add(Builder(sources, cache).host(Unit("k.cu", defines_of({"WIDTH": 4})), "fast"))
    (sources / "lib" / "add.cuh").write_text(
        "inline int add(int a, int b) { return b + a; }\n"
    )  # an include of an include
    seen.add(Builder(sources, cache).host(UNIT, "fast"))
    assert len(seen) == 4
    assert Builder(sources, cache).host(UNIT, "fast") in seen


def test_a_damaged_binary_is_built_again_before_it_is_loaded(tmp_path: Path) -> None:
    sources = tiny_sources(tmp_path / "cuda")
    path = Builder(sources, tmp_path / "c").host(UNIT, "fast")
    good = path.read_bytes()
    path.write_bytes(good[:-100] + bytes(100))
    again = Builder(sources, tmp_path / "c").host(UNIT, "fast")
    assert again == path and again.read_bytes() == good
    cubin, _ = Builder(sources, tmp_path / "c").gpu(KERNEL_UNIT, "sm_121")
    entry = next((tmp_path / "c" / "gpu").iterdir())
    (entry / "module.cubin").write_bytes(cubin[:-1] + b"x")
    assert Builder(sources, tmp_path / "c").gpu(KERNEL_UNIT, "sm_121")[0] == cubin


def test_a_compile_error_shows_the_compilers_words(tmp_path: Path) -> None:
    sources = tiny_sources(tmp_path / "cuda")
    (sources / "k.cu").write_text("int k( { }\n")
    with pytest.raises(BuildError, match=r"(?s)k\.cu does not compile.*error"):
        Builder(sources, tmp_path / "c").host(UNIT, "fast")
    with pytest.raises(BuildError, match=r"(?s)k\.cu does not compile for sm_121.*error"):
        Builder(sources, tmp_path / "c").gpu(UNIT, "sm_121")


def test_a_missing_include_is_named(tmp_path: Path) -> None:
    sources = tiny_sources(tmp_path / "cuda")
    (sources / "lib" / "add.cuh").unlink()
    with pytest.raises(BuildError, match=r"add\.cuh.*wanted by common\.cuh"):
        Builder(sources, tmp_path / "c").host(UNIT, "fast")


def test_no_compiler_says_how_to_get_one(tmp_path: Path) -> None:
    sources = tiny_sources(tmp_path / "cuda")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler.*apt-get install g\+\+.*DS4_CXX"):
        Builder(sources, tmp_path / "c", "no-such-compiler").host(UNIT, "fast")
