from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.work.cluster import two_workers


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    with two_workers() as address:
        yield address
