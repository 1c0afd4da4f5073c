"""Sessions on a device of the bench's choosing: one that watches, counts or times what the engine launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ds4.device import Device
from ds4.engine import Engine, Session
from ds4.engine.lane import Lane
from ds4.engine.scheduler import DraftPolicy
from ds4.engine.scratch import Workspace


def session_on(
    engine: Engine, device: Device, *, graphs: bool, policy: Callable[[], DraftPolicy] | None = None
) -> Session:
    """A new session of the engine's weights, on `device` or a view of it, apart from the engine's own sessions.

    Args:
        graphs: capture passes, or launch all directly.
        policy: makes what decides about drafts, one a prompt; None: plain decode, without a draft head.
    """
    options, config, draft = replace(engine.options, graphs=graphs), engine.config, None
    if policy is not None and engine.draft is not None:
        draft, config = engine.draft, replace(config, dspark_block_size=engine.block)
    lane = Lane(device, Workspace(device), config, engine.weights, engine.feed, options, draft)
    return Session(device, config, lane) if policy is None else Session(device, config, lane, policy)
