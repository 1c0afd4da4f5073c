"""The solver's targets: what the original's experts read, gave and chose, per layer and fitting token. One file.

prefix    "DS4FIX01", u64 bytes of the header, 32 bytes of its SHA-256
header    JSON, `Head`: whose they are, and each array's offset, dtype, shape and SHA-256
arrays    ids, documents, windows i32 [T]; for each layer L: L.input, L.output [T, D] (f32, or bf16 as u16),
          L.picks u16 [T, k] in rising ids, L.weights f32 [T, k]; each at a multiple of 4,096

Written by a walk of the teacher (ds4/teacher/walk.py): one layer's dense part and one expert in memory at a time. A
killed run goes on at the layer that it was in, from NAME.part, its journal, and NAME.part.walk, and gives the same
bytes. A layer's hashes are compared each time it is read.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4.base.output import Output
from ds4.checkpoint.codecs import bf16_to_f32, f32_to_bf16
from ds4.corpus import Document
from ds4.errors import CapacityError, FileFormatError, UsageError
from ds4.teacher.files import check_output
from ds4.teacher.run import Teacher
from ds4.teacher.tasks import Helpers
from ds4.teacher.walk import Moe, Walk
from rulers.identity import model_fingerprint
from rulers.text import Text

MAGIC = b"DS4FIX01"
PREFIX = struct.Struct("<8sQ32s")
ALIGN = 4096
DTYPES = ("f32", "bf16")
TEXT = ("ids", "documents", "windows")
NO_HASH = "0" * 64
REMEDY = "remove the file and make it again"
_KINDS = {"<f4", "<u2", "<i4"}

Progress = Callable[[int, int], None]  # layers done, layers
F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Target:
    """One layer's part, T rows. Inputs and outputs are float32 whatever the file stores; the rest as in the file."""

    input_TD: F32
    output_TD: F32
    picks_Tk: NDArray[np.int64]
    weights_Tk: F32


class Fixture:
    """An opened fixture, its arrays mapped. `head` is the header."""

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        self.path, self.head = path, head

    @staticmethod
    def open(path: str | Path) -> Fixture:
        """Check prefix, header and size, and the text's arrays; a layer is checked when it is read.

        Raises:
            FileFormatError: unreadable, cut short, changed, or not a fixture; names file and part.
        """
        p = Path(path)
        try:
            with open(p, "rb") as f:
                prefix = f.read(PREFIX.size)
                if len(prefix) < PREFIX.size or prefix[:8] != MAGIC:
                    raise FileFormatError(f"{p}: not a fixture (it begins with {prefix[:8]!r})")
                _, n_bytes, digest = PREFIX.unpack(prefix)
                raw = f.read(min(n_bytes, 1 << 28))
                size = f.seek(0, 2)
        except OSError as e:
            raise FileFormatError(f"{p}: cannot be read ({e.strerror or e})") from e
        if hashlib.sha256(raw).digest() != digest:
            raise FileFormatError(f"{p}: its header was changed or cut short; {REMEDY}")
        fixture = Fixture(p, json.loads(raw))
        if fixture.head["bytes"] != size:
            raise FileFormatError(f"{p}: has {size} bytes, its header says {fixture.head['bytes']}; {REMEDY}")
        assert len(fixture.text) == fixture.n_tokens
        return fixture

    @property
    def n_layers(self) -> int:
        return int(self.head["layers"])

    @property
    def n_tokens(self) -> int:
        return int(self.head["tokens"])

    @cached_property
    def text(self) -> Text:
        """The fitting tokens."""
        return Text(*(np.array(self._array(name)) for name in TEXT))

    @property
    def sources(self) -> list[str]:
        """Source of each token's document, T names."""
        names: dict[str, str] = self.head["sources"]
        return [names[str(d)] for d in self.text.documents.tolist()]

    def layer(self, layer: int) -> Target:
        """One layer's targets, in memory.

        Raises:
            FileFormatError: an array is not what was written; names file, layer and array.
        """
        stored = [self._array(f"{layer}.{part}") for part in ("input", "output", "picks", "weights")]
        read = bf16_to_f32 if self.head["dtype"] == "bf16" else np.array
        return Target(read(stored[0]), read(stored[1]), stored[2].astype(np.int64), np.array(stored[3]))

    def verify(self) -> None:
        """Compare every array with its hash; FileFormatError names the first that differs."""
        for name in self.head["arrays"]:
            self._array(name)

    def require(self, model: str, what: str) -> None:
        """Refuse to be used with another model than the one whose targets these are.

        Args:
            model: fingerprint of `what`, a base or checkpoint.

        Raises:
            UsageError: they differ.
        """
        if self.head["model"] != model:
            raise UsageError(
                f"{self.path} holds targets of model {self.head['model']}, {what} is model {model}; "
                "teacher and base must be the same model"
            )

    def _array(self, name: str) -> NDArray[Any]:
        entry = self.head["arrays"].get(name)
        if entry is None:
            raise UsageError(f"{self.path}: has no {name}; it has {self.n_layers} layers")
        if entry["dtype"] not in _KINDS:
            raise FileFormatError(f"{self.path}: {name} is {entry['dtype']}, which no array here is")
        array = np.memmap(self.path, entry["dtype"], "r", entry["offset"], tuple(entry["shape"]))
        if hashlib.sha256(array.data).hexdigest() != entry["sha256"]:
            raise FileFormatError(f"{self.path}: {_where(name)} is not what was written there; {REMEDY}")
        return array


