"""Program text: Python sources of well-known libraries."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from train.packages import Package, members
from train.sources import Source

LONGEST = 80_000
# Generated tables and vendored copies teach nothing and repeat what another source has.
UNWANTED = re.compile(
    r"/(_vendor|vendored|_parsetab|lib2to3/tests|test/data)/|_pb2\.py$|/unicodedata|entities\.py$|/encodings/cp|/encodings/mac_|/encodings/iso8859"
)


def python_files(prefix: str, without: str | None = None) -> Callable[[Path], Iterator[tuple[str, str]]]:
    """A reader of the .py members under `prefix` that compile, leaving out those whose name matches `without`."""

    def extract(path: Path) -> Iterator[tuple[str, str]]:
        def want(name: str) -> bool:
            name = "/" + name
            return (
                name.endswith(".py")
                and prefix in name
                and not UNWANTED.search(name)
                and not (without and re.search(without, name))
            )

        for name, data in members(path, want):
            if not 200 <= len(data) <= LONGEST:
                continue
            try:
                text = data.decode("utf-8")
                ast.parse(text)
            except (UnicodeDecodeError, SyntaxError, ValueError):
                continue
            yield name, text

    return extract


SOURCES = [
    Source("python-stdlib", "code", Package("apt", "libpython3.11-stdlib"), "PSF-2.0",
           "usr/share/doc/libpython3.11-stdlib/copyright", True, python_files("/usr/lib/python3.11/")),
    Source("numpy", "code", Package("pip", "numpy"), "BSD-3-Clause", "LICENSE.txt", True,
           python_files("/numpy/"), cap=5_000_000),
    Source("networkx", "code", Package("pip", "networkx"), "BSD-3-Clause", "LICENSE.txt", True,
           python_files("/networkx/")),
    Source("sympy", "code", Package("pip", "sympy"), "BSD-3-Clause", "LICENSE", True,
           python_files("/sympy/", r"/(rubi|parsing/latex/_antlr|parsing/autolev/_antlr)/|/tests/"), cap=7_000_000),
    Source("scipy", "code", Package("pip", "scipy"), "BSD-3-Clause", "LICENSE.txt", True,
           python_files("/scipy/", r"/tests/"), cap=5_000_000),
    Source("pandas", "code", Package("pip", "pandas"), "BSD-3-Clause", "LICENSE", True,
           python_files("/pandas/", r"/tests/"), cap=5_000_000),
]  # fmt: skip
