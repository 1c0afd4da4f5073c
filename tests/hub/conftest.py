"""A hub for each test, and no trace of the developer's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hub.server import DEVELOPERS, HubServer, hub_server


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    for name in DEVELOPERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", "/nonexistent/token")  # for commands
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nonexistent/token")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", False)
    with hub_server() as made:
        yield made
