"""The pictures of docs/page.md: the page in Chromium, over a server with the embedded model.

    python bench/screenshot.py [-m BASE] [--zchain DIR] [-o docs] [--chromium FILE]

A server of its own is started on a free port, a question is asked with fixed settings, and page-light.png and
page-dark.png are written, the latter as wide as a phone. The temperature is 0: the same weights, the same answer.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embedded import embedded_base

from ds4.errors import Ds4Error, UsageError

ROOT = Path(__file__).resolve().parent.parent
SCENES = {
    "page-light.png": ("light", 1000, 700),
    "page-dark.png": ("dark", 400, 700),
}
QUESTION = "Write a Python function that returns the larger of two numbers."
WAIT_MS = 180_000  # the first answer builds kernels where the cache is empty


@contextmanager
def server(flags: Sequence[str]) -> Iterator[str]:
    """A server's address, until the block ends."""
    run = subprocess.Popen(
        [sys.executable, "-m", "ds4.cli.serve", "--port", "0", *flags], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    try:
        assert run.stderr is not None
        for line in run.stderr:
            print(line, end="", file=sys.stderr)
            if found := re.search(r"listening on (http://\S+),", line):
                yield found[1]
                return
        raise Ds4Error("the server ended before it listened")
    finally:
        run.terminate()
        run.communicate(timeout=60)


def shoot(browser: Any, url: str, path: Path, scheme: str, width: int, height: int) -> None:
    """One picture, of an answer that is complete."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    page.goto(url)
    page.locator("#state.good").wait_for()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Most tokens of an answer").fill("160")
    page.get_by_label("Thinking").select_option("low")
    page.get_by_role("button", name="Done").click()
    page.get_by_label("Message", exact=True).fill(QUESTION)
    page.keyboard.press("Enter")
    page.get_by_text("tokens/s").wait_for()
    page.screenshot(path=str(path))
    print(f"{path}: {path.stat().st_size} bytes")
    context.close()


def main() -> int:
    p = argparse.ArgumentParser(description="Pictures of the page for the documentation.")
    p.add_argument("-m", "--model", help="a base file (default: the embedded model's)")
    p.add_argument("--zchain", default=str(ROOT / "sidecars" / "code"), help="the domain's sidecar; empty: none")
    p.add_argument("-o", "--out", default=str(ROOT / "docs"), help="folder for the pictures (default: docs)")
    p.add_argument("--chromium", default=shutil.which("chromium"), help="the browser (default: chromium)")
    args = p.parse_args()
    if args.chromium is None:
        raise UsageError("no Chromium: apt-get install chromium, or name one with --chromium")
    from playwright.sync_api import sync_playwright

    model, engram = (args.model, None) if args.model else embedded_base()
    flags = ["-m", str(model), *(["--engram-dir", str(engram)] if engram else [])]
    with server([*flags, *(["--zchain", args.zchain] if args.zchain else [])]) as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=args.chromium, args=["--no-sandbox", "--disable-gpu"])
        for name, scene in SCENES.items():
            shoot(browser, url, Path(args.out) / name, *scene)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
