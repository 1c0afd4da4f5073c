"""The model on a device: sessions that hold token sequences.

Names are imported when used, so that an operator can be tested without the whole engine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds4.engine.engine import Engine
    from ds4.engine.prefill import Cancelled
    from ds4.engine.sampling import Sampling
    from ds4.engine.session import Session, SessionSnapshot
    from ds4.engine.together import Ask

__all__ = ["Ask", "Cancelled", "Engine", "Sampling", "Session", "SessionSnapshot"]
_HOMES = {
    "Ask": "together",
    "Cancelled": "prefill",
    "Engine": "engine",
    "Sampling": "sampling",
    "Session": "session",
    "SessionSnapshot": "session",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"ds4.engine has no {name}")
    return getattr(importlib.import_module(f"ds4.engine.{_HOMES[name]}"), name)
