"""Windows of documents: two texts behind each other."""

from __future__ import annotations

import pytest

from ds4.errors import FileFormatError
from rulers.text import Text


def test_one_text_behind_another() -> None:
    a, b = Text.of([[1, 2, 3], [1, 4]], [0, 2]), Text.of([[1, 5], [1, 6, 7], [1]], [0, 0, 1])
    both = a.and_then(b, 3)
    assert both.ids.tolist() == [1, 2, 3, 1, 4, 1, 5, 1, 6, 7, 1]
    assert both.documents.tolist() == [0, 0, 0, 2, 2, 3, 3, 3, 3, 3, 4]
    assert both.windows.tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 4]
    assert both.ids.dtype == both.documents.dtype == both.windows.dtype == "int32"
    with pytest.raises(FileFormatError, match="has more than 2"):
        a.and_then(b, 2)
