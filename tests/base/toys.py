"""Bases of the toy checkpoints, made once a process and shared by the tests of every room."""

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

from ds4.base.quantize import HashTables, quantize
from ds4.checkpoint.names import expected
from ds4.checkpoint.reader import Checkpoint
from ds4.checkpoint.safetensors import load_arrays
from ds4.checkpoint.writer import write_safetensors
from ds4.model.config import ModelConfig

DATA = Path(__file__).resolve().parents[1] / "data"


def process_folder(prefix: str) -> Path:
    """A temporary folder that goes with the process."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class ReferenceTables:
    """The engram tables that a fixture lists (its README: computed by the references)."""

    def __init__(self, folder: Path) -> None:
        a = load_arrays(folder / "reference.safetensors")
        self.token_map = a["engram.token_map"].astype("i4")
        self.multipliers, self.primes, self.offsets = (a[f"engram.{k}"] for k in ("multipliers", "primes", "offsets"))


@cache
def tables(name: str) -> HashTables:
    return ReferenceTables(DATA / name)


@cache
def toy_base(name: str, bits: int | None = None) -> Path:
    """The base of `oracle-a`, `-b` or `-e`; open it with engram_dir = toy_dir(name)."""
    folder = process_folder("ds4-toy-")
    out = folder / f"{name}.gguf"
    quantize(toy_dir(name), out, tables(name), bits=bits)
    return out


def toy_dir(name: str) -> Path:
    return DATA / name


class OneTable:
    """The first of a fixture's engram tables."""

    def __init__(self, whole: HashTables) -> None:
        self.token_map = whole.token_map
        self.multipliers, self.primes, self.offsets = (
            a[:1] for a in (whole.multipliers, whole.primes, whole.offsets)
        )


@cache
def small_checkpoint() -> tuple[Path, HashTables]:
    """Two layers of oracle-a with one engram table, without draft stages and vision: for tests that run it often."""
    folder = process_folder("ds4-small-")
    raw = json.loads((toy_dir("oracle-a") / "config.json").read_text())
    del raw["vision_config"]
    text = {k: v for k, v in raw["text_config"].items() if not k.startswith("dspark_")}
    text |= {
        "num_hidden_layers": 2, "compress_ratios": [0, 2], "kv_source_layer_ids": [1], "index_source_layer_ids": [1],
        "candidate_source_layer_id": -1, "engram_layer_ids": [1], "engram_num_embeddings": [434],
        "num_nextn_predict_layers": 0, "n_routed_experts": 3,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw | {"text_config": text}))
    source = Checkpoint.open(toy_dir("oracle-a"))
    stored = {}
    for name, spec in expected(ModelConfig.load(folder)).items():
        if name in source.infos:
            array = source.raw(name)
            stored[name] = (source.infos[name].dtype, array[:3] if ".ffn.gate." in name else array)
            assert stored[name][1].shape == spec.shape, name
    write_safetensors(folder / "model.safetensors", stored)
    shutil.copy(toy_dir("oracle-a") / "tokenizer.json", folder)
    return folder, OneTable(tables("oracle-a"))
