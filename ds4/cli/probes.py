"""What `ds4 doctor` looks at. A probe yields (level, what is so, what to do), or raises what a start would raise."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ds4.errors import Ds4Error, FileFormatError
from ds4.settings import device_settings

if TYPE_CHECKING:
    from ds4.base.reader import Base
    from ds4.device import Device
    from ds4.engram.store import RowStore

Findings = Iterator[tuple[str, str, str]]
CACHE_BYTES = 300 << 20  # kernels for one device, with room for an update
TESTED = ("sm_90", "sm_100", "sm_120", "sm_121")  # architectures that the tests compile every kernel for
PROBE_S = 1.0  # of reading
PROBE_TOKENS = 16  # of rows in flight: as many as a prefill asks for at once, and no more than a step soon will
SLOW_TOKENS_S = 20.0  # tokens/s of rows under which decode waits for the disk
SLOW_READ = 200e6  # bytes/s under which loading 114 GB takes ten minutes
READ_BYTES = 1 << 20
ANSWER_S = 3.0
TEXTS = (
    "def f(x):\n    return x  # tab\there\r\n",
    "Zoë’s naïve café: e\u0301 n\u0303, \u202eabc\u202c",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \U00020000\U0002a6d6 漢字",
    "\ufffd <|literal|> </think> \x00\x1f",
)


def cache_probe() -> Findings:
    """The build cache: private, writable, with room."""
    from ds4.device.cache import Cache

    root = device_settings().cache
    Cache(root)
    with tempfile.TemporaryFile(dir=root) as f:
        f.write(b"ds4")
        f.flush()
        os.fsync(f.fileno())
    free = shutil.disk_usage(root).free
    if free < CACHE_BYTES:
        yield (
            "warning",
            f"{root} has {free >> 20} MB left, kernels take up to {CACHE_BYTES >> 20}",
            ("free some, or set DS4_CACHE to a folder on another disk"),
        )
    else:
        yield "ok", f"{root} can be written, {free >> 30} GB are free", ""


def driver_probe(found: list[Device]) -> Findings:
    """The driver of this process and its device, which is put into `found`."""
    from ds4.device import Device
    from ds4.device.driver import mapped_libcuda

    device = Device.open()
    found.append(device)
    info = device.info
    library = next(iter(mapped_libcuda()), "no libcuda.so.1")
    if info.driver == "simt":
        yield (
            "warning",
            f"the CPU driver plays the device ({library}): exact, and slow",
            ("nothing for the embedded model; for a larger one a machine with an NVIDIA GPU and driver 580 or newer"),
        )
        return
    major, minor = info.cc
    yield "ok", f"{info.name}, {info.memory >> 30} GB{' shared with the host' * info.unified} ({library})", ""
    if info.arch not in TESTED:
        yield (
            "warning",
            f"compute capability {major}.{minor} ({info.arch}) is none that kernels are tested for",
            (f"expect it to work if it is newer; tested are {', '.join(TESTED)}"),
        )
    else:
        yield "ok", f"compute capability {major}.{minor}: kernels are made for {info.arch}", ""


def kernel_probe(device: Device) -> Findings:
    """A kernel is built for this device, if it is not yet, run, and its numbers compared."""
    from ds4.engine.ops.norm import rms_norm

    width, eps = 256, 1e-6
    x = np.linspace(-2.0, 3.0, width, dtype=np.float32)
    y = device.zeros((1, width), "f32")
    begun = time.monotonic()
    rms_norm(device, y, device.upload(x.reshape(1, -1)), device.upload(np.ones(width, np.float32)), 1, width, eps)
    got = device.download(y)[0]
    wanted = x / np.sqrt(np.mean(np.square(x, dtype=np.float64)) + eps)
    off = float(np.max(np.abs(got - wanted)))
    if not off < 1e-5:  # NaN too; sums of 256 float32 squares are off by a few 1e-7 of values up to 2
        yield (
            "fault",
            f"a kernel's numbers are off by {off:g}",
            ("remove the build cache and try again; if it stays, the device or its driver is broken"),
        )
    else:
        yield "ok", f"a kernel was loaded and gave the right numbers in {time.monotonic() - begun:.1f} s", ""


def file_probe(base: Base, found: list[Base]) -> Findings:
    """A base that opened: headers, tables, gains, codebooks and the sizes of its shards were checked by that."""
    found.append(base)
    first = min((t.offset for t in base.tensors.values()), default=base.file_bytes)
    with base.path.open("rb") as f:
        header = hashlib.sha256(f.read(first)).hexdigest()
    end = max((t.offset + t.nbytes for t in base.tensors.values()), default=0)
    if base.file_bytes < end:
        raise FileFormatError(f"{base.path}: has {base.file_bytes} bytes, its table ends at {end}")
    yield "ok", f"{base.path.name}: {base.file_bytes:,} bytes, as its table says; header's SHA-256 {header}", ""
    for g in range(len(base.config.engram_layer_ids)):
        table = base.engram_table(g)
        yield "ok", f"n-gram table {g}: {table.rows:,} rows in {table.path} ({table.path.stat().st_size:,} bytes)", ""


def published_sum(path: str | Path) -> tuple[str, str] | None:
    """What SHA256SUMS or a fetch's record beside the file says of it, lower-case hex, and which; None: nothing."""
    from ds4.hub.fetch import Record
    from ds4.hub.names import RECORD

    file = Path(path).resolve()
    record = Record.read(file.parent)
    for wanted in record.plan.files if record else ():
        whole = wanted.sum or (wanted.pieces[0].sum if len(wanted.pieces) == 1 else None)
        if wanted.name == file.name and whole is not None and whole.kind == "sha256":
            return whole.digits, RECORD
    try:
        lines = (file.parent / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    for line in lines:
        mark, _, name = line.partition(" ")
        if name.lstrip(" *") == file.name:
            return mark.lower(), "SHA256SUMS"
    return None


def tokenizer_probe(base: Base) -> Findings:
    """Texts become ids and the same texts again."""
    from ds4.model.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_base(base.tokenizer_data(), base.config, str(base.path))
    for text in TEXTS:
        back = tokenizer.decode(tokenizer.encode(text))
        if back != text:
            yield (
                "fault",
                f"the tokenizer turns {text!r} into {back!r}",
                ("the base holds another model's tokenizer: fetch or make it again"),
            )
            return
    yield "ok", f"{tokenizer.vocab_size:,} tokens; {len(TEXTS)} odd texts came back as they were", ""


@contextlib.contextmanager
def _stores(base: Base, *, direct: bool | None = None) -> Iterator[list[RowStore]]:
    from ds4.engram.store import RowStore

    with contextlib.ExitStack() as stack:
        tables = [base.engram_table(g) for g in range(len(base.config.engram_layer_ids))]
        yield [
            stack.enter_context(
                RowStore(t.path, t.weight_offset, t.scale_offset, t.rows, t.head_dim, direct=direct)
            )
            for t in tables
        ]  # fmt: skip


def engram_probe(base: Base) -> Findings:
    """First, last and some rows between of each table: read past the page cache and through it, and finite."""
    from ds4.checkpoint.codecs import e4m3_to_f32

    if not base.config.engram_layer_ids:
        yield "ok", "the model has no n-gram tables", ""
        return
    with _stores(base) as direct, _stores(base, direct=False) as cached:
        for g, (one, other) in enumerate(zip(direct, cached, strict=True)):
            rows = np.unique(np.linspace(0, one.n_rows - 1, 16).astype(np.int64))
            got = one.read(rows)
            where = f"n-gram table {g} ({one.path})"
            if not np.array_equal(got, other.read(rows)):
                yield (
                    "fault",
                    f"{where}: two reads of the same rows differ",
                    ("check the disk (smartctl) and that nobody writes the file"),
                )
                continue
            bad = np.flatnonzero(
                ~np.isfinite(e4m3_to_f32(got[:, : one.head_dim])).all(axis=1)
                | (got[:, one.head_dim :] == 0xFF).any(axis=1)
            )
            if len(bad):
                yield "fault", f"{where}: row {rows[bad[0]]} holds NaN", "fetch the shard again"
            else:
                how = "past the page cache" if one.direct else "through the page cache: no O_DIRECT here"
                yield "ok", f"{where}: {len(rows)} rows read {how}, finite, twice the same", ""


def disk_probe(base: Base) -> Findings:
    """How fast random rows come, as decode asks for them, and how fast the base can be read."""
    rate, direct = _row_rate(base)
    if rate is not None:
        text = f"random rows for {rate:,.0f} tokens/s{'' if direct else ' (with what the page cache has)'}"
        if rate < SLOW_TOKENS_S:
            yield "warning", f"{text}: decode will wait for the disk", "put the n-gram shards on a local NVMe disk"
        else:
            yield "ok", text, ""
    speed = _read_rate(base.path)
    text = f"{base.path.name} is read at {speed / 1e6:,.0f} MB/s: a load takes {base.file_bytes / speed:,.0f} s"
    if speed < SLOW_READ and base.file_bytes > SLOW_READ * 60:
        yield "warning", text, "put the base on a local SSD"
    else:
        yield "ok", text, ""


def _row_rate(base: Base) -> tuple[float | None, bool]:
    """Tokens a second whose rows, all tables', come at random places; and whether the page cache was passed."""
    if not base.config.engram_layer_ids:
        return None, True
    columns, tokens = base.config.engram_columns, 0
    random = np.random.default_rng()
    with _stores(base) as stores:
        begun = time.monotonic()
        while time.monotonic() - begun < PROBE_S:
            tickets = [s.prefetch(random.integers(0, s.n_rows, PROBE_TOKENS * columns)) for s in stores]
            for ticket in tickets:
                ticket.wait()
            tokens += PROBE_TOKENS
        return tokens / (time.monotonic() - begun), all(s.direct for s in stores)


def _read_rate(path: Path) -> float:
    """Bytes a second of reads of 1 MiB at random places; what the page cache has is told to be forgotten before."""
    size, done = path.stat().st_size, 0
    random = np.random.default_rng()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        begun = time.monotonic()
        while time.monotonic() - begun < PROBE_S:
            at = int(random.integers(0, max(1, size - READ_BYTES)))
            os.posix_fadvise(fd, at, READ_BYTES, os.POSIX_FADV_DONTNEED)
            done += len(os.pread(fd, READ_BYTES, at))
        return max(done, 1) / (time.monotonic() - begun)
    finally:
        os.close(fd)


def port_probe(host: str, port: int) -> Findings:
    """Free, a ds4 server, or somebody else's."""
    from ds4.server.listen import listen

    try:
        listen(host, port).close()
    except Ds4Error as e:
        if "is in use" not in str(e):
            raise
    else:
        yield "ok", f"{host}:{port} is free", ""
        return
    said = _health(host, port)
    if said is None:
        yield (
            "fault",
            f"{host}:{port} is taken by something that is no ds4 server",
            (f"end it (ss -ltnp 'sport = :{port}' names it), or choose another --port"),
        )
    elif said.get("status") in ("ok", "lent", "returning"):
        yield "ok", f"a ds4 server with {said.get('model')} answers on {host}:{port}: {said['status']}", ""
    else:
        yield (
            "warning",
            f"a ds4 server on {host}:{port} does not answer requests: {said.get('status')}",
            ("wait if it loads; else see its log (install.sh status names it)"),
        )


def _health(host: str, port: int) -> dict[str, Any] | None:
    """What /health says, if that is a ds4 server's."""
    where = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    connection = http.client.HTTPConnection(where, port, timeout=ANSWER_S)
    try:
        connection.request("GET", "/health")
        said = json.loads(connection.getresponse().read(1 << 20))
    except (OSError, http.client.HTTPException, ValueError, socket.gaierror):
        return None
    finally:
        connection.close()
    return said if isinstance(said, dict) and "status" in said and "queue" in said else None
