"""The domain that is never trained on: the Python manual."""

from __future__ import annotations

from train.packages import Package
from train.sources import Source
from train.sources.general import pages

SOURCES = [
    Source("python-doc", "unseen", Package("apt", "python3.11-doc"), "PSF-2.0",
           "usr/share/doc/python3.11-doc/copyright", True,
           pages(r"python3\.11/html/(library|reference|tutorial|howto|faq|using)/[^/]*\.html$"),
           cap=3_000_000, held_out=True),
]  # fmt: skip
