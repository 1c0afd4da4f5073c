"""Write a training run's weights as a checkpoint in the released layout.

    python -m train.export [--work DIR] --run NAME -o FOLDER [--file FILE.pt] [--without-draft] [--force]

FP4 experts (each block's scale by least error), FP8 dense, the engram tables in the last two shards,
tokenizer.json, config.json. The folder is written beside its name, checked as `ds4 preflight` does, and renamed:
it is whole or not there. Prints bytes and relative rounding error of each part. A few seconds; no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4.checkpoint import codecs
from ds4.checkpoint.names import companion, expected
from ds4.checkpoint.preflight import preflight
from ds4.checkpoint.writer import Stored, encode, replace_file, write_checkpoint
from ds4.engram.tables import derive_tables
from ds4.errors import CapacityError, Ds4Error, FileFormatError, MissingTensorError, UsageError
from ds4.model.config import ModelConfig
from ds4.model.tokenizer import Tokenizer
from train.config import WORK
from train.weights import to_released

F32 = NDArray[np.float32]
N_SHARDS = 4
BUDGET_BYTES = 16_000_000  # what the tree has room for, beside corpora and logs
HEADER_BYTES = 1 << 20  # more than all safetensors headers and the index take


@dataclass(frozen=True)
class PartSize:
    """What a part of the model takes, and what rounding did to it: ||stored - trained|| / ||trained||."""

    part: str
    n_bytes: int
    error: float


def read_run(path: Path) -> tuple[dict[str, Any], dict[str, F32]]:
    """A training file -> (raw configuration, training state).

    Raises:
        FileFormatError: unreadable, or not a file that training wrote.
        UsageError: no PyTorch here.
    """
    try:
        import torch  # here alone: everything else works without it
    except ImportError as e:
        raise UsageError("PyTorch is not in this Python; run with train/.venv/bin/python (train/README.md)") from e
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        raw, weights = content["config"], content["weights"]
        return raw, {name: w.detach().float().numpy() for name, w in weights.items()}
    except OSError as e:
        raise FileFormatError(f"{path}: cannot be read ({e.strerror or e})") from e
    except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError) as e:
        why = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise FileFormatError(f"{path}: is not a whole file of this training ({why})") from e
    except (KeyError, TypeError, AttributeError, IndexError) as e:
        raise FileFormatError(f"{path}: has no `config` and `weights` as training writes them") from e


def find_run(work: Path, run: str, file: str | None) -> Path:
    """The run's training file: `file`, or the newest *.pt.

    Raises:
        UsageError: there is no such run or file; says which there are.
    """
    runs = work / "runs"
    folder = runs / run
    if not folder.is_dir():
        there = ", ".join(sorted(p.name for p in runs.iterdir() if p.is_dir())) if runs.is_dir() else ""
        raise UsageError(f"{folder}: no such run; {f'there are {there}' if there else f'there is none in {runs}'}")
    files = sorted(folder.glob("*.pt"), key=lambda p: (p.stat().st_mtime_ns, p.name))
    if file is not None:
        if not (folder / file).is_file():
            raise UsageError(f"{folder / file}: no such file; there are {', '.join(p.name for p in files) or 'none'}")
        return folder / file
    if not files:
        raise UsageError(f"{folder}: holds no *.pt yet; train first")
    return files[-1]


def without_draft(raw: Mapping[str, Any], state: Mapping[str, F32]) -> tuple[dict[str, Any], dict[str, F32]]:
    """The same model with no draft stages: configuration and state."""
    shorter: dict[str, Any] = json.loads(json.dumps(raw))
    text = shorter.get("text_config", shorter)
    text["compress_ratios"] = text["compress_ratios"][: text["num_hidden_layers"]]
    text["num_nextn_predict_layers"] = 0
    return shorter, {name: w for name, w in state.items() if not name.startswith("mtp.")}


def sizes(config: ModelConfig, weights: Mapping[str, F32], stored: Stored) -> list[PartSize]:
    """Bytes and rounding error of each part, largest first."""
    n_bytes: dict[str, int] = {}
    sums: dict[str, NDArray[np.float64]] = {}
    specs = expected(config)
    for name, (_, value) in stored.items():
        part = specs[name].part
        n_bytes[part] = n_bytes.get(part, 0) + value.nbytes
        if name in weights:
            w = weights[name].astype(np.float64)
            moved = np.square(_back(stored, name) - w).sum()
            sums[part] = sums.get(part, np.zeros(2)) + (moved, np.square(w).sum())
    order = sorted(n_bytes, key=lambda part: -n_bytes[part])
    return [PartSize(part, n_bytes[part], _relative(*sums[part])) for part in order]


def export(
    raw: Mapping[str, Any], state: Mapping[str, F32], tokenizer: Path, folder: Path, *, force: bool = False
) -> list[PartSize]:
    """Write `folder`, complete.

    Args:
        raw: configuration in config.json's spelling; written as it is.
        state: training state (weights.py).
        tokenizer: the run's tokenizer.json; must belong to the configuration.
        force: replace a folder that an export wrote.

    Raises:
        MissingTensorError: the state does not fill the configuration.
        FileFormatError: the tokenizer is another model's, or something cannot be written.
        UsageError: the folder may not be written.
        CapacityError: more than the budget, or than the disk has free.
    """
    check_folder(folder, force)
    config = ModelConfig.from_json(raw, "the run's configuration")
    derive_tables(config, Tokenizer.from_file(tokenizer, config))
    weights = to_released(config, state)
    stored = encode(config, weights, fit_scales=True)
    out = sizes(config, weights, stored)
    check_room(folder, sum(s.n_bytes for s in out) + tokenizer.stat().st_size)
    part = folder.with_name(folder.name + ".part")
    try:
        shutil.rmtree(part, ignore_errors=True)  # of an export that was interrupted
        part.mkdir()
        replace_file(part / "tokenizer.json", tokenizer.read_bytes())
        write_checkpoint(part, stored, config.engram_layer_ids, N_SHARDS)
        replace_file(part / "config.json", json.dumps(raw, indent=2).encode() + b"\n")
        problems = preflight(part)
        if problems:
            raise FileFormatError(f"what was written does not read back: {problems[0]}")
        _publish(part, folder)
    except OSError as e:
        raise FileFormatError(f"{folder}: cannot be written ({e.strerror or e})") from e
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return out


def check_folder(folder: Path, force: bool) -> None:
    """Refuse a folder that may not be written.

    Raises:
        UsageError: its parent is not there; it exists, unless `force` and everything in it is an export's.
    """
    if not folder.name or not folder.parent.is_dir():
        raise UsageError(f"{folder}: no such folder to write it in; make {folder.parent} first")
    if not os.path.lexists(folder):
        return
    if not force:
        raise UsageError(f"{folder}: is there already; --force replaces it")
    if folder.is_symlink() or not folder.is_dir():
        raise UsageError(f"{folder}: is no folder; name another")
    ours = ("config.json", "tokenizer.json", "model.safetensors.index.json")
    other = [p.name for p in sorted(folder.iterdir()) if p.name not in ours and not p.match("model-*.safetensors")]
    if other:
        raise UsageError(f"{folder}: holds {other[0]}, which no export wrote; --force does not delete it")


def check_room(folder: Path, n_bytes: int) -> None:
    """Refuse what is over the budget or over the disk.

    Raises:
        CapacityError: how much is needed and how much there is.
    """
    if n_bytes > BUDGET_BYTES:
        raise CapacityError(
            f"the checkpoint takes {n_bytes / 1e6:.2f} MB, the tree has room for {BUDGET_BYTES / 1e6:.0f} MB; "
            "train a smaller configuration (dspark_markov_rank, experts)"
        )
    free, need = shutil.disk_usage(folder.parent).free, n_bytes + HEADER_BYTES
    if free < need:
        raise CapacityError(
            f"{folder}: needs {need / 1e6:.1f} MB, {free / 1e6:.1f} MB are free in {folder.parent}; make room"
        )


def _publish(part: Path, folder: Path) -> None:
    """`part` becomes `folder`; a folder that was there goes once its successor has the name."""
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    handle = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(handle)  # the names themselves
    finally:
        os.close(handle)


def _back(stored: Stored, name: str) -> F32:
    """A stored weight as a reader dequantises it."""
    dtype, value = stored[name]
    if dtype == "F32":
        return np.asarray(value, np.float32)
    if dtype == "BF16":
        return codecs.bf16_to_f32(value)
    scale = stored[companion(name)][1]
    if dtype == "I8":
        return codecs.dequant_fp4(value, scale)
    if name.endswith(".engram.embed.weight"):
        return codecs.dequant_engram(value, scale)
    return codecs.dequant_fp8(value, scale)


def _relative(moved: float, whole: float) -> float:
    return float(np.sqrt(moved / whole)) if whole else 0.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="train.export", description="Write a run as a released-style checkpoint.")
    parser.add_argument("--work", type=Path, default=WORK, help=f"working folder (default {WORK})")
    parser.add_argument("--run", required=True, help="run to export, a folder of DIR/runs")
    parser.add_argument("--file", help="its training file (default: the newest *.pt)")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--without-draft", action="store_true", help="leave the draft stages out")
    parser.add_argument("--force", action="store_true", help="replace a folder that an export wrote")
    args = parser.parse_args(argv)
    try:
        check_folder(args.output, args.force)
        path = find_run(args.work, args.run, args.file)
        raw, state = read_run(path)
        if args.without_draft:
            raw, state = without_draft(raw, state)
        refuse_no_draft(raw, state, path)
        parts = export(raw, state, args.work / "tokenizer.json", args.output, force=args.force)
    except Ds4Error as e:
        print(f"train.export: {e}", file=sys.stderr)
        for line in e.problems[:20] if isinstance(e, MissingTensorError) and len(e.problems) > 1 else ():
            print(f"  {line}", file=sys.stderr)
        return 2 if isinstance(e, UsageError) else 1
    print(f"{path} -> {args.output}")
    print(f"{'part':<12}{'bytes':>12}  relative error")
    for p in parts:
        print(f"{p.part:<12}{p.n_bytes:>12,}  {p.error:.5f}")
    total = sum(p.stat().st_size for p in args.output.iterdir())
    print(f"{'all files':<12}{total:>12,}  of {BUDGET_BYTES:,}")
    return 0


def refuse_no_draft(raw: Mapping[str, Any], state: Mapping[str, F32], path: Path) -> None:
    """A run of the trunk alone, under a configuration that has draft stages.

    Raises:
        MissingTensorError: says how to go on.
    """
    n = ModelConfig.from_json(raw, str(path)).num_nextn_predict_layers
    if n and not any(name.startswith("mtp.") for name in state):
        raise MissingTensorError(
            f"{path}: has no weights of the {n} draft stages that its configuration calls for; "
            "train them (python -m train.draft), or export with --without-draft"
        )


if __name__ == "__main__":
    sys.exit(main())
