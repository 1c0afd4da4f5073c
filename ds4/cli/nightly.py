"""`ds4 nightly`: post-training every night; what happened, and how it is taken back."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Mapping
from dataclasses import fields
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from ds4 import embedded
from ds4.cli.embedded_base import embedded_base
from ds4.cli.model_flags import add_model_flags, progress_bar
from ds4.corpus.domain import Domain
from ds4.errors import Ds4Error, UsageError
from ds4.posttrain.borrow import Server
from ds4.posttrain.log import days, existing_folder, parse_day
from ds4.settings import config_dirs, device_settings, read_config, user_units
from rulers.endings import PROMPTS, load_prompts
from solvers.nightly import timer
from solvers.nightly.carry_method import CarryOver
from solvers.nightly.gates import Thresholds
from solvers.nightly.home import NONE, Home
from solvers.nightly.job import run_night
from solvers.nightly.method import BEST, METHODS, Solver
from solvers.nightly.methods import Margins, Refit
from solvers.nightly.night import Night, Options, RulerText
from solvers.nightly.server import Neighbour
from solvers.refit import LAYERS

DAYS, WAIT_S, GENERAL, AT = 14, 3600.0, "general", "03:30"
RULER_TOKENS, RULER_LENGTH, ANSWER_LIMIT = 4096, 512, 2048
# of flags, which are all None until `settle`: what was given, and what the file says, must be told apart
DEFAULTS: dict[str, Any] = {
    "days": DAYS, "method": BEST, "layers": "all", "ruler_tokens": RULER_TOKENS, "ruler_length": RULER_LENGTH,
    "answer_limit": ANSWER_LIMIT, "wait": WAIT_S, "workers": 1, "activations": "bf16", "kv": "fp4",
    "prefill": "replay", "index_keys": "owner", "chunk": 512, "no_graph": False,
}  # fmt: skip
NUMBER = (int, float)
SIGHUP = "a running server has it after SIGHUP, or at once where it is named (--server, --admin-key)"
# what [nightly] of ds4.toml may set
KNOWN: dict[str, type | tuple[type, ...]] = {
    "log": str, "home": str, "days": int, "model": str, "engram_dir": str, "zchain": str, "teacher": str,
    "method": str, "layers": str, "domain": str, "ruler_tokens": int, "ruler_length": int, "prompts": str,
    "answer_limit": int, "server": str, "admin_key": str, "wait": NUMBER, "mem_budget_mb": int, "workers": int,
    "activations": str, "kv": str, "prefill": str, "index_keys": str, "chunk": int, "no_graph": bool,
    **{f"gate_{f.name}": NUMBER for f in fields(Thresholds)},
}  # fmt: skip


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = subparsers.add_parser(
        "nightly",
        help="post-training every night",
        description="Solve a post-training folder on the day's own requests, gate it, mount it, take it back "
        "(docs/nightly.md).",
    )
    below = p.add_subparsers(dest="nightly_command", metavar="WHAT", required=True)
    _add_run(below)
    i = below.add_parser("init", help="make the folder of the nights", description="Make the folder of the nights, "
        "which mounts nothing yet: a server can have it as --posttrain before the first night.")  # fmt: skip
    _home(i, as_json=False)
    i.set_defaults(run=_init)
    s = below.add_parser("status", help="what is mounted, last night, who is at work", description="What is mounted, "
        "how the last night ended, who is at work, and when the timer runs next.")  # fmt: skip
    _home(s)
    s.set_defaults(run=_status)
    h = below.add_parser("history", help="what happened, night by night", description="Every event, oldest first.")
    _home(h)
    h.add_argument("--last", type=int, metavar="N", help="the last N events")
    h.set_defaults(run=_history)
    _add_rollback(below)
    _add_install(below)


def _home(p: argparse.ArgumentParser, as_json: bool = True) -> None:
    p.add_argument("--home", required=True, metavar="NIGHTLY", help="the folder of the nights")
    if as_json:
        p.add_argument("--json", action="store_true", help="print it as JSON")


def _add_run(below: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = below.add_parser(
        "run",
        help="one night, now",
        description="One night: corrections into points, solves, a real forward, gates; what passes is mounted. Goes "
        "on where a killed run of the same night stopped.",
        epilog="Exit code 0: accepted, or nothing to do; 1: rejected or failed, and what was mounted stays. Flags "
        "may stand in the table [nightly] of ds4.toml, under the same names (in --dir, then in ~/.config/ds4); flags "
        "win.",
    )
    _run_flags(p)
    p.add_argument("--json", action="store_true", help="print the outcome as JSON")
    p.set_defaults(run=_run)


def _run_flags(p: argparse.ArgumentParser) -> None:
    p.add_argument("--dir", metavar="D", help="where ds4.toml is looked for first")
    p.add_argument("--log", metavar="DIR", help="the log of ds4-server --log-requests")
    p.add_argument("--home", metavar="NIGHTLY", help="the folder of the nights, made if it is not there")
    p.add_argument("--day", metavar="D", help="the day, 2026-11-30 (default: yesterday)")
    p.add_argument("--days", type=int, metavar="N", help=f"with the days before it, N in all (default {DAYS})")
    p.add_argument(
        "--corrections", action="append", metavar="FILE",
        help="corrections; may be repeated (default: corrections*.jsonl in the log's folder)",
    )  # fmt: skip
    add_model_flags(p, prefill="replay", embedded=True, nightly=True)
    p.add_argument(
        "--teacher", metavar="CKPT",
        help="the original's checkpoint, for refit and rulers (default: none; with the embedded base its own)",
    )  # fmt: skip
    p.add_argument("--method", choices=METHODS, help=f"which solves (default {BEST}: all that there is reason for)")
    p.add_argument("--layers", choices=LAYERS, help="of a refit (default all)")
    p.add_argument(
        "--domain", metavar="NAME", help="whose text a ruler reads beside general text (default: the sidecar's)"
    )
    p.add_argument("--ruler-tokens", type=int, metavar="N", help=f"about N tokens a ruler (default {RULER_TOKENS})")
    p.add_argument("--ruler-length", type=int, metavar="N", help=f"in windows of N tokens (default {RULER_LENGTH})")
    p.add_argument(
        "--prompts", metavar="FILE.jsonl", help='for free answers, {"prompt": TEXT} a line (default: twelve)'
    )
    p.add_argument(
        "--answer-limit", type=int, metavar="N",
        help=f"a free answer of N tokens does not end by itself (default {ANSWER_LIMIT})",
    )  # fmt: skip
    defaults = Thresholds()
    for f, what in zip(
        fields(Thresholds),
        (
            "share of wrong points that must be right", "share of other positions that keep their likeliest token",
            "of predicted with real margins", "standard errors that a ruler may be worse by",
            "standard errors by which fewer answers may end",
        ), strict=True,
    ):  # fmt: skip
        p.add_argument(
            f"--gate-{f.name.replace('_', '-')}", type=float, metavar="X",
            help=f"{what} (default {getattr(defaults, f.name):g})",
        )  # fmt: skip
    _server_flags(p)
    p.add_argument("--wait", type=float, metavar="S", help=f"seconds for memory or a device (default {WAIT_S:g})")
    p.add_argument("--workers", type=int, metavar="N", help="threads of the solves (default 1; the same bytes)")
    p.set_defaults(**dict.fromkeys(DEFAULTS))


def _server_flags(p: argparse.ArgumentParser) -> None:
    p.add_argument("--server", metavar="URL", help="the server that mounts it, http://127.0.0.1:8000")
    p.add_argument("--admin-key", metavar="FILE", help="the file that the server was given as --admin-key")


def _add_rollback(below: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = below.add_parser(
        "rollback",
        help="take the mounted night back",
        description="Mount what was mounted before, a night by its name, or none. Nothing is removed.",
    )
    _home(p)
    p.add_argument("--to", metavar="NAME", help=f"a night, or {NONE} (default: what was mounted before)")
    _server_flags(p)
    p.set_defaults(run=_rollback)


def _add_install(below: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    p = below.add_parser(
        "install",
        help="run every night",
        description="Write a systemd user timer and its service for `ds4 nightly run` with these flags, and start "
        "it; without systemd, print a line for cron.",
    )
    p.add_argument("--at", default=AT, metavar="HH:MM", help=f"time of day (default {AT})")
    how = p.add_mutually_exclusive_group()
    how.add_argument("--print", action="store_true", dest="only_print", help="print the files and the cron line only")
    how.add_argument("--remove", action="store_true", help="stop the timer and remove its files")
    _run_flags(p)
    p.set_defaults(run=_install)


# -- run --


def settle(args: argparse.Namespace) -> None:
    """Flags over [nightly] of ds4.toml over defaults, in place.

    Raises:
        UsageError: the file is wrong, or something that is needed is missing.
    """
    settings = read_config(KNOWN, config_dirs(Path(args.dir) if args.dir else None), section="nightly")
    parser = argparse.ArgumentParser(prog="ds4 nightly run", allow_abbrev=False)
    _run_flags(parser)
    told = parser.parse_args(_as_flags(settings))  # one parser checks both
    for name, value in vars(told).items():
        if getattr(args, name) is None:
            setattr(args, name, DEFAULTS.get(name) if value is None else value)
    for name in ("log", "home"):
        if getattr(args, name) is None:
            raise UsageError(f"--{name} is missing; give it, or put it into [nightly] of ds4.toml")


def _as_flags(values: Mapping[str, object]) -> list[str]:
    out = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        out += [flag] if value is True else [] if value is False else [f"{flag}={value}"]
    return out


def night_of(args: argparse.Namespace) -> tuple[Night, dict[str, Solver]]:
    """What these flags ask for, once `settle` has been over them.

    Raises:
        UsageError: a value that cannot be.
    """
    for name, least in (("days", 1), ("ruler_tokens", 16), ("ruler_length", 16), ("answer_limit", 1), ("workers", 1)):
        if getattr(args, name) < least:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least {least}")
    if not 0 <= args.wait < float("inf"):
        raise UsageError(f"--wait is {args.wait:g}; it is a number of seconds, 0 or more")
    thresholds = Thresholds(
        **{
            f.name: getattr(Thresholds(), f.name) if (value := getattr(args, f"gate_{f.name}")) is None else value
            for f in fields(Thresholds)
        }
    )
    teacher = None if args.teacher is None else Path(args.teacher)
    if args.model is None:
        with progress_bar("making the embedded model's base") as progress:
            args.model = embedded_base(progress)
        args.engram_dir = args.engram_dir or embedded.checkpoint()
        teacher = teacher or embedded.checkpoint()
    base, zchain = Path(args.model), None if args.zchain is None else Path(args.zchain)
    day = date.today() - timedelta(days=1) if args.day is None else parse_day(args.day)
    if day > date.today():
        raise UsageError(f"--day {day}: is still to come")
    texts = [RulerText(GENERAL, args.ruler_tokens, args.ruler_length)]
    domain, no_domain = _domain(args.domain, zchain)
    if domain is not None:
        Domain.open(domain)  # before a night's work
    if domain not in (None, GENERAL):
        texts.append(RulerText(str(domain), args.ruler_tokens, args.ruler_length))
    options = Options(args.activations, args.kv, args.prefill, args.index_keys, args.chunk, not args.no_graph)
    night = Night(
        Path(args.home), Path(args.log), day, base, device_settings().cache, args.days,
        None if args.corrections is None else tuple(Path(f) for f in args.corrections),
        None if args.engram_dir is None else Path(args.engram_dir), zchain, teacher, args.method, tuple(texts),
        no_domain, thresholds, options, PROMPTS if args.prompts is None else tuple(load_prompts(args.prompts)),
        args.answer_limit,
        None if args.mem_budget_mb is None else args.mem_budget_mb << 20, args.wait,
    )  # fmt: skip
    solvers: dict[str, Solver] = {"margins": Margins(args.workers)}
    if teacher is not None:
        domains = tuple(t.domain for t in texts)
        solvers["refit"] = Refit(base, teacher, args.workers, args.layers, beside=domains)
        solvers["carry"] = CarryOver(teacher, device_settings().cache, domains, args.workers)
    return night, solvers


def _domain(given: str | None, zchain: Path | None) -> tuple[str | None, str | None]:
    """Whose text the second ruler reads; else why there is none to read."""
    if given is not None or zchain is None:
        return given, None
    try:
        told = json.loads((zchain / "manifest.json").read_bytes())["domain"]
    except (OSError, ValueError, KeyError, TypeError):
        return None, f"nothing in {zchain.name} says its domain (--domain)"
    if told in embedded.domains():
        return str(told), None
    return None, f"{zchain.name} is of domain {told!r}, whose text nobody knows here (--domain FOLDER)"


def _neighbour(args: argparse.Namespace, wait_s: float) -> Neighbour | None:
    if (args.server is None) != (args.admin_key is None):
        raise UsageError("--server and --admin-key belong together: an address, and the file with the key for it")
    return None if args.server is None else Neighbour(Server(args.server, args.admin_key), wait_s)


def _run(args: argparse.Namespace) -> int:
    settle(args)
    server = _neighbour(args, args.wait)
    night, solvers = night_of(args)
    away = None if server is None else server.check()
    if away is not None:
        _say(f"{away}; the night goes on without it")
    before = signal.signal(signal.SIGTERM, _terminated)  # a borrowed device goes back; what is done is kept
    try:
        outcome = run_night(night, solvers, server, _say, progress_bar)
    finally:
        signal.signal(signal.SIGTERM, before)
    if args.json:
        told = {"event": outcome.event, "name": outcome.name, "reason": outcome.reason or None,
                "report": None if outcome.report is None else str(outcome.report)}  # fmt: skip
        print(json.dumps(told, ensure_ascii=False))
    elif outcome.event == "accepted":
        print(f"{night.day}: accepted and mounted as {outcome.name}\n{outcome.report}")
        if server is None:
            _say(SIGHUP)
    elif outcome.event == "rejected":
        print(f"{night.day}: rejected, {outcome.reason}\n{outcome.report}")
    else:
        print(f"nothing to do: {outcome.reason}")
    if outcome.event == "nothing to do" and args.day is None and (hint := _today(night)):
        _say(hint)
    return outcome.code


def _today(night: Night) -> str:
    """Where a first try on the day itself finds its requests; empty: the day asked for has some, or this one none."""
    today, found = date.today(), days(night.log)
    if today == night.day or night.day in found or today not in found:
        return ""
    return f"{today} has requests already: ds4 nightly run --day {today} takes these"


def _terminated(*_: object) -> None:
    raise KeyboardInterrupt


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# -- the others --


def _init(args: argparse.Namespace) -> int:
    Home.make(args.home)
    print(f"{args.home}: is there; nights go there, and --posttrain takes it")
    return 0


def _status(args: argparse.Namespace) -> int:
    home = Home.open(args.home)
    events, torn = home.history.read()
    last = next((e for e in reversed(events) if e["event"] not in ("reloaded", "given up", "rolled back")), None)
    holder, at = home.holder(), timer.next_run()
    told = {
        "mounted": home.current, "nights": home.names(), "last": last,
        "at_work": None if holder is None else vars(holder), "under_way": home.under_way(), "next": at,
        "history_lines_torn": torn,
    }  # fmt: skip
    if args.json:
        print(json.dumps(told, ensure_ascii=False))
        return 0
    print(f"mounted: {told['mounted'] or 'nothing'}")
    print(f"last night: {'none yet' if last is None else _line(last)}")
    print(f"at work: {holder or 'nobody'}")
    if home.under_way():
        print(f"not finished: {', '.join(home.under_way())}; ds4 nightly run --day goes on with it")
    print(f"next: {at or 'no timer'}")
    return 0


def _history(args: argparse.Namespace) -> int:
    if args.last is not None and args.last < 1:
        raise UsageError(f"--last is {args.last}; it must be at least 1")
    events, torn = Home.open(args.home).history.read()
    events = events[-args.last :] if args.last else events
    if args.json:
        print(json.dumps(events, ensure_ascii=False))
    else:
        for e in events:
            print(_line(e))
        if not events:
            _say("nothing happened yet")
    if torn:
        print(f"warning: {torn} lines of history cannot be read", file=sys.stderr)
    return 0


def _line(e: Mapping[str, Any]) -> str:
    """One event, for people."""
    words = [str(e.get("at", "?")), str(e["event"])]
    if e.get("day"):
        words.append(f"day {e['day']}")
    if "night" in e:
        words.append(f"night {e['night'] or NONE}")
    if e.get("method"):
        words.append(f"({e['method']})")
    if "before" in e:
        words.append(f"before it {e['before'] or NONE}")
    return "  ".join(words) + (f"  {e['reason']}" if e.get("reason") else "")


def _rollback(args: argparse.Namespace) -> int:
    server = _neighbour(args, 0.0)
    home = Home.open(args.home)
    with home.locked("ds4 nightly rollback"):
        was, now = home.rollback(args.to)
    took = None
    if server is not None:
        try:
            took = server.reload()
        except Ds4Error as e:
            raise Ds4Error(f"{now or NONE} is current now, but the server still has {was or NONE}: {e}") from e
    if args.json:
        print(json.dumps({"was": was, "now": now, "server": took}))
    else:
        print(f"mounted: {now or NONE}, before: {was or NONE}" + ("" if took is None else f"; the server has {took}"))
        if server is None:
            _say(SIGHUP)
    return 0


def _install(args: argparse.Namespace) -> int:
    folder = user_units()
    if args.remove:
        gone = timer.remove(folder)
        print("\n".join(f"{path}: removed" for path in gone) or "there is no timer")
        return 0
    given = _given(args)
    settle(args)
    _neighbour(args, args.wait)
    cache = device_settings().cache
    where = () if cache == Path("~/.cache/ds4").expanduser() else ("env", f"DS4_CACHE={cache.absolute()}")
    words = (*where, sys.executable, "-P", "-m", "ds4.cli.entry", "main", "nightly", "run", *given)
    job = timer.Job(words, args.at)
    existing_folder(args.log)
    night_of(args)  # what a run would refuse
    if args.only_print:
        for name, text in job.units().items():
            print(f"# {folder / name}\n{text}")
        print(f"# crontab\n{job.cron()}")
        return 0
    if not timer.works():
        print(job.cron())
        print("no systemd of this user answers here: put this line into your crontab (crontab -e)", file=sys.stderr)
        return 0
    for path in timer.install(job, folder):
        print(f"{path}: written")
    timer.enable()
    print(f"next: {timer.next_run() or '?'}; where nobody is logged in at that time: loginctl enable-linger")
    return 0


_PATHS = ("dir", "log", "home", "model", "engram_dir", "zchain", "teacher", "admin_key", "corrections", "prompts")


def _given(args: argparse.Namespace) -> list[str]:
    """The flags of `run` that were given, with whole paths: a timer starts in another folder."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    _run_flags(parser)
    out: list[str] = []
    for name in vars(parser.parse_args([])):
        value = getattr(args, name)
        if value is None or name == "day":
            continue
        for one in value if isinstance(value, list) else [value]:
            whole = str(Path(one).absolute()) if name in _PATHS or (name == "domain" and Path(one).is_dir()) else one
            out += [f"--{name.replace('_', '-')}", *([] if one is True else [str(whole)])]
    return out
