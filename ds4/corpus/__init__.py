"""Text of a domain in two slices: `fit` to solve on, `judge` to measure on; no source document is in both.

domain.py      a domain's folder, checked when it is opened
likeness.py    which documents share text
read.py        plain text and JSONL in
build.py       the split, and the folder that comes out
"""

from ds4.corpus.domain import SLICES, Document, Domain

__all__ = ["SLICES", "Document", "Domain"]
