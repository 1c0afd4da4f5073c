"""The process in which mutants' tests run: one JSON line in, one out.

In: {"cuda_dir": path, "node": pytest node}. Out: {"code": pytest's exit code, "output": its text}.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys

import pytest

OPTIONS = ["-x", "-q", "--no-header", "-p", "no:cacheprovider"]


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a test prints goes to the log, not between the answers
    for line in sys.stdin:
        asked = json.loads(line)
        os.environ["DS4_CUDA_DIR"] = asked["cuda_dir"]
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = pytest.main([*OPTIONS, asked["node"]])
        sys.modules["tests.conftest"].opened.cache_clear()
        print(json.dumps({"code": int(code), "output": output.getvalue()}), file=answers, flush=True)


if __name__ == "__main__":
    main()
