"""Chinese: manual pages and the help of an office suite."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from train.packages import Package, members
from train.sources import Source
from train.sources.text import decode, maybe_gunzip, text_of_html, text_of_roff

HAN = re.compile("[一-鿿]")
# A page that is mostly English words would teach nothing about Chinese.
LEAST_SHARE = 0.15


def _wanted(paragraph: str) -> bool:
    """Not navigation, and not a sentence that nobody has translated."""
    return (
        "\U0001f50e" not in paragraph and paragraph != "目录" and (len(paragraph) < 60 or bool(HAN.search(paragraph)))
    )


def _pages(pattern: str, read: Callable[[str], str]) -> Callable[[Path], Iterator[tuple[str, str]]]:
    def extract(path: Path) -> Iterator[tuple[str, str]]:
        for name, data in members(path, lambda name: bool(re.search(pattern, name))):
            text = read(decode(maybe_gunzip(name, data)))
            text = "\n\n".join(part for part in text.split("\n\n") if _wanted(part))
            if len(HAN.findall(text)) >= LEAST_SHARE * len(text):
                yield name, text

    return extract


SOURCES = [
    Source("manpages-zh", "chinese", Package("apt", "manpages-zh"), "GFDL-1.2-or-later",
           "usr/share/doc/manpages-zh/copyright", True, _pages(r"man/zh_CN/.*\.gz$", text_of_roff)),
    Source("libreoffice-help-zh", "chinese", Package("apt", "libreoffice-help-zh-cn"), "MPL-2.0",
           "usr/share/doc/libreoffice-help-zh-cn/copyright", True,
           _pages(r"help/zh-CN/text/.*\.html$", text_of_html), cap=5_000_000),
]  # fmt: skip
