"""Where the training text comes from: one module a domain, each with its list SOURCES."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from train.packages import Package


@dataclass(frozen=True)
class Source:
    """One source of documents inside one package.

    extract: takes the package file, yields (key, text), the key naming the document within the source.
    licence_text_from: the package member that holds the licence.
    ship: the licence lets the text be part of the product's judging slices.
    held_out: no document of it is trained on; all are judged on or fitted to.
    cap: at most this many bytes of text, taken in the order of the hashes of the keys.
    """

    id: str
    domain: str
    package: Package
    licence: str
    licence_text_from: str
    ship: bool
    extract: Callable[[Path], Iterator[tuple[str, str]]]
    cap: int | None = None
    held_out: bool = False


def all_sources() -> list[Source]:
    from train.sources import chinese, code, finance, general, law, medicine, science, technical

    modules = (code, law, medicine, science, finance, general, chinese, technical)
    return [source for module in modules for source in module.SOURCES]
