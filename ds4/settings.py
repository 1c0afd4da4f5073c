"""The environment and ds4.toml, read here and nowhere else.

Flags and the TOML file say what to do, under the same names; `DS4_...` variables are for diagnostics and for
where things lie. None changes a number.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds4.errors import UsageError

DRIVERS = ("auto", "nvidia", "simt")
VARIANTS = ("fast", "check", "count")
ORDERS = ("greedy", "rising", "falling")
REPLAYS = ("recorded", "falling", "turns")
CONFIG_NAME = "ds4.toml"
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text in quotes"}
SECTIONS = ("nightly",)  # tables of ds4.toml, each of a command of its own; the names before them are the server's


@dataclass(frozen=True)
class DeviceSettings:
    """What the environment says about the device.

    Attributes:
        driver: DS4_DRIVER: "nvidia", "simt" (the CPU driver), or "auto": NVIDIA's where it has a device.
        simt: DS4_SIMT: which build of the kernels the CPU driver runs: "fast", "check" or "count".
        order: DS4_SIMT_ORDER: in which order the CPU driver runs the threads of a block.
        replay: DS4_SIMT_REPLAY: in which order the CPU driver replays nodes of a graph that nothing orders.
        workers: DS4_SIMT_WORKERS: threads of the CPU driver; 0: one a core.
        cache: DS4_CACHE: where builds are kept; default ~/.cache/ds4.
        cuda_dir: DS4_CUDA_DIR: kernel sources; None: those shipped with the package.
        cxx: DS4_CXX: the C++ compiler; default g++.
    """

    driver: str
    simt: str
    order: str
    replay: str
    workers: int
    cache: Path
    cuda_dir: Path | None
    cxx: str


def device_settings(environ: Mapping[str, str] | None = None) -> DeviceSettings:
    """Read the device's variables.

    Raises:
        UsageError: a value is not one of those allowed; names the variable.
    """
    env = os.environ if environ is None else environ
    workers = env.get("DS4_SIMT_WORKERS", "") or "0"
    if not workers.isdecimal() or int(workers) > 1024:
        raise UsageError(
            f"DS4_SIMT_WORKERS is {workers!r}; expected a number of threads from 0 to 1024 (0: one a core)"
        )
    return DeviceSettings(
        driver=_choice(env, "DS4_DRIVER", DRIVERS),
        simt=_choice(env, "DS4_SIMT", VARIANTS),
        order=_choice(env, "DS4_SIMT_ORDER", ORDERS),
        replay=_choice(env, "DS4_SIMT_REPLAY", REPLAYS),
        workers=int(workers),
        cache=Path(env.get("DS4_CACHE") or Path(env.get("XDG_CACHE_HOME") or "~/.cache") / "ds4").expanduser(),
        cuda_dir=Path(env["DS4_CUDA_DIR"]) if env.get("DS4_CUDA_DIR") else None,
        cxx=env.get("DS4_CXX") or "g++",
    )


def _choice(env: Mapping[str, str], name: str, allowed: Sequence[str]) -> str:
    value = env.get(name) or allowed[0]
    if value not in allowed:
        raise UsageError(f"{name} is {value!r}; expected one of {', '.join(allowed)}")
    return value


def config_dirs(given: Path | None = None) -> list[Path]:
    """Where ds4.toml is looked for, first match wins: the given directory, then ~/.config/ds4."""
    return [*([given] if given is not None else []), Path("~/.config/ds4").expanduser()]


def user_units(environ: Mapping[str, str] | None = None) -> Path:
    """Where a user's systemd units lie: XDG_CONFIG_HOME/systemd/user, ~/.config without."""
    env = os.environ if environ is None else environ
    return (Path(env.get("XDG_CONFIG_HOME") or "~/.config") / "systemd" / "user").expanduser()


def read_config(
    known: Mapping[str, type | tuple[type, ...]],
    search: Sequence[Path],
    path: Path | None = None,
    section: str | None = None,
) -> dict[str, object]:
    """Read `path`, or the first ds4.toml found in `search`. Names are those of the command's flags.

    Args:
        known: flag name, with underscores ("mem_budget_mb") -> the type or types its value may have. The file may
            write dashes or underscores.
        search: directories, in order.
        path: read this file, which must exist, instead of searching.
        section: a table of SECTIONS instead of the names before all tables.

    Returns:
        name (with underscores) -> value; empty without a file.

    Raises:
        UsageError: the file cannot be read or parsed, has an unknown or repeated key, or a value of a wrong type.
    """
    if path is None:
        path = next((d / CONFIG_NAME for d in search if (d / CONFIG_NAME).is_file()), None)
        if path is None:
            return {}
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UsageError(f"{path}: cannot be read: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise UsageError(f"{path}: not valid TOML: {e}") from e
    if section is None:
        for key, value in raw.items():
            if isinstance(value, dict) and key not in SECTIONS:
                known_tables = ", ".join(f"[{s}]" for s in SECTIONS)
                raise UsageError(
                    f"{path}: [{key}] is a table; flags stand outside tables, above the first one, as name = value "
                    f"(the only table is {known_tables})"
                )
    table = {k: v for k, v in raw.items() if k not in SECTIONS} if section is None else raw.get(section, {})
    if not isinstance(table, dict):
        raise UsageError(f"{path}: {section} is {table!r}; expected a table, [{section}]")
    values: dict[str, object] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in known:
            flags = ", ".join(sorted(k.replace("_", "-") for k in known))
            raise UsageError(f"{path}: unknown key {key!r}; known are {flags}")
        if name in values:
            raise UsageError(f"{path}: {key!r} is given twice, with a dash and with an underscore")
        allowed = known[name]
        types = allowed if isinstance(allowed, tuple) else (allowed,)
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            names = "a number" if float in types else " or ".join(KINDS[t] for t in types)
            raise UsageError(f"{path}: {key} is {value!r}; expected {names}")
        values[name] = value
    return values
