"""Which rows are held out."""

import numpy as np
import pytest

from ds4.errors import UsageError
from solvers.windows import WINDOW, held_out


def text(*documents: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """(source, rows) of each document -> document and source of each row."""
    lengths = [rows for _, rows in documents]
    return np.repeat(np.arange(len(documents)), lengths), np.repeat([s for s, _ in documents], lengths)


def test_every_fourth_window_of_one_document() -> None:
    held = held_out(*text((0, 9 * WINDOW)))
    assert np.flatnonzero(held.reshape(9, WINDOW).all(axis=1)).tolist() == [3, 7]
    assert held.sum() == 2 * WINDOW


def test_windows_do_not_cross_documents() -> None:
    """Windows of 128, 72, 128, 1: the fourth is one row."""
    held = held_out(*text((0, 200), (0, 129)))
    assert np.flatnonzero(held).tolist() == [200 + 128]


def test_every_source_alike() -> None:
    """Documents of three sources in turn: each has a quarter of its windows held out, to within one."""
    documents = text(*((i % 3, 5 * WINDOW) for i in range(9)))
    held = held_out(*documents)
    for source in range(3):
        windows = held[documents[1] == source].reshape(-1, WINDOW)
        assert np.array_equal(windows.all(axis=1), windows.any(axis=1))
        assert abs(windows.all(axis=1).sum() - 15 / 4) < 1


def test_small_sources_have_their_share_together() -> None:
    """Forty sources of one window: ten held out. Counting anew in each source would hold out none."""
    held = held_out(*text(*((s, WINDOW) for s in range(40))))
    assert held.sum() == 10 * WINDOW


def test_order_of_sources_in_the_text_does_not_matter() -> None:
    one = held_out(*text((0, 3 * WINDOW), (1, 5 * WINDOW)))
    two = held_out(*text((1, 5 * WINDOW), (0, 3 * WINDOW)))
    assert np.array_equal(one, np.concatenate([two[5 * WINDOW :], two[: 5 * WINDOW]]))


@pytest.mark.parametrize(
    ("documents", "sources", "message"),
    [
        (np.zeros(3 * WINDOW, int), np.zeros(3 * WINDOW, int), "3 windows"),
        (np.zeros(0, int), np.zeros(0, int), "0 windows"),
        (np.array([0, 0, 1, 1, 0]), np.zeros(5, int), "do not stand together"),
        (np.array([0, 0, 1, 1]), np.array([0, 1, 0, 0]), "two sources"),
        (np.array([0, 0, 1, 1]), np.zeros(3, int), r"\[3\]"),
    ],
)
def test_refusals(documents: np.ndarray, sources: np.ndarray, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        held_out(documents, sources)
