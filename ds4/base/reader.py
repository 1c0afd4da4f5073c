"""Base: an opened base file. Maps it, checks it, hands out views; refuses what it does not know.

A load reads the header, the engram tables, and of every expert blob the headers, gains and codebook: some
hundred megabytes of the released 114 GB. The index streams and dense weights are read when somebody uses
them; `ds4 verify` reads everything. Engram rows stay in their shards, which must be there and of the right size.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4.base import codecs, metadata, shards, tokens
from ds4.base.blob import ExpertBlob
from ds4.base.gguf import Container, TensorInfo, read_container
from ds4.base.plan import PlannedTensor, expert_shapes, plan
from ds4.base.shards import EngramTableRef
from ds4.base.types import DENSE_TYPES, I32, I64, PLAIN_TYPES, TYPES, VQBLOB
from ds4.errors import FileFormatError, MissingTensorError
from ds4.model.config import ModelConfig

BaseTensor = TensorInfo
U8 = NDArray[np.uint8]
_ACCEPTED: dict[str, tuple[int, ...]] = {
    "dense": DENSE_TYPES, "exact": DENSE_TYPES, "bf16": DENSE_TYPES, "f32": PLAIN_TYPES,
    "i32": (I32,), "i64": (I64,), "blob": (VQBLOB,),
}  # fmt: skip
_OPTIONAL = ("exp_probs_b_vl.bias", "v.")


class EngramTensors:
    """The hash tables as stored, with the engram layer as the first axis: token_map i32 [V], multipliers
    i64 [G, n], primes i64 [G, n-1, heads], offsets i64 [G, columns]."""

    def __init__(
        self,
        token_map: NDArray[np.int32],
        multipliers: NDArray[np.int64],
        primes: NDArray[np.int64],
        offsets: NDArray[np.int64],
    ) -> None:
        self.token_map, self.multipliers, self.primes, self.offsets = token_map, multipliers, primes, offsets


class Base:
    """A base file that passed the checks of `open`. Views stay valid as long as the object lives."""

    def __init__(self, container: Container, config: ModelConfig, fd: int) -> None:
        self.path: Path = container.path
        self.config = config
        self.metadata: dict[str, Any] = container.metadata
        self.tensors: dict[str, BaseTensor] = container.tensors
        self.file_bytes = container.file_bytes
        self.load_reads: list[tuple[int, int]] = []  # (offset, bytes) that the checks of `open` read
        self._fd = fd
        self._map: U8 = np.memmap(container.path, np.uint8, "r")
        self._experts: dict[str, ExpertBlob] = {}
        self._tables: EngramTensors | None = None
        self._refs: list[EngramTableRef] = []

    def __del__(self) -> None:
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)

    @staticmethod
    def open(path: str | Path, engram_dir: str | Path | None = None, *, with_shards: bool = True) -> Base:
        """Map a base and check everything that a load promises.

        Args:
            engram_dir: where the engram shards are, and nowhere else; None: beside the base.
            with_shards: False leaves the shards alone (for a listing of the file).

        Raises:
            FileFormatError: the file, or an engram shard, is broken, absent, or of an unknown kind.
            MissingTensorError: tensors are missing, extra or misshapen; `problems` has one line each.
        """
        container = read_container(path)
        token_map = _token_map(container)
        config = metadata.to_config(container.metadata, token_map, str(container.path))
        planned = {t.name: t for t in plan(config)}
        _check_inventory(container, planned)
        tokens.from_metadata(container.metadata, config.vocab_size, str(container.path))
        base = Base(container, config, os.open(container.path, os.O_RDONLY | os.O_CLOEXEC))
        base._check_tables()
        for t in planned.values():
            if t.kind == "blob":
                prefix = t.name.removesuffix(".ffn_exps_vq.blob")
                base._experts[prefix] = base._open_blob(t)
        if with_shards:
            base._refs = shards.resolve(base.metadata, config, base.path, engram_dir)
        return base

    # -- what callers use --

    def raw(self, name: str) -> U8:
        """The tensor's bytes, a read-only view of the mapped file.

        Raises:
            MissingTensorError: there is no such tensor.
        """
        t = self._info(name)
        return self._map[t.offset : t.offset + t.nbytes]

    def tensor(self, name: str) -> NDArray[np.float32]:
        """f32 [rows, cols] (or [n]), dequantised; a copy.

        Raises:
            MissingTensorError: there is no such tensor.
            ValueError: routed experts, which `experts` gives one at a time.
        """
        t = self._info(name)
        if t.type_id == VQBLOB:
            raise ValueError(f"{name} holds experts: use experts()")
        return codecs.decode(self.raw(name), t.type_id, t.dims)

    def experts(self, prefix: str) -> ExpertBlob:
        """The routed experts of "blk.N" or "mtp.T"."""
        if prefix not in self._experts:
            raise MissingTensorError(f"{self.path}: there are no experts {prefix!r}")
        return self._experts[prefix]

    def engram_tensors(self) -> EngramTensors:
        """Token map, multipliers, primes and offsets; checked against the tables' sizes at load."""
        if self._tables is None:
            raise MissingTensorError(f"{self.path}: the model has no engram layers")
        return self._tables

    def engram_table(self, g: int) -> EngramTableRef:
        """Where the rows of engram layer g are."""
        if not 0 <= g < len(self._refs):
            raise MissingTensorError(f"{self.path}: engram table {g} of {len(self._refs)}")
        return self._refs[g]

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where other files of its checkpoint may lie: beside it, and beside its shards."""
        return tuple(dict.fromkeys([self.path.parent, *(ref.path.parent for ref in self._refs)]))

    def tokenizer_data(self) -> tokens.TokenizerData:
        """What a tokenizer is built from."""
        return tokens.from_metadata(self.metadata, self.config.vocab_size, str(self.path))

    # -- checks --

    def _info(self, name: str) -> BaseTensor:
        t = self.tensors.get(name)
        if t is None:
            raise MissingTensorError(f"{self.path}: there is no tensor {name!r}")
        return t

    def _open_blob(self, planned: PlannedTensor) -> ExpertBlob:
        t = self.tensors[planned.name]

        def read(at: int, n: int) -> bytes:
            self.load_reads.append((t.offset + at, n))
            data = os.pread(self._fd, n, t.offset + at)
            if len(data) != n:
                raise FileFormatError(f"{self.path}: tensor {t.name} could not be read; did the file change?")
            return data

        shapes = expert_shapes(self.config)
        where = f"{self.path}: tensor {t.name}"
        return ExpertBlob(where, self.raw(t.name), read, planned.n_expert, shapes, planned.layer)

    def _check_tables(self) -> None:
        c = self.config
        n_tables = len(c.engram_layer_ids)
        if not n_tables:
            return

        def table(name: str, dtype: str, *shape: int) -> NDArray[Any]:
            return self.raw(f"engram.{name}").view(dtype).reshape(shape).copy()

        n, heads = c.engram_max_ngram_size, c.engram_n_heads
        t = EngramTensors(
            table("token_map", "<i4", c.vocab_size),
            table("multipliers", "<i8", n_tables, n),
            table("primes", "<i8", n_tables, n - 1, heads),
            table("offsets", "<i8", n_tables, c.engram_columns),
        )
        compressed = c.engram_compressed_vocab_size
        self._in_range("token_map", t.token_map, 0, compressed - 1)
        self._in_range("multipliers", t.multipliers, 1, (2**63 - 1) // max(compressed - 1, 1))
        self._in_range("primes", t.primes, 1, 2**62)
        for g, rows in enumerate(c.engram_num_embeddings):
            self._in_range("offsets", t.offsets[g], 0, rows)
            self._in_range("offsets", t.offsets[g] + t.primes[g].reshape(-1), 1, rows)
        self._tables = t

    def _in_range(self, name: str, values: NDArray[Any], least: int, most: int) -> None:
        flat = values.reshape(-1)
        bad = np.flatnonzero((flat < least) | (flat > most))
        if len(bad):
            i = int(bad[0])
            raise FileFormatError(
                f"{self.path}: engram.{name} has {flat[i]} in place {i}, outside {least}..{most}: "
                "it does not belong to these tables"
            )


def _token_map(container: Container) -> NDArray[np.int32] | None:
    t = container.tensors.get("engram.token_map")
    if t is None or t.type_id != I32:
        return None
    return np.fromfile(container.path, "<i4", t.nbytes // 4, offset=t.offset)


def _check_inventory(container: Container, planned: dict[str, PlannedTensor]) -> None:
    problems = []
    for name, want in planned.items():
        t = container.tensors.get(name)
        if t is None:
            if not name.startswith("v.") and not name.endswith(_OPTIONAL[0]):
                problems.append(f"missing: {name}")
        elif t.type_id not in _ACCEPTED[want.kind]:
            allowed = ", ".join(TYPES[i].name for i in _ACCEPTED[want.kind])
            problems.append(f"wrong type: {name} is {TYPES[t.type_id].name}; allowed: {allowed}")
        elif t.dims != want.dims and want.kind != "blob":
            problems.append(f"wrong shape: {name} is {_x(t.dims)}, expected {_x(want.dims)}")
        elif want.kind == "blob" and len(t.dims) != 1:
            problems.append(f"wrong shape: {name} is {_x(t.dims)}, expected one dimension")
    unused_draft = not metadata.has_draft(container.metadata)
    for name in container.tensors.keys() - planned.keys():
        if not (unused_draft and name.startswith("mtp.")):
            problems.append(f"unknown: {name}")
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise MissingTensorError(f"{container.path}: {problems[0]}{more}", tuple(problems))


def _x(dims: tuple[int, ...]) -> str:
    return "x".join(map(str, dims))
