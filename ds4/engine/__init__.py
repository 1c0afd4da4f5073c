"""The model on a device: sessions that hold token sequences."""

from ds4.engine.engine import Engine
from ds4.engine.prefill import Cancelled
from ds4.engine.sampling import Sampling
from ds4.engine.session import Session, SessionSnapshot

__all__ = ["Cancelled", "Engine", "Sampling", "Session", "SessionSnapshot"]