def _where(name: str) -> str:
    layer, _, part = name.partition(".")
    return f"{part} of layer {layer}" if part else name


@dataclass(frozen=True)
class Plan:
    """A fixture that can be made: its size is known before anything is read.

    Attributes:
        head: the header with NO_HASH in place of hashes.
        offset: where the first array begins.
    """

    out: Path
    head: dict[str, Any]
    text: Text

    @property
    def nbytes(self) -> int:
        return int(self.head["bytes"])

    def describe(self, walk_bytes: int) -> str:
        """What will be written, in a line for people."""
        h = self.head
        return (
            f"{self.out}: {self.nbytes:,} bytes: {h['layers']} layers, input and output of {h['tokens']:,} tokens x "
            f"{h['width']:,} channels in {h['dtype']}; while it works {walk_bytes:,} bytes beside it, at most twice"
        )


def plan_fixture(
    out: str | Path,
    teacher: Teacher,
    text: Text,
    documents: Sequence[Document],
    *,
    domain: str,
    split: str = "fit",
    dtype: str = "f32",
) -> Plan:
    """Lay a fixture out.

    Args:
        text: fitting tokens; its document numbers count `documents`.
        dtype: of inputs and outputs: "f32", or "bf16", half as large and rounded to nearest even.

    Raises:
        UsageError: another dtype, or an output that cannot be.
    """
    if dtype not in DTYPES:
        raise UsageError(f"a fixture's dtype {dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
    path = check_output(out, ".fixture")
    c, n = teacher.config, len(text)
    wide, k = ("<f4" if dtype == "f32" else "<u2"), c.num_experts_per_tok
    arrays: dict[str, tuple[str, tuple[int, ...]]] = dict.fromkeys(TEXT, ("<i4", (n,)))
    for layer in range(c.num_hidden_layers):
        arrays[f"{layer}.input"] = arrays[f"{layer}.output"] = (wide, (n, c.hidden_size))
        arrays[f"{layer}.picks"], arrays[f"{layer}.weights"] = ("<u2", (n, k)), ("<f4", (n, k))
    head: dict[str, Any] = {
        "format": 1, "model": model_fingerprint(teacher.stream.source), "arithmetic": f"f32 {teacher.arith}",
        "domain": domain, "split": split, "dtype": dtype,
        "tokens": n, "text": text.digest, "layers": c.num_hidden_layers, "width": c.hidden_size,
        "experts": c.n_routed_experts, "used": k,
        "sources": {str(d): documents[d].source for d in sorted(set(text.documents.tolist()))},
        "bytes": 0, "arrays": {},
    }  # fmt: skip
    # offsets are as many digits as there are, so the header's room is settled by a first guess that is larger
    room = PREFIX.size + len(_header_json(head)) + 256 * len(arrays)
    at = -(-room // ALIGN) * ALIGN
    for name, (kind, shape) in arrays.items():
        head["arrays"][name] = {"offset": at, "dtype": kind, "shape": list(shape), "sha256": NO_HASH}
        nbytes = np.dtype(kind).itemsize * int(np.prod(shape))
        at += -(-nbytes // ALIGN) * ALIGN
    head["bytes"] = at
    return Plan(path, head, text)


def make_fixture(
    plan: Plan,
    teacher: Teacher,
    *,
    say: Callable[[str], None] | None = None,
    progress: Progress | None = None,
    helpers: Helpers | None = None,
) -> Fixture:
    """Walk the teacher over the plan's text and write the file; goes on where a killed run of the same plan stopped.

    A finished file of the same plan is used as it is.

    Args:
        say: gets the sizes before the work starts.
        progress: called after every layer.
        helpers: who else computes experts, with the same bits.

    Raises:
        CapacityError: the disk cannot hold it (known before the work), or a window is too long.
        UsageError: another process is writing the same file, or another fixture is there.
        FileFormatError: what is there is broken.
        Ds4Error: a value is not finite.
    """
    saved = plan.out.with_name(plan.out.name + ".part.walk")
    if plan.out.exists():
        saved.unlink(missing_ok=True)  # killed between the last two names
        return _already(plan)
    key = hashlib.sha256(_header_json(plan.head)).hexdigest()
    windows = [plan.text.ids[part] for part in plan.text.slices]
    walk = Walk(teacher, windows, helpers)
    if say is not None:
        say(plan.describe(walk.saved_bytes))
    _require_room(plan, walk.saved_bytes)
    with Output(plan.out, plan.nbytes, key) as target:
        if walk.load(saved, key) and any(f"{layer}" not in target.done for layer in range(walk.layer)):
            walk = Walk(teacher, windows, helpers)  # the part file was lost
        for name in TEXT:
            _put(plan, target, name, getattr(plan.text, name))
        while not walk.done:
            found = walk.advance()
            _put_layer(plan, target, found)
            target.commit()  # before the walk says that this layer is behind
            walk.save(saved, key)
            if progress is not None:
                progress(walk.layer, int(plan.head["layers"]))
        _finish(plan, target)
        target.publish()
    saved.unlink(missing_ok=True)
    return Fixture.open(plan.out)


def _already(plan: Plan) -> Fixture:
    fixture = Fixture.open(plan.out)
    blank = {name: {**entry, "sha256": NO_HASH} for name, entry in fixture.head["arrays"].items()}
    if {**fixture.head, "arrays": blank} != plan.head:
        raise UsageError(f"{plan.out}: another fixture is there; remove it, or choose another name")
    return fixture


def _require_room(plan: Plan, walk_bytes: int) -> None:
    """The file itself is reserved by `Output`; what lies beside it is asked for here, before anything is written."""
    part = plan.out.with_name(plan.out.name + ".part")
    there = part.is_file() and part.stat().st_size == plan.nbytes
    need = 2 * walk_bytes + (0 if there else plan.nbytes)
    free = shutil.disk_usage(plan.out.parent).free
    if free < need:
        raise CapacityError(
            f"{plan.out}: needs {need:,} bytes while it is made, {free:,} are free in {plan.out.parent}; "
            "make room, take fewer tokens, or bf16"
        )


def _put_layer(plan: Plan, target: Output, found: Moe) -> None:
    wide = f32_to_bf16 if plan.head["dtype"] == "bf16" else np.asarray
    for part, array in (
        ("input", wide(found.input_TD)), ("output", wide(found.output_TD)),
        ("picks", found.picks_Tk), ("weights", found.mix_Tk),
    ):  # fmt: skip
        _put(plan, target, f"{found.layer}.{part}", array)
    target.finish(str(found.layer), {})


def _put(plan: Plan, target: Output, name: str, array: NDArray[Any]) -> None:
    entry = plan.head["arrays"][name]
    stored = np.ascontiguousarray(array, entry["dtype"])
    assert list(stored.shape) == entry["shape"]
    target.write(entry["offset"], stored.data)
    target.finish(name, {"sha256": hashlib.sha256(stored.data).hexdigest()})


def _finish(plan: Plan, target: Output) -> None:
    """The header, with what each array's hash is."""
    entries = {name: {**entry, **target.done[name]} for name, entry in plan.head["arrays"].items()}
    raw = _header_json({**plan.head, "arrays": entries})
    target.write(0, PREFIX.pack(MAGIC, len(raw), hashlib.sha256(raw).digest()) + raw)


def _header_json(head: dict[str, Any]) -> bytes:
    return json.dumps(head, ensure_ascii=False, separators=(",", ":")).encode()
