"""The embedded model, opened once: its tokenizer, its teacher, its base and an engine on it.

The base is the one that the benches keep in the build cache; it is quantized here if it is not there yet.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ds4 import embedded
from ds4.checkpoint.reader import Checkpoint
from ds4.engine import Engine
from ds4.model.config import ModelConfig
from ds4.model.tokenizer import Tokenizer
from ds4.teacher.run import Teacher
from ds4.teacher.source import CheckpointSource
from tests.conftest import opened

BENCH = Path(__file__).resolve().parents[2] / "bench"
if str(BENCH) not in sys.path:
    sys.path.append(str(BENCH))


@pytest.fixture(scope="session")
def config() -> ModelConfig:
    return ModelConfig.load(embedded.checkpoint())


@pytest.fixture(scope="session")
def tokenizer(config: ModelConfig) -> Tokenizer:
    return Tokenizer.from_file(embedded.checkpoint() / "tokenizer.json", config)


@pytest.fixture(scope="session")
def teacher() -> Teacher:
    return Teacher(CheckpointSource(Checkpoint.open(embedded.checkpoint())))


@pytest.fixture(scope="session")
def base() -> Path:
    from embedded import embedded_base  # bench's, not the package

    path: Path = embedded_base()[0]
    return path


@pytest.fixture(scope="module")
def engine(base: Path) -> Engine:
    """As it is served; a module's own, because a server closes the engine that it was given."""
    shards = embedded.checkpoint()
    return Engine.open(base, engram_dir=shards, prefill="replay", device=opened("fast", "greedy"))


def judge_ids(tokenizer: Tokenizer, domain: str, n: int) -> NDArray[np.int64]:
    """A BOS and the first n - 1 tokens of a domain's judge text, documents one after the other."""
    ids: list[int] = [tokenizer.special_id("<｜begin▁of▁sentence｜>")]
    for document in embedded.slice(domain, "judge"):
        ids += tokenizer.encode(document)
        if len(ids) >= n:
            return np.array(ids[:n], np.int64)
    raise AssertionError(f"{domain}: the judge text has fewer than {n} tokens")
