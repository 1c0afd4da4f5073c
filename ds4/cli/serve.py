"""`ds4-server`: the model behind an HTTP port of this machine.

Flags and ds4.toml have the same names; flags win. The file is looked for in --dir, then in ~/.config/ds4. SIGHUP and
`POST /admin/reload` have the folders of the sidecars looked at again.
"""

from __future__ import annotations

import argparse
import gc
import logging
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ds4 import __version__
from ds4.cli.machine import total_memory
from ds4.cli.main import guarded
from ds4.cli.model_flags import MOST_MB, add_model_flags, engine_of, some_text
from ds4.constrain import Compiler
from ds4.errors import Ds4Error, FileFormatError, UsageError
from ds4.model.tokenizer import RELEASED_SIZE
from ds4.posttrain.admin_key import make_key, read_key
from ds4.posttrain.nights import resolve
from ds4.server.app import make_app
from ds4.server.cors import check_origin
from ds4.server.edge import Connections
from ds4.server.errors import HttpError
from ds4.server.listen import is_loopback, listen, make_server
from ds4.server.logs import FORMATS, log_to_stderr
from ds4.server.memory_watch import MemoryWatch
from ds4.server.prefix_folder import PrefixFolder
from ds4.server.prefixes import Prefixes
from ds4.server.reports import Reports, check_reports
from ds4.server.request import Limits, Progress, ServedEngine
from ds4.server.requests_log import RequestLog
from ds4.server.warm import warm_up
from ds4.server.worker import Worker
from ds4.settings import config_dirs, read_config

if TYPE_CHECKING:
    from ds4.device import Device
    from ds4.engine import Engine

# the flags that ds4.toml may set
KNOWN: dict[str, type | tuple[type, ...]] = {
    "model": str, "host": str, "port": int, "api_key": str, "queue": int, "mem_budget_mb": int, "engram_dir": str,
    "prefill": str, "activations": str, "kv": str, "index_keys": str, "chunk": int, "no_graph": bool,
    "no_dspark": bool, "dspark_block": int, "draft_k": int, "draft": str, "zchain": str, "posttrain": str,
    "log_requests": str, "log_days": int, "admin_key": str, "api_key_file": str, "cors": str, "log_format": str,
    "stall_seconds": int, "oom_score_adj": int, "memory_floor_mb": int, "reports": str,
    "prefix_reuse": str, "prefix_memory_mb": int, "prefix_dir": str, "prefix_disk_mb": int, "sessions": int,
}  # fmt: skip
MOST_WAITING = 10_000
SESSIONS, MAX_SESSIONS = 4, 8  # a step has eight rows
LOG_DAYS, MOST_LOG_DAYS = 30, 36_500
REUSE = ("off", "exact", "decoded")
PREFIX_MEMORY_MB, PREFIX_DISK_MB = 1024, 8192
MEMORY_FLOOR_MB = 512  # half of what sequences leave to a machine whose memory is the device's (ds4/engine/budget.py)
STALL_S = 120  # a chunk of the released model takes seconds; a kernel that is built late, a minute

OWN_WORDING = (
    "warning: around the schemas of tools stand our own words, which the model was not trained with: put the "
    "checkpoint's encoding/encoding.py into %s, its folder too"
)

log = logging.getLogger("ds4.server")


