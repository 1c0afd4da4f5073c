"""Standard output of a command, whose failures are told apart from those of files."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any


class Output:
    """A text stream that remembers the first error of its own; everything else is the stream's."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.failed: OSError | None = None

    def write(self, text: str) -> Any:
        return self._noted(lambda: self._stream.write(text))

    def flush(self) -> None:
        self._noted(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _noted(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except OSError as e:
            self.failed = self.failed or e
            raise


def written(work: Callable[[], int]) -> int:
    """`work`'s exit code when all that it printed could be written, else 1 and one line on stderr.

    No line when the reader went away, as `head` does.
    """
    if sys.stdout is None:  # closed by the caller: print() does nothing then
        return work()
    output: Any = Output(sys.stdout)
    try:
        with contextlib.redirect_stdout(output):
            try:
                code = work()
            finally:  # also when argparse leaves after its help
                with contextlib.suppress(OSError):
                    output.flush()
    except (OSError, SystemExit):
        if output.failed is None:
            raise
        code = 1
    finally:
        if output.failed is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter tries again when it ends
    if output.failed is None:
        return code
    if not isinstance(output.failed, BrokenPipeError):
        print(f"error: standard output cannot be written: {output.failed.strerror}", file=sys.stderr)
    return code or 1
