"""The folder D that an installation lives in, and its ds4.toml. Standard library only.

D/ds4.toml          settings of the server, the same names as its flags; mode 0600, it may hold a key
D/venv              link to the Python environment in use: D/env/KEY, or one that was given
D/env/KEY           environments, complete when .complete is in them
D/models            embedded-KEY (a copy of the checkpoint that ds4 carries), what was quantized: NAME-KEY.gguf, and
                    what was fetched: hub-OWNER--REPO
D/sidecars/KEY/NAME copies of sidecars that were asked for by name
D/var               locks, service.json, logs, admin.key (made by the server)
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import re
import secrets
import shutil
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds4.cli.processes import file_error, write_file
from ds4.errors import Ds4Error, UsageError

DEFAULT = Path("~/.local/share/ds4")
HOST, PORT = "127.0.0.1", 8000


@dataclass(frozen=True)
class Home:
    """Paths of one installation; `root` is absolute."""

    root: Path

    @staticmethod
    def at(given: str | None) -> Home:
        return Home(Path(os.path.abspath(Path(given).expanduser() if given else DEFAULT.expanduser())))

    @property
    def toml(self) -> Path:
        return self.root / "ds4.toml"

    @property
    def venv(self) -> Path:
        return self.root / "venv"

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def sidecars(self) -> Path:
        return self.root / "sidecars"

    @property
    def var(self) -> Path:
        return self.root / "var"

    @property
    def admin_key(self) -> Path:
        return self.var / "admin.key"

    def make(self) -> None:
        """Create the folders.

        Raises:
            Ds4Error: they cannot be made, or cannot be written.
        """
        try:
            for folder in (self.models, self.var, self.root / "env"):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise file_error(Path(e.filename or self.root), e) from e
        write_file(self.var / "probe", "")
        (self.var / "probe").unlink(missing_ok=True)

    def settings(self) -> dict[str, Any]:
        """ds4.toml as it is; empty if there is none.

        Raises:
            UsageError: it cannot be read or is not TOML.
        """
        try:
            raw = tomllib.loads(self.toml.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as e:
            raise UsageError(f"{self.toml}: {e}; correct it or remove it, then run the same command again") from e
        return {name.replace("-", "_"): value for name, value in raw.items()}

    def save_settings(self, values: Mapping[str, Any]) -> bool:
        """Write ds4.toml; whether that changed anything. A file that says the same is left as it is."""
        if self.settings() == dict(values):
            return False
        tables = {name: value for name, value in values.items() if isinstance(value, dict)}  # other commands'
        lines = [f"{name} = {_toml(value)}" for name, value in values.items() if name not in tables]
        for table, rows in tables.items():
            lines += ["", f"[{_key(table)}]", *(f"{_key(name)} = {_toml(value)}" for name, value in rows.items())]
        head = "# Settings of ds4-server: any of its flags, under the same name. Written by install.sh.\n"
        write_file(self.toml, head + "\n".join(lines) + "\n")
        return True

    def link_venv(self, target: Path) -> None:
        """Make D/venv point to `target`, in one step."""
        beside = self.root / f".venv.{secrets.token_hex(4)}"
        try:
            beside.symlink_to(target)
            os.replace(beside, self.venv)
        except OSError as e:
            beside.unlink(missing_ok=True)
            raise file_error(self.venv, e) from e

    def sweep(self) -> None:
        """Remove what interrupted runs left beside the real names. Only under the install lock."""
        for pattern in (".venv.*", ".ds4.toml.*", "models/*.part-*", "sidecars/*.part-*", "env/source-*"):
            for path in self.root.glob(pattern):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)


def _key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any) -> str:
    """A string, number, boolean, or a list of these; JSON's escapes are TOML's, once DEL is escaped too."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if not isinstance(value, (bool, int, float, str)):
        raise UsageError(f"ds4.toml: {value!r} is no setting of the server; remove it")
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def key_of(parts: Iterable[str | bytes]) -> str:
    """Twelve hex digits that change when a part does."""
    h = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part
        h.update(len(data).to_bytes(8, "little") + data)
    return h.hexdigest()[:12]


def source_key(root: Path, parts: Iterable[str], extra: Iterable[str]) -> str:
    """Key of the files under root/part (a part may be a file), byte by byte, and of `extra`."""
    found: list[str | bytes] = list(extra)
    try:
        for part in parts:
            top = root / part
            files = sorted(p for p in top.rglob("*") if p.is_file()) if top.is_dir() else [top]
            for path in files:
                if "__pycache__" not in path.parts:
                    found += [str(path.relative_to(root)), path.read_bytes()]
    except OSError as e:
        raise Ds4Error(f"{e.filename}: cannot be read ({e.strerror}); is the checkout complete?") from e
    return key_of(found)
