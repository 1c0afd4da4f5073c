"""Ids that a user gives, judged against the model before it works."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds4.errors import RequestError
from ds4.model.config import ModelConfig
from ds4.teacher.run import check_ids


def model_ids(given: NDArray[Any], config: ModelConfig, where: str) -> NDArray[np.int64]:
    """`given` as i64 [T], T within the model's context.

    Raises:
        RequestError: what is wrong with them; starts with `where`, the file that they are from.
    """
    try:
        ids = check_ids(given, config.vocab_size)
        check_length(len(ids), config)
    except RequestError as e:
        raise RequestError(f"{where}: {e}", e.param, e.code) from e
    return ids


def check_length(n: int, config: ModelConfig) -> None:
    """Raises RequestError when `n` tokens exceed the model's context."""
    if n > config.max_position_embeddings:
        raise RequestError(f"{n} tokens exceed the model's context of {config.max_position_embeddings}", "ids")
