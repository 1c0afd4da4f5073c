"""The job: a checkpoint in the released layout becomes a base file.

Streams: one expert or a few thousand rows at a time, in file order, into `OUT.part` (output.py), which the
same command finishes after a kill, with the same bytes. What is written depends on checkpoint, bits, gain
rule and the kind of BLAS, never on workers or interruptions. Engram tables are not copied: the metadata say
in which shard and where they are. Leaves `OUT.report.json`: the relative squared error of every tensor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ds4.base import codecs, metadata, tokens
from ds4.base.blob import DIM, codebook_offset, encode_head, payload_slots
from ds4.base.codebook import POOL_PER_CODEWORD, SCHEDULE, Assigner, BlasAssigner, Workers, codewords, train
from ds4.base.expert_tasks import EXPERTS, CodebookTask, ExpertsTask, encode_expert, run_codebook, run_experts
from ds4.base.experts import DEFAULT_GAIN, GAINS, Gain, layer_pool
from ds4.base.gguf import Metadata, Value, header_bytes
from ds4.base.output import COMMIT_BYTES, Output, write_text
from ds4.base.plan import PlannedTensor, default_bits, expert_bits, expert_shapes, plan
from ds4.base.reader import Base
from ds4.base.source import as_rows, digest, matrix_rows
from ds4.base.types import FP8_32X32
from ds4.checkpoint.names import companion
from ds4.checkpoint.preflight import engram_shard_problems
from ds4.checkpoint.reader import Checkpoint
from ds4.errors import FileFormatError, UsageError
from ds4.work.tasks import Crew, ranges

QUANTIZER_VERSION = 1
DENSE_CHUNK = 1 << 21  # weights of one dense task

Progress = Callable[[str, int, int], None]  # (what was finished, bytes done, bytes in all)
Record = dict[str, Any]


class HashTables(Protocol):
    """The derived engram tables, as `ds4.engram.hash.derive_tables` gives them (G engram layers)."""

    @property
    def token_map(self) -> NDArray[np.int32]:
        """[V]"""

    @property
    def multipliers(self) -> NDArray[np.int64]:
        """[G, n]"""

    @property
    def primes(self) -> NDArray[np.int64]:
        """[G, n-1, heads]"""

    @property
    def offsets(self) -> NDArray[np.int64]:
        """[G, columns]"""


def quantize(
    checkpoint_dir: str | Path,
    out: str | Path,
    tables: HashTables | None = None,
    *,
    bits: int | Sequence[int] | None = None,
    gain: Gain = DEFAULT_GAIN,
    workers: int = 1,
    progress: Progress | None = None,
    assigner: Assigner | None = None,
    crew: Crew | None = None,
    overwrite: bool = False,
    commit_bytes: int = COMMIT_BYTES,
) -> Record:
    """Write the base of a checkpoint and return the report.

    Args:
        tables: the engram tables derived from the checkpoint's tokenizer; needed if it has engram layers.
        bits: index bits of the experts, see `plan.expert_bits`; None for the recipe.
        gain: the row gain's rule, see experts.py.
        workers: threads.
        progress: called after every finished unit.
        assigner: where codebooks are trained and vectors assigned; BLAS by default.
        crew: who quantizes ranges of experts; None: this process. It computes with BLAS.
        overwrite: replace an existing `out`.

    Raises:
        UsageError: arguments that cannot be; `out` exists.
        FileFormatError: the checkpoint is broken, or has a NaN. Nothing is left behind.
        CapacityError: the disk is full.
    """
    out = Path(out)
    if gain not in GAINS:
        raise UsageError(f"--gain is {gain!r}; expected one of {', '.join(GAINS)}")
    if out.exists() and not overwrite:
        raise UsageError(f"{out} exists; remove it or choose another name")
    if crew is not None and assigner is not None:
        raise UsageError(f"workers elsewhere assign with BLAS, not with {assigner.name}: add --assign blas")
    with Workers(workers, crew) as pool:
        job = _Job(Checkpoint.open(checkpoint_dir), tables, bits, gain, pool, assigner or BlasAssigner(pool))
        with Output(out, job.size, job.key(), commit_bytes) as target:
            try:
                job.run(target, progress or (lambda *_: None))
                report = job.finish(target)
            except (FileFormatError, UsageError):
                target.discard()
                raise
    return report


@dataclass
class _Layout:
    """Where everything goes."""

    metadata: Metadata
    offsets: list[int]
    size: int


class _Job:
    def __init__(
        self,
        checkpoint: Checkpoint,
        tables: HashTables | None,
        bits: int | Sequence[int] | None,
        gain: Gain,
        workers: Workers,
        assigner: Assigner,
    ) -> None:
        c = checkpoint.config
        self.checkpoint, self.config, self.tables, self.gain = checkpoint, c, tables, gain
        self.workers, self.assigner = workers, assigner
        if tables is None and c.engram_layer_ids:
            raise UsageError("the model has engram layers: their tables must be derived from its tokenizer first")
        if problems := engram_shard_problems(checkpoint.path, c, checkpoint.infos):
            raise FileFormatError(problems[0])  # the finished base could not be opened
        self.bits = expert_bits(c, bits)
        self.planned = plan(c, bits)
        self.metadata = self._metadata()
        infos = [(t.name, t.type_id, t.dims) for t in self.planned]
        head, self.offsets, self.size = header_bytes(self.metadata, infos)
        self.head_bytes = len(head)

    def key(self) -> str:
        """Everything that the bytes depend on, and the identity of the source files."""
        h = hashlib.sha256()
        infos = [(t.name, t.type_id, t.dims) for t in self.planned]
        h.update(header_bytes(self.metadata, infos)[0])
        h.update(repr((QUANTIZER_VERSION, SCHEDULE, self.assigner.name, self.gain)).encode())
        for name in sorted(self.checkpoint.infos):
            t = self.checkpoint.infos[name]
            h.update(repr((name, t.dtype, t.shape, t.file.name, t.offset)).encode())
        for file in sorted({t.file for t in self.checkpoint.infos.values()}):
            status = file.stat()
            h.update(repr((file.name, status.st_size, status.st_mtime_ns)).encode())
        return h.hexdigest()

    def run(self, target: Output, progress: Progress) -> None:
        crew = self.workers.crew
        done = 0 if crew is None else self._spread(crew, target, progress)
        for t, offset in zip(self.planned, self.offsets, strict=True):
            if t.kind == "blob":
                if crew is not None:
                    continue
                self._blob(t, offset, target, progress, done)
            elif t.name not in target.done:
                target.finish(t.name, self._small(t, offset, target))
            done += t.nbytes
            progress(t.name, done, self.size)

    def finish(self, target: Output) -> Record:
        """Header, self-check, report, final name."""
        report = self._report(target)
        self.metadata["ds4.source_hash"] = Value("str", report["source_hash"])
        self.metadata["ds4.layer_error"] = Value("[f32]", [layer["error"] for layer in report["layers"]])
        infos = [(t.name, t.type_id, t.dims) for t in self.planned]
        head, offsets, size = header_bytes(self.metadata, infos)
        assert (offsets, size) == (self.offsets, self.size)
        target.write(0, head)
        target.commit()
        Base.open(target.part, self.checkpoint.path)
        write_text(target.out.with_name(target.out.name + ".report.json"), json.dumps(report, indent=1) + "\n")
        target.publish()
        return report

    # -- metadata --

    def _metadata(self) -> Metadata:
        c, folder = self.config, self.checkpoint.path
        pad = int(self.tables.token_map[c.engram_pad_token_id]) if self.tables is not None else 0
        out = metadata.from_config(c, pad)
        for g, layer in enumerate(c.engram_layer_ids):
            path, weight_offset, scale_offset = self.checkpoint.engram_file(layer)
            out[f"deepseek4.engram.{g}.table_path"] = Value("str", path.name)
            out[f"deepseek4.engram.{g}.weight_offset"] = Value("u64", weight_offset)
            out[f"deepseek4.engram.{g}.scale_offset"] = Value("u64", scale_offset)
        file = folder / "tokenizer.json"
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise FileFormatError(f"{file}: cannot be read ({e}); a base carries its tokenizer") from e
        out.update(tokens.metadata_from_json(text, c.vocab_size, str(file)))
        out["ds4.quantizer_version"] = Value("u32", QUANTIZER_VERSION)
        out["ds4.recipe"] = Value("str", "default" if self.bits == default_bits(c) else "override")
        out["ds4.expert_bits"] = Value("[i32]", list(self.bits))
        out["ds4.gain"] = Value("str", self.gain)
        out["ds4.assigner"] = Value("str", self.assigner.name)
        out["ds4.source_hash"] = Value("str", "0" * 64)
        out["ds4.layer_error"] = Value("[f32]", [0.0] * len(self.bits))
        return out

    # -- dense and derived tensors --

    def _small(self, t: PlannedTensor, offset: int, target: Output) -> Record:
        if not t.source:
            assert self.tables is not None
            table = getattr(self.tables, t.name.removeprefix("engram."))
            data = np.ascontiguousarray(table, "<i4" if t.kind == "i32" else "<i8")
            if data.nbytes != t.nbytes:
                raise UsageError(f"{t.name}: the derived table has {data.shape}, expected {t.dims[::-1]}")
            target.write(offset, data.tobytes())
            return {}
        record = {"source": digest(self.checkpoint, [t.source])}
        if t.type_id == FP8_32X32 and self.checkpoint.infos[t.source].dtype == "F8_E4M3":
            return {**record, **self._copy_fp8(t, offset, target)}
        rows = len(as_rows(self.checkpoint.raw(t.source)))
        row_bytes = t.nbytes // rows
        cols = t.dims[0] if len(t.dims) > 1 else t.nbytes
        step = max(DENSE_CHUNK // cols // 32 * 32, 32) if t.type_id != FP8_32X32 else rows

        def run(part: slice) -> tuple[float, float]:
            x = matrix_rows(self.checkpoint, t.source, part)
            raw = codecs.encode(x, t.type_id)
            target.write(offset + part.start * row_bytes, raw.data)
            y = codecs.decode(raw, t.type_id, (x.shape[1], len(x)))
            return squares(x, y), squares(x)

        sums = np.sum(self.workers.map(run, rows, step), axis=0)
        return {**record, "error": ratio(*sums)}

    def _copy_fp8(self, t: PlannedTensor, offset: int, target: Output) -> Record:
        codes, scales = self.checkpoint.raw(t.source), self.checkpoint.raw(companion(t.source))
        if np.any((codes & 0x7F) == 0x7F) or np.any(scales == 0xFF):
            raise FileFormatError(f"{self.checkpoint.infos[t.source].file}: {t.source} has a NaN")
        target.write(offset, np.ascontiguousarray(codes).data)
        target.write(offset + codes.size, np.ascontiguousarray(scales).data)
        return {"error": 0.0}

    # -- experts --

    def _blob(self, t: PlannedTensor, offset: int, target: Output, progress: Progress, done: int) -> None:
        nc, shapes = 1 << t.bits, expert_shapes(self.config)
        slots = payload_slots(shapes, t.n_expert, nc)
        codebook = self._codebook(t, offset, target)
        loaded = False
        for e in range(t.n_expert):
            unit = f"{t.name}/{e}"
            if unit not in target.done:
                if not loaded:
                    self.assigner.load(codewords(codebook))
                    loaded = True
                target.finish(unit, self._expert(t, e, codebook, [offset + int(s) for s in slots[e]], target))
            progress(unit, done + t.nbytes * (e + 1) // t.n_expert, self.size)

    def _codebook(self, t: PlannedTensor, offset: int, target: Output) -> NDArray[np.uint8]:
        nc, shapes = 1 << t.bits, expert_shapes(self.config)
        unit = f"{t.name}/codebook"
        if unit in target.done:
            raw = target.read(offset + codebook_offset(t.n_expert), nc * DIM)
            return np.frombuffer(raw, np.uint8).reshape(nc, DIM)
        pool = layer_pool(self.checkpoint, t.source, t.n_expert, shapes, nc)
        codebook = train(pool, nc, self.assigner)
        self._put_codebook(t, offset, codebook, len(pool) / nc, target)
        return codebook

    def _put_codebook(
        self, t: PlannedTensor, offset: int, codebook: NDArray[np.uint8], pool_per_codeword: float, target: Output
    ) -> None:
        target.write(offset, encode_head(t.layer, expert_shapes(self.config), t.n_expert, codebook))
        target.finish(f"{t.name}/codebook", {"pool_per_codeword": pool_per_codeword})

    def _expert(
        self, t: PlannedTensor, e: int, codebook: NDArray[np.uint8], places: list[int], target: Output
    ) -> Record:
        payloads, record = encode_expert(
            self.checkpoint, t.source, e, t.n_expert, codebook, self.assigner, self.gain
        )  # fmt: skip
        for place, payload in zip(places, payloads, strict=True):
            target.write(place, payload)
        return record

    # -- experts, by others --

    def _spread(self, crew: Crew, target: Output, progress: Progress) -> int:
        """All blobs, a range of experts a task; the bytes that they have in all.

        Codebooks come first, so that experts of several layers are under way at once. One takes gigabytes of pool:
        they are trained side by side only by workers with memory of their own.
        """
        blobs = [(t, at) for t, at in zip(self.planned, self.offsets, strict=True) if t.kind == "blob"]
        shapes, folder = expert_shapes(self.config), str(self.checkpoint.path.resolve())
        if crew.remote:
            missing = [(t, at) for t, at in blobs if f"{t.name}/codebook" not in target.done]
            wanted = [CodebookTask(folder, t.source, t.n_expert, shapes, 1 << t.bits) for t, _ in missing]
            for (t, at), (codebook, share) in zip(missing, crew.run(run_codebook, wanted), strict=True):
                self._put_codebook(t, at, codebook, share, target)
        places, tasks, done = [], [], 0
        for t, at in blobs:
            codebook = self._codebook(t, at, target)
            for part in ranges(t.n_expert, EXPERTS):
                left = tuple(e for e in part if f"{t.name}/{e}" not in target.done)
                if left:
                    places.append((t, at))
                    tasks.append(ExpertsTask(folder, t.source, left, t.n_expert, self.gain, codebook))
                done += t.nbytes * (len(part) - len(left)) // t.n_expert
        for (t, at), task, made in zip(places, tasks, crew.run(run_experts, tasks), strict=True):
            slots = payload_slots(shapes, t.n_expert, 1 << t.bits)
            for e, (payloads, record) in zip(task.experts, made, strict=True):
                for slot, payload in zip(slots[e], payloads, strict=True):
                    target.write(at + int(slot), payload)
                target.finish(f"{t.name}/{e}", record)
                done += t.nbytes // t.n_expert
            progress(f"{t.name}/{task.experts[-1]}", done, self.size)
        return sum(t.nbytes for t, _ in blobs)

    # -- report --

    def _report(self, target: Output) -> Record:
        blobs = [t for t in self.planned if t.kind == "blob"]
        layers = [self._layer_report(t, target) for t in blobs]
        dense = {t.name: target.done[t.name]["error"] for t in self.planned if t.kind != "blob" and t.source}
        lines = [f"{unit} {r['source']}" for unit, r in sorted(target.done.items()) if "source" in r]
        return {
            "format": 1,
            "source_hash": hashlib.sha256("\n".join(lines).encode()).hexdigest(),
            "quantizer_version": QUANTIZER_VERSION,
            "assigner": self.assigner.name,
            "gain": self.gain,
            "bytes": self.size,
            "layers": layers,
            "dense_error": dense,
            "notes": _notes(layers),
        }

    def _layer_report(self, t: PlannedTensor, target: Output) -> Record:
        experts = [target.done[f"{t.name}/{e}"] for e in range(t.n_expert)]
        return {
            "name": t.name.removesuffix(".ffn_exps_vq.blob"),
            "bits": t.bits,
            "error": ratio(sum(r["error"] for r in experts), sum(r["energy"] for r in experts)),
            "pool_per_codeword": target.done[f"{t.name}/codebook"]["pool_per_codeword"],
            "lost_rows": sum(r["lost_rows"] for r in experts),
        }


def _notes(layers: list[Record]) -> list[str]:
    notes = []
    small = [layer["name"] for layer in layers if layer["pool_per_codeword"] < 1000]
    if small:
        notes.append(
            f"{len(small)} of {len(layers)} layers have fewer than 1,000 vectors a codeword (the pool aims at "
            f"{POOL_PER_CODEWORD}): the model is too small for a better codebook"
        )
    lost = sum(layer["lost_rows"] for layer in layers)
    if lost:
        notes.append(f"{lost} expert rows are beyond the range of f16 gains and were saturated or zeroed")
    return notes


def squares(x: NDArray[np.float32], y: NDArray[np.float32] | None = None) -> float:
    """sum (x - y)^2 in float64; y of any shape with as many values."""
    d = x.reshape(-1).astype(np.float64)
    if y is not None:
        d -= y.reshape(-1)
    return float(d @ d)


def ratio(error: float, energy: float) -> float:
    return float(error / energy) if energy > 0 else 0.0
