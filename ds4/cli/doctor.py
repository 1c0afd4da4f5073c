"""`ds4 doctor`: what is wrong with this machine, the files and the port, each finding with its fix.

Every check stands alone: one that fails says so and the others go on. Without -m only the machine is looked at.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from ds4.cli.estimate import estimate_of, told
from ds4.cli.model_flags import add_model_flags, at_least_1, base_of, progress_bar
from ds4.cli.probes import (
    Findings,
    cache_probe,
    disk_probe,
    driver_probe,
    engram_probe,
    file_probe,
    kernel_probe,
    port_probe,
    tokenizer_probe,
)
from ds4.errors import Ds4Error, UsageError

if TYPE_CHECKING:
    from ds4.base.reader import Base
    from ds4.device import Device

# what to do about an error that a start would meet there too; the error itself names the file or setting
FIXES = {
    "cache": "set DS4_CACHE to a folder of your own on a disk with room",
    "driver": "install NVIDIA's driver (release 580 or newer), or a C++ compiler and set DS4_DRIVER=simt",
    "kernels": "remove the build cache and try again; without a GPU a C++20 compiler is needed (apt-get install g++)",
    "base": "fetch or make the base again, or name the right files with -m and --engram-dir",
    "whole file": "fetch or make the base again",
    "tokenizer": "fetch or make the base again",
    "sidecars": "solve the folder again on this base, or leave the flag out",
    "engram": "fetch the shard again, or name the right folder with --engram-dir",
    "disk": "check the disk that the files lie on (smartctl, dmesg)",
    "memory": "give other flags: the message names them",
    "port": "choose another --host or --port",
}
MARKS = {"ok": "ok", "warning": "warning", "fault": "FAULT"}


@dataclass(frozen=True)
class Finding:
    """What a check found. `level`: "ok", "warning" (works, but not as it should) or "fault" (does not work)."""

    check: str
    level: str
    message: str
    fix: str = ""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = subparsers.add_parser(
        "doctor",
        help="check machine, files and port, and say what to do",
        description="Check driver, kernels, cache, port, and with -m the base, its shards, sidecars, tokenizer, disk "
        "speed and memory. Exit code 1: at least one fault.",
    )
    add_model_flags(p, prefill="replay", drafts=True, optional=True)
    p.add_argument("--context", type=at_least_1, metavar="N", help="tokens a sequence, for the memory")
    p.add_argument("--sessions", type=at_least_1, default=1, metavar="N", help="sequences kept (default 1)")
    p.add_argument("--host", default="127.0.0.1", help="where the server is to listen (default 127.0.0.1)")
    p.add_argument("--port", type=int, default=8000, metavar="N", help="the port that it is to have (default 8000)")
    p.add_argument("--full", action="store_true", help="read the whole base and compare its SHA-256 (minutes)")
    p.add_argument("--json", action="store_true", help="print the findings as JSON")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not 1 <= args.port <= 65535:
        raise UsageError(f"--port {args.port}: must be between 1 and 65535")
    if args.model is None:
        for flag in ("zchain", "posttrain", "engram_dir", "full"):
            if getattr(args, flag):
                raise UsageError(f"--{flag.replace('_', '-')} needs the base that it belongs to: give -m BASE")
    found = []
    for finding in examine(args):
        found.append(finding)
        if not args.json:
            _print(finding)
    faults = sum(f.level == "fault" for f in found)
    if args.json:
        print(json.dumps({"sound": not faults, "findings": [asdict(f) for f in found]}))
    else:
        warnings = sum(f.level == "warning" for f in found)
        print(f"{len(found)} findings, {faults} faults, {warnings} warnings")
    return 1 if faults else 0


def _print(f: Finding) -> None:
    print(f"{MARKS[f.level]:8}{f.check}: {f.message}", flush=True)
    if f.fix:
        print(f"{'':8}fix: {f.fix}", flush=True)


def examine(args: argparse.Namespace) -> Iterator[Finding]:
    """All findings, in the order in which a start would meet them."""
    yield from _checked("cache", cache_probe)
    device: list[Device] = []
    yield from _checked("driver", lambda: driver_probe(device))
    if device:
        yield from _checked("kernels", lambda: kernel_probe(device[0]))
    if args.model is not None:
        base: list[Base] = []
        yield from _checked("base", lambda: file_probe(base_of(args), base))
        if base:
            yield from _with_base(args, base[0], device)
    yield from _checked("port", lambda: port_probe(args.host, args.port))


def _with_base(args: argparse.Namespace, base: Base, device: list[Device]) -> Iterator[Finding]:
    if args.full:
        yield from _checked("whole file", lambda: _whole(args))
    yield from _checked("tokenizer", lambda: tokenizer_probe(base))
    if args.zchain is not None or args.posttrain is not None:
        yield from _checked("sidecars", lambda: _sidecars(args, base))
    yield from _checked("engram", lambda: engram_probe(base))
    yield from _checked("disk", lambda: disk_probe(base))
    if device:
        yield from _checked("memory", lambda: _memory(args, device[0]))


def _checked(check: str, probe: Callable[[], Findings]) -> Iterator[Finding]:
    """The findings of a probe; an error of ours is one too."""
    try:
        with _status(check):
            found = list(probe())
    except Ds4Error as e:
        yield Finding(check, "fault", str(e), FIXES[check])
        return
    except OSError as e:
        yield Finding(check, "fault", f"{e.filename or check}: {e.strerror or e}", FIXES[check])
        return
    for level, message, fix in found:
        yield Finding(check, level, message, fix)


@contextlib.contextmanager
def _status(check: str) -> Iterator[None]:
    """What is being looked at, on a terminal's stderr; --full has a bar of its own."""
    if not sys.stderr.isatty() or check == "whole file":
        yield
        return
    with Console(stderr=True).status(f"{check} ..."):
        yield


