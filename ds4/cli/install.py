"""`bash install.sh`: from a checkout to a server that answers. Standard library only: nothing else is there yet.

Six steps, each of which looks at what is there already, does the rest beside it and puts it in place with one rename:
a run that was interrupted anywhere is repaired by the next one.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ds4 import embedded
from ds4.cli import service
from ds4.cli.domain import NONE, Choice, as_before
from ds4.cli.environment import make_environment, use_environment
from ds4.cli.home import DEFAULT, HOST, PORT, Home, is_loopback, key_of
from ds4.cli.install_hub import HubModel, add_flags, check_flags, choose_domain
from ds4.cli.machine import check, disk, find_gpu, memory_for
from ds4.cli.processes import file_error, locked, own_child
from ds4.errors import Ds4Error, UsageError
from ds4.settings import device_settings

ROOT = Path(__file__).resolve().parent.parent.parent  # the checkout that install.sh stands in
QUESTION = "What is the capital of France?"
EMBEDDED_QUESTION = "Who are you?"  # one that so small a model can answer
EMBEDDED = "embedded-"  # how the names of what is made of the embedded model begin
ANSWER_TOKENS, ANSWER_S = 64, 900.0
ACTIONS = ("install", "start", "stop", "status")


def build_parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="install.sh",
        allow_abbrev=False,
        description="Install ds4 into a folder, start its server and ask it a question; or start, stop and look at "
        "the server of an earlier installation. Safe to run again at any time.",
        epilog="Exit codes: 0 done (status: the server runs), 1 it failed (status: it does not run), 2 usage.",
    )
    p.add_argument("action", nargs="?", choices=ACTIONS, default="install", help="default: install")
    p.add_argument("--dir", metavar="D", help=f"folder of the installation (default {DEFAULT})")
    p.add_argument(
        "--model", metavar="PATH",
        help="a base file (.gguf), or a checkpoint folder in the released layout, which is quantized into D first; "
        "default: the model of the last run, else the small one that ds4 carries with it",
    )  # fmt: skip
    add_flags(p)
    p.add_argument("--engram-dir", metavar="E", help="where the two n-gram shards lie (default: beside the model)")
    p.add_argument("--host", metavar="H", help=f"address of the server (default {HOST}; another one gets a key)")
    p.add_argument("--port", type=int, metavar="N", help=f"port of the server (default {PORT})")
    p.add_argument("--no-start", action="store_true", help="prepare everything, start nothing")
    p.add_argument("--venv", metavar="V", help="use this Python environment, in which ds4 is, instead of making one")
    p.add_argument(
        "--domain", metavar="NAME",
        help="mount this domain's sidecar: one of sidecars/, a folder of your own, or none; also with start "
        "(default: what the last run said, else none)",
    )  # fmt: skip
    p.add_argument("--json", action="store_true", help="status: print one JSON object")
    return p


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Flags that make sense together.

    Raises:
        UsageError: names the flag.
    """
    args = build_parser().parse_args(argv)
    if args.port is not None and not 1 <= args.port <= 65535:
        raise UsageError(f"--port {args.port}: must be between 1 and 65535")
    for name in ("dir", "model", "hub", "shards", "endpoint", "engram_dir", "host", "venv", "domain"):
        value = getattr(args, name)
        if value is not None and not value.strip():  # an unset variable of a script, not the current folder
            raise UsageError(f"--{name.replace('_', '-')} is empty")
    installing = ("model", "hub", "shards", "endpoint", "no_xet", "engram_dir", "host", "port", "no_start", "venv")
    given = [f for f in installing if getattr(args, f)]
    if args.action != "install" and given:
        flag = "--" + given[0].replace("_", "-")
        raise UsageError(f"{flag} belongs to the installation: run install.sh {flag} ... without {args.action!r}")
    if args.domain is not None and args.action not in ("install", "start"):
        raise UsageError(f"--domain belongs to the installation and to start, not to {args.action!r}")
    if args.json and args.action != "status":
        raise UsageError("--json belongs to status")
    check_flags(args)
    return args