def build_parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="ds4-server",
        allow_abbrev=False,
        description="Serve a base file over HTTP: /v1/chat/completions, /v1/completions, /v1/models, /health, "
        "/metrics.",
        epilog="Any flag may stand in ds4.toml under the same name (in --dir, then in ~/.config/ds4); flags win.",
    )
    p.add_argument("--version", action="version", version=f"ds4 {__version__}")
    p.add_argument("--dir", type=some_text, metavar="D", help="where ds4.toml is looked for first")
    p.add_argument("--host", type=some_text, default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    p.add_argument("--port", type=int, default=8000, help="default 8000; 0: any free one, printed")
    p.add_argument(
        "--api-key", type=some_text, metavar="K", help="ask every request for this key; needed on other hosts"
    )
    p.add_argument(
        "--api-key-file", type=some_text, metavar="FILE",
        help="the same, the key being in FILE, which nobody else can read",
    )  # fmt: skip
    p.add_argument("--cors", metavar="ORIGIN", help="let pages of ORIGIN (or *) call the server; without: none")
    p.add_argument(
        "--admin-key", type=some_text, metavar="FILE",
        help="take orders on /admin/ with the key in FILE, made if it is not there",
    )  # fmt: skip
    p.add_argument(
        "--reports", type=some_text, metavar="DIR",
        help="show the reports in DIR on the page /reports (docs/page.md)",
    )  # fmt: skip
    p.add_argument(
        "--sessions", type=int, default=SESSIONS, metavar="N",
        help=f"requests answered at a time, 1 to {MAX_SESSIONS} (default {SESSIONS})",
    )  # fmt: skip
    p.add_argument("--queue", type=int, default=32, metavar="N", help="requests that may wait (default 32)")
    p.add_argument(
        "--log-requests", type=some_text, metavar="DIR", help="keep requests and answers there (docs/posttraining.md)"
    )
    p.add_argument("--log-days", type=int, metavar="N", help=f"of the last N days, today too (default {LOG_DAYS})")
    p.add_argument("--log-format", choices=FORMATS, default="text", help="lines of the log (default text)")
    p.add_argument(
        "--stall-seconds", type=int, default=STALL_S, metavar="N",
        help=f"/health is 503 when a request made no step for N seconds (default {STALL_S})",
    )  # fmt: skip
    p.add_argument(
        "--oom-score-adj", type=int, metavar="N", help="how soon the kernel ends this process for memory, up to 1000"
    )
    p.add_argument(
        "--memory-floor-mb", type=int, default=MEMORY_FLOOR_MB, metavar="N",
        help="drop what is kept, then refuse and end requests, when less memory is available on this machine "
        f"(default {MEMORY_FLOOR_MB}; 0: never)",
    )  # fmt: skip
    p.add_argument(
        "--prefix-reuse", choices=REUSE, default="exact",
        help="go on from what earlier prompts left (docs/prefixes.md): exact, the default, changes no answer",
    )  # fmt: skip
    p.add_argument(
        "--prefix-memory-mb", type=int, default=PREFIX_MEMORY_MB, metavar="N",
        help=f"of the host, for what prompts leave (default {PREFIX_MEMORY_MB})",
    )  # fmt: skip
    p.add_argument(
        "--prefix-dir", type=some_text, metavar="DIR",
        help="keep it in DIR too, where prompts can be read; without: nowhere",
    )  # fmt: skip
    p.add_argument(
        "--prefix-disk-mb", type=int, metavar="N", help=f"of that folder, at most (default {PREFIX_DISK_MB})"
    )
    add_model_flags(p, prefill="replay", drafts=True)
    return p


def as_flags(values: Mapping[str, object]) -> list[str]:
    """Settings of the file as the flags that they stand for, so that one parser checks both."""
    flags = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif value is not False:
            flags.append(f"{flag}={value}")
    return flags


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line over the file over the defaults, checked.

    Raises:
        UsageError: names the flag.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--dir")
    folder = finder.parse_known_args(argv)[0].dir
    settings = read_config(KNOWN, config_dirs(Path(folder) if folder else None))
    args = build_parser().parse_args([*as_flags(settings), *argv])
    if not 0 <= args.port <= 65535:
        raise UsageError(f"--port {args.port}: must be between 0 and 65535")
    if not 1 <= args.sessions <= MAX_SESSIONS:
        raise UsageError(f"--sessions {args.sessions}: must be between 1 and {MAX_SESSIONS}")
    if not 0 <= args.queue <= MOST_WAITING:
        raise UsageError(f"--queue {args.queue}: must be between 0 and {MOST_WAITING}")
    if args.log_days is not None and args.log_requests is None:
        raise UsageError("--log-days says how long requests are kept, but nothing keeps any: give --log-requests DIR")
    if args.log_days is not None and not 1 <= args.log_days <= MOST_LOG_DAYS:
        raise UsageError(f"--log-days {args.log_days}: must be between 1 and {MOST_LOG_DAYS}")
    if args.api_key_file is not None:
        if args.api_key is not None:
            raise UsageError("--api-key and --api-key-file are two ways to give one key: leave one of them out")
        args.api_key = read_key(Path(args.api_key_file), "API key")
    if args.api_key is None and not is_loopback(args.host):
        raise UsageError(
            f"--host {args.host} can be reached from other machines: it needs --api-key or --api-key-file"
        )
    if args.cors is not None:
        check_origin(args.cors)
    if args.stall_seconds < 1:
        raise UsageError(f"--stall-seconds {args.stall_seconds}: must be at least 1")
    there = total_memory()
    most = max(PREFIX_MEMORY_MB, MOST_MB if there is None else there >> 20)
    if not 0 <= args.prefix_memory_mb <= most:
        raise UsageError(f"--prefix-memory-mb {args.prefix_memory_mb}: must be between 0 and {most}")
    if args.prefix_dir is not None and args.prefix_reuse == "off":
        raise UsageError(
            "--prefix-dir keeps what prompts leave, and --prefix-reuse off keeps nothing: leave one away"
        )
    if args.prefix_disk_mb is not None and args.prefix_dir is None:
        raise UsageError("--prefix-disk-mb says how much is kept on disk, but nothing is: give --prefix-dir DIR")
    if args.prefix_disk_mb is not None and not 1 <= args.prefix_disk_mb <= MOST_MB:
        raise UsageError(f"--prefix-disk-mb {args.prefix_disk_mb}: must be between 1 and {MOST_MB}")
    most = MOST_MB if there is None else there >> 20
    if not 0 <= args.memory_floor_mb < most:  # with more nobody would ever be answered
        raise UsageError(
            f"--memory-floor-mb {args.memory_floor_mb}: must be at least 0, and less than this machine's {most} MB"
        )
    if args.oom_score_adj is not None and not -1000 <= args.oom_score_adj <= 1000:
        raise UsageError(f"--oom-score-adj {args.oom_score_adj}: must be between -1000 and 1000")
    return args


def check_model(args: argparse.Namespace) -> None:
    """What can be known of the model without loading it: headers, tables, shards; sidecars whole.

    Raises:
        Ds4Error: it cannot be loaded, and why.
    """
    from ds4.base.reader import Base
    from ds4.sidecar.stack import SidecarStack

    path = Path(args.model)
    if path.exists() and not path.is_file():  # reading a pipe would wait for its writer
        raise FileFormatError(f"{path}: is not a regular file; -m takes a base file (.gguf)")
    try:
        posttrain = None if args.posttrain is None else resolve(args.posttrain)
        SidecarStack.open(Base.open(path, args.engram_dir).config, args.zchain, posttrain)
    except OSError as e:
        raise FileFormatError(f"{path}: cannot be read ({e.strerror or e})") from e


def open_engine(args: argparse.Namespace, progress: Progress) -> Engine:
    """The engine that the flags ask for, ready to answer."""
    engine = engine_of(args, progress)
    tell_warnings(engine)
    if engine.tokenizer.vocab_size == RELEASED_SIZE and not engine.tokenizer.tool_text.released:
        log.warning(OWN_WORDING, engine.base.path.parent)
    log.info("warming up")
    warm_up(engine)
    return engine


def tell_warnings(engine: Engine) -> None:
    for warning in engine.warnings:
        log.warning("warning: %s", warning)


def make_prefixes(args: argparse.Namespace) -> Prefixes | None:
    """What keeps the states that prompts leave; None: nothing does.

    Raises:
        UsageError: the folder cannot be used.
        Ds4Error: another server uses it.
    """
    if args.prefix_reuse == "off":
        return None
    folder = None
    if args.prefix_dir is not None:
        folder = PrefixFolder(Path(args.prefix_dir), (args.prefix_disk_mb or PREFIX_DISK_MB) << 20)
    return Prefixes(args.prefix_memory_mb << 20, folder, decoded=args.prefix_reuse == "decoded")


class Model:
    """The model of a server: opened, given other sidecars, opened again after its device was lent."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._opened = False
        self._posttrain: Path | None = None  # mounted last
        self._device: Device | None = None
        self.compiler = Compiler()

    def open(self, progress: Progress) -> ServedEngine:
        """The engine; with the post-training that it had before, where that of now cannot be mounted.

        Raises:
            Ds4Error: it cannot be opened.
        """
        try:
            engine = open_engine(self._args, progress)
        except FileFormatError as e:
            if not self._opened or self._args.posttrain is None:
                raise
            log.error("error: %s; trying what was mounted before", e)
            before = None if self._posttrain is None else str(self._posttrain)
            engine = open_engine(argparse.Namespace(**{**vars(self._args), "posttrain": before}), progress)
        self.compiler.learn(engine.tokenizer)
        self._note(engine)
        self._opened = True
        return engine

    def remount(self, served: ServedEngine) -> None:
        """What the folders have now; all as it was if that cannot be mounted, or does not answer.

        Raises:
            Ds4Error: why.
        """
        engine = cast("Engine", served)
        before = engine.mounted, engine.weights
        posttrain = None if self._args.posttrain is None else resolve(self._args.posttrain)
        try:
            engine.remount(self._args.zchain, posttrain)
            tell_warnings(engine)
            warm_up(engine)
        except BaseException:
            engine.mounted, engine.weights = before
            engine.drop_idle()
            raise
        self._note(engine)

    def settle(self) -> None:
        """Device memory that nobody refers to is given back; the device stays open, which takes next to none."""
        gc.collect()
        if self._device is not None:
            self._device.sync()

    def _note(self, engine: Engine) -> None:
        self._posttrain = None if engine.mounted is None else engine.mounted.posttrain
        self._device = engine.device


def set_oom_score(score: int) -> None:
    """Tell the kernel whom to end first when memory runs out. A lower score than now needs a privilege; without it
    the server says so and goes on.
    """
    try:
        Path("/proc/self/oom_score_adj").write_text(str(score))
    except OSError as e:
        log.warning("warning: --oom-score-adj %d cannot be set: %s", score, e.strerror)


def run(argv: Sequence[str]) -> int:
    """Serve until a signal; running requests get `Limits.drain_s` to end, then they are cancelled and told so.

    Raises:
        Ds4Error: the port is in use, or the model cannot be loaded.
    """
    args = parse(argv)
    log_to_stderr(args.log_format)
    log.setLevel(logging.INFO)
    if args.oom_score_adj is not None:
        set_oom_score(args.oom_score_adj)
    limits = Limits(queue=args.queue)
    requests = None if args.log_requests is None else RequestLog(Path(args.log_requests), args.log_days or LOG_DAYS)
    reports = Reports(check_reports(args.reports), args.posttrain and Path(args.posttrain))
    admin_key = None if args.admin_key is None else make_key(Path(args.admin_key))
    if admin_key is not None and admin_key == args.api_key:
        raise UsageError(f"--admin-key {args.admin_key}: holds the --api-key, which would then give orders too")
    sock = listen(args.host, args.port)
    try:
        check_model(args)
        prefixes = make_prefixes(args)
    except BaseException:
        sock.close()
        raise
    connections: Connections = {}
    model = Model(args)
    worker = Worker(
        model.open, limits.queue, on_failed=lambda: stop(), remount=model.remount, settle=model.settle,
        step_s=args.stall_seconds, prefixes=prefixes, sessions=args.sessions,
    )  # fmt: skip
    memory = MemoryWatch(worker, args.memory_floor_mb << 20) if args.memory_floor_mb else None
    app = make_app(
        worker, limits, args.api_key, connections, requests, admin_key, args.cors, reports, memory, model.compiler
    )
    server = make_server(app, connections, limits, worker.interrupt)

    def stop(*_: object) -> None:
        server.should_exit = True

    def reload(*_: object) -> None:
        try:
            worker.reload()  # what becomes of it is in the log
        except HttpError as e:
            log.warning("warning: SIGHUP: %s", e)

    # uvicorn sets its own handlers while it runs and raises the signal again after: these make that harmless
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    before[signal.SIGHUP] = signal.signal(signal.SIGHUP, reload)
    where = f"[{args.host}]" if ":" in args.host else args.host
    log.info("listening on http://%s:%d, loading %s", where, sock.getsockname()[1], args.model)
    if requests is not None:
        log.info("requests and answers are kept in %s", args.log_requests)
    try:
        server.run(sockets=[sock])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if prefixes is not None:
            prefixes.close()
    if worker.error is not None:
        raise worker.error if isinstance(worker.error, Ds4Error) else Ds4Error(f"{args.model}: {worker.error}")
    log.info("stopped")
    return 0


def main() -> None:
    """Entry point of the console script."""
    sys.exit(guarded(lambda: run(sys.argv[1:])))


if __name__ == "__main__":
    main()
