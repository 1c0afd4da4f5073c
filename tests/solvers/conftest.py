"""One BLAS thread: products are small here, and on a busy machine more threads wait for each other, tenfold."""

from collections.abc import Iterator

import pytest
from threadpoolctl import threadpool_limits


@pytest.fixture(scope="package", autouse=True)
def _one_blas_thread() -> Iterator[None]:
    with threadpool_limits(1, user_api="blas"):
        yield