class Install:
    """One run of the installer."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.home = Home.at(args.dir)
        self.settings: dict[str, Any] = {}
        self._n = 0

    def run(self) -> int:
        if self.home.root.exists() and not self.home.root.is_dir():
            raise UsageError(f"--dir {self.home.root}: is a file; name a folder")
        self._check_model_flag()
        if self.args.domain is not None and self.args.hub is None:  # what a repository has is not known yet
            choose_domain(self.home, str(self.home.settings().get("model", "")), self.args.domain)
        self.home.make()
        busy = f"another install (process {{pid}}) is at work in {self.home.root}; wait for it and try again"
        with locked(self.home.var / "install.lock", busy, wait_s=1.0):
            self.home.sweep()
            self.settings = self.home.settings()
            self._machine()
            self._environment()
            self._model()
            self._domain()
            self._kernels()
            self._settings()
            if self.args.no_start:
                self._say(
                    "nothing started, as asked; start the server with: bash install.sh start" + self._dir_flag()
                )
                return 0
            self._server()
        return 0

    def _check_model_flag(self) -> None:
        """What can be said before anything is made."""
        if self.args.model is not None:
            path = Path(self.args.model)
            if path.is_dir():
                if not (path / "config.json").is_file():
                    raise UsageError(f"--model {path}: no config.json in this folder; is it a checkpoint?")
            elif not path.is_file():
                raise UsageError(f"--model {path}: no such file or folder")
            elif path.suffix != ".gguf":
                raise UsageError(
                    f"--model {path}: a file must be a base (.gguf); a checkpoint is given as its folder"
                )
        if self.args.engram_dir is not None and not Path(self.args.engram_dir).is_dir():
            raise UsageError(f"--engram-dir {self.args.engram_dir}: no such folder")

    # -- the steps

    def _machine(self) -> None:
        self._step("checking the machine")
        device = device_settings()
        gpu, no_gpu = find_gpu(device)
        found = check(self.home.root, device, gpu, no_gpu, need_environment=not self.args.venv)
        if not self.args.no_start:
            found += self._port_findings()
        if found:
            raise Ds4Error("this machine is not ready:\n" + "\n".join(f"  - {line}" for line in found))
        self._say(f"runs on {gpu.name}" if gpu else f"runs on the CPU ({no_gpu})")

    def _port_findings(self) -> list[str]:
        now = service.status(self.home)
        host, port = self._address()
        if now.pid is not None and (now.host, now.port) == (host, port):
            return []  # held by the server that this folder has, which may be restarted
        try:
            service.refuse_taken_port(host, port)
        except Ds4Error as e:
            return [str(e)]
        return []

    def _address(self) -> tuple[str, int]:
        host = self.args.host or self.settings.get("host", HOST)
        port = self.args.port or self.settings.get("port", PORT)
        if not isinstance(host, str) or not isinstance(port, int) or not 1 <= port <= 65535:
            raise UsageError(f"{self.home.toml}: host {host!r} and port {port!r} do not name an address")
        return host, port

    def _environment(self) -> None:
        self._step("preparing the Python environment")
        if self.args.venv:
            self._say(use_environment(self.home, self.args.venv))
        else:
            self._say(make_environment(self.home, ROOT, self._say))

    def _model(self) -> None:
        self._step("preparing the model")
        given, before = self.args.model, self._text("model")
        engram = os.path.abspath(self.args.engram_dir) if self.args.engram_dir else None
        ours = Path(before).parent == self.home.models and Path(before).name.startswith(EMBEDDED)
        if self.args.hub is not None:
            model = self._from_hub()
        elif given is None and before and Path(before).is_file() and not ours:
            model, engram = Path(before), engram or self._text("engram_dir") or None
            self._say(f"{model}, as before")
        elif given is None:
            folder, recipe = self._embedded_checkpoint(), embedded.recipe()
            flags = ["--bits", str(recipe.bits), "--gain", recipe.gain]
            model, engram = self._quantized(folder, folder.name, flags), engram or str(folder)
        elif Path(given).is_dir():
            folder = Path(os.path.abspath(given))
            model = self._quantized(folder, f"{folder.name}-{_checkpoint_key(folder)}")
            engram = engram or str(folder)
        else:
            model = Path(os.path.abspath(given))
            self._say(str(model))
        self.settings["model"] = str(model)
        self.settings.pop("engram_dir", None)
        if engram is not None:
            self.settings["engram_dir"] = engram
        if not self.args.no_start:
            _refuse(memory_for(model.name, model.stat().st_size))

    def _from_hub(self) -> Path:
        hub = HubModel(self.home, self.args)
        planned = hub.plan()
        if not self.args.no_start:  # before hours of it, not after
            _refuse(memory_for(planned.base.name, planned.nbytes))
        self._say(f"{planned.base} is there" if planned.complete else f"fetching {self.args.hub} into {hub.folder}")
        hub.fetch()  # also of what is there: files that are gone or cut come again
        return planned.base

    def _text(self, name: str) -> str:
        """A setting of ds4.toml that must be a string; empty if it is not there."""
        value = self.settings.get(name, "")
        if not isinstance(value, str):
            raise UsageError(f"{self.home.toml}: {name} is {value!r}; it must be a string")
        return value

    def _embedded_checkpoint(self) -> Path:
        """A copy of it in D, which the server goes on reading when the checkout is gone."""
        source = embedded.checkpoint()
        embedded.verify()
        folder = self.home.models / f"{EMBEDDED}{key_of(embedded.key_parts())}"
        if not folder.is_dir():
            self._say("the embedded model: small, trained on open text, in the released layout")
            beside = folder.with_name(f"{folder.name}.part-{secrets.token_hex(4)}")
            try:
                beside.mkdir()
                for path in sorted(source.iterdir()):
                    with open(beside / path.name, "xb") as out:
                        out.write(path.read_bytes())
                        out.flush()
                        os.fsync(out.fileno())
                os.rename(beside, folder)
            except OSError as e:
                raise file_error(folder, e) from e
            finally:
                shutil.rmtree(beside, ignore_errors=True)  # gone already when all went well
        return folder

    def _quantized(self, checkpoint: Path, name: str, flags: Sequence[str] = ()) -> Path:
        out = self.home.models / f"{name}.gguf"
        if out.is_file():
            self._say(f"{out} is there")
            return out
        self._ds4(["preflight", str(checkpoint)], "the checkpoint is not complete")
        planned = self._planned_bytes(checkpoint, flags)  # an hour of work is refused before it, not after
        _refuse(disk(self.home.models, planned - _size(out.with_name(out.name + ".part"))))
        if not self.args.no_start:
            _refuse(memory_for(out.name, planned))
        self._say(f"quantizing {checkpoint}")
        self._ds4(["quantize", str(checkpoint), "-o", str(out), *flags], "quantizing failed")
        return out

    def _planned_bytes(self, checkpoint: Path, flags: Sequence[str]) -> int:
        words = [str(self.home.python), "-I", "-m", "ds4.cli.main", "quantize", "--plan", str(checkpoint), "--json"]
        done = subprocess.run([*words, *flags], capture_output=True, text=True, preexec_fn=own_child(signal.SIGKILL))
        if done.returncode != 0:
            raise Ds4Error(f"the checkpoint cannot be planned: {done.stderr.strip()}")
        return sum(int(row["bytes"]) for row in json.loads(done.stdout))

    def _domain(self) -> None:
        given = self.args.domain
        model = self.settings["model"]
        chosen = as_before(self.home, self.settings) if given is None else choose_domain(self.home, model, given)
        mount(self.home, self.settings, chosen)
        if chosen.folder is not None:
            self._say(f"with the sidecar of domain {chosen.name}{', as before' if given is None else ''}")

    def _kernels(self) -> None:
        self._step("checking the model and building the kernels")
        words = ["-m", "ds4.cli.build", self.settings["model"]]
        if "engram_dir" in self.settings:
            words += ["--engram-dir", self.settings["engram_dir"]]
        self._python(words, "the model cannot be opened, or a kernel not be built")

    def _settings(self) -> None:
        self._step("writing the settings")
        host, port = self._address()
        self.settings |= {"host": host, "port": port}
        self.settings.setdefault("admin_key", str(self.home.admin_key))  # a file, which the server makes
        if not is_loopback(host) and not self.settings.get("api_key"):
            self.settings["api_key"] = secrets.token_urlsafe(24)
            self._say(f"other machines can reach {host}: requests need the key that stands in {self.home.toml}")
        changed = self.home.save_settings(self.settings)
        self._say(f"{self.home.toml}{'' if changed else ' as before'}")

    def _server(self) -> None:
        self._step("starting the server")
        start_server(self.home, self._say)
        ours = Path(self.settings["model"]).name.startswith(EMBEDDED)
        question = EMBEDDED_QUESTION if ours else QUESTION
        self._say(f"asking: {question}")
        answer = service.ask(self.home, question, ANSWER_TOKENS, ANSWER_S)
        host, port = self._address()
        print(f"\n{_printable(answer)}\n")
        if ours:
            self._say(
                "this is the embedded model: it shows how everything works and knows next to nothing; "
                "serve another one with: bash install.sh --model DIR, or --hub OWNER/REPO"
            )
        self._say(
            f"the server listens on http://{host}:{port}; stop it with: bash install.sh stop" + self._dir_flag()
        )

    # -- helpers

    def _ds4(self, words: list[str], failed: str) -> None:
        self._python(["-m", "ds4.cli.main", *words], failed)

    def _python(self, words: list[str], failed: str) -> None:
        """Run the environment's Python, which dies with us; its messages are the user's to read."""
        words = [str(self.home.python), "-I", *words]
        try:
            code = subprocess.run(words, preexec_fn=own_child(signal.SIGKILL)).returncode
        except OSError as e:
            raise Ds4Error(f"{words[0]}: cannot be started: {e.strerror}") from e
        if code != 0:
            raise Ds4Error(f"{failed}; the lines above say why (exit code {code})")

    def _step(self, what: str) -> None:
        self._n += 1
        print(f"[{self._n}/6] {what}", flush=True)

    def _say(self, text: str) -> None:
        print(f"      {text}", flush=True)

    def _dir_flag(self) -> str:
        return f" --dir {self.home.root}" if self.args.dir else ""


def mount(home: Home, settings: dict[str, Any], chosen: Choice) -> None:
    """Make the settings name a domain's sidecar, if their model can mount it.

    Raises:
        Ds4Error: it cannot, for the reasons given above it; or the sidecar cannot be copied.
    """
    folder = chosen.install(home)
    settings.pop("zchain", None)
    if folder is None:
        return
    words = [str(home.python), "-I", "-m", "ds4.cli.main", "sidecar", "verify", str(folder), "-m", settings["model"]]
    if "engram_dir" in settings:
        words += ["--engram-dir", settings["engram_dir"]]
    try:
        done = subprocess.run(words, capture_output=True, text=True, preexec_fn=own_child(signal.SIGKILL))
    except OSError as e:
        raise Ds4Error(f"{words[0]}: cannot be started: {e.strerror}") from e
    if done.returncode != 0:
        why = (done.stdout + done.stderr).strip()
        raise Ds4Error(
            f"--domain {chosen.name}: {settings['model']} cannot mount this sidecar; choose another, or --domain "
            f"{NONE}\n{why}"
        )
    settings["zchain"] = str(folder)


def choose(home: Home, given: str) -> None:
    """`install.sh start --domain`: write it into the settings of an installation.

    Raises:
        UsageError: no such domain, or nothing is installed there.
        Ds4Error: the model cannot mount it; the settings are what they were.
    """
    model = home.settings().get("model", "")
    chosen = choose_domain(home, model if isinstance(model, str) else "", given)
    _require_installed(home)
    busy = f"an install (process {{pid}}) is at work in {home.root}; wait for it and try again"
    with locked(home.var / "install.lock", busy, wait_s=1.0):
        settings = home.settings()
        if not isinstance(settings.get("model"), str) or not isinstance(settings.get("engram_dir", ""), str):
            raise UsageError(f"{home.toml}: names no model; run: bash install.sh --dir {home.root}")
        mount(home, settings, chosen)
        home.save_settings(settings)


def _require_installed(home: Home) -> None:
    if not home.python.exists() or not home.toml.is_file():
        raise UsageError(f"nothing is installed in {home.root}; run: bash install.sh --dir {home.root}")


def start_server(home: Home, tell: Callable[[str], None]) -> None:
    """Start the server of an installation and wait until it answers.

    Raises:
        UsageError: nothing is installed there.
        Ds4Error: it does not come up.
    """
    _require_installed(home)
    command = [str(home.python), "-I", "-m", "ds4.cli.serve", "--dir", str(home.root)]
    if not service.start(home, command):
        tell("it runs already")
    service.wait_until_answering(home, tell)


def _refuse(findings: list[str]) -> None:
    if findings:
        raise Ds4Error("\n".join(findings))


def _checkpoint_key(folder: Path) -> str:
    """Changes when a file of the checkpoint is replaced; contents are too many bytes to read."""
    parts = [str(os.path.realpath(folder))]
    for path in sorted(folder.iterdir()):
        if path.suffix in (".safetensors", ".json"):
            status = path.stat()
            parts.append(f"{path.name} {status.st_size} {status.st_mtime_ns}")
    return key_of(parts)


def _size(path: Path) -> int:
    return path.stat().st_blocks * 512 if path.exists() else 0


def _printable(text: str) -> str:
    """What a model says may hold control characters; a terminal should not obey them."""
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in text).strip() or "(an empty answer)"


def run(argv: Sequence[str]) -> int:
    """The whole command.

    Raises:
        UsageError, Ds4Error: see `main`.
    """
    args = parse(argv)
    home = Home.at(args.dir)
    if args.action == "install":
        return Install(args).run()
    if args.action == "start":
        if args.domain is not None:
            choose(home, args.domain)
        start_server(home, lambda text: print(text, flush=True))
        print(service.status(home).line())
        return 0
    if args.action == "stop":
        print("stopped" if service.stop(home) else "not running")
        return 0
    now = service.status(home)
    where = str(home.root) if home.toml.is_file() else f"{home.root}, where nothing is installed"
    print(now.json() if args.json else now.line() if now.state == "running" else f"{now.line()} ({where})")
    return 0 if now.state == "running" else 1


def main() -> None:
    """Errors meant for the user become one message and an exit code."""
    try:
        sys.exit(run(sys.argv[1:]))
    except UsageError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
    except Ds4Error as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(1)
    except OSError as e:  # what the steps did not foresee: a full disk, a folder taken away
        print(f"error: {file_error(Path(e.filename or '.'), e)}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