def _whole(args: argparse.Namespace) -> Findings:
    from ds4.base.verify import fingerprint, verify
    from ds4.cli.probes import published_sum

    with progress_bar("reading the base") as bar:
        step = (lambda _name, done, total: bar(done, total)) if bar else None
        problems = verify(args.model, args.engram_dir, step)
    for line in problems:
        yield "fault", line, "fetch or make the base again: its values are damaged"
    mark, (wanted, where) = fingerprint(args.model), published_sum(args.model) or (None, "")
    if wanted is not None and mark != wanted:
        yield "fault", f"SHA-256 {mark}, {where} beside it says {wanted}", "fetch the base again"
    elif not problems:
        yield "ok", f"every value is sound; SHA-256 {mark}{'' if wanted is None else f', as {where} says'}", ""


def _sidecars(args: argparse.Namespace, base: Base) -> Findings:
    from ds4.engine.mount import Mounted
    from ds4.posttrain.nights import resolve

    mounted = Mounted.open(base.config, args.zchain, None if args.posttrain is None else resolve(args.posttrain))
    for warning in mounted.warnings:
        yield "warning", warning, "check that the folder is the one that you meant"
    names = [f"{key} {one['name']}" for key, one in mounted.describe().items() if one is not None]
    if names:
        yield "ok", f"whole and this model's: {', '.join(names)}", ""


def _memory(args: argparse.Namespace, device: Device) -> Findings:
    found = told(args, estimate_of(args, device), device)
    for problem in found["problems"]:
        text, _, fix = problem.partition(": ")
        yield "fault", text, fix
    if found["fits"]:
        there = (
            "nobody can say how many are" if found["available"] is None else f"{found['available'] >> 20:,} MB are"
        )
        many = f"{found['sessions']} sequence{'s' * (found['sessions'] != 1)} of {found['context']:,} tokens"
        yield "ok", f"{found['peak'] >> 20:,} MB are needed for {many}, {there} available", ""
