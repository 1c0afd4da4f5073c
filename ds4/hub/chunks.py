"""Bytes from the hub's chunk storage, by its own library (`hf-xet`), read in a thread of its own.

A call of the library cannot be interrupted, and waits for minutes before it says that nothing comes; whoever waits
for the thread can do both.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator, Mapping
from typing import Any

SETTINGS = {  # what is not here is the library's default
    "telemetry.enabled": False,
    "reconstruction.download_buffer_size": 512 << 20,  # bytes ahead of us; a server may run beside
    "reconstruction.download_buffer_limit": 512 << 20,
    "reconstruction.download_buffer_perfile_size": 256 << 20,
}
AHEAD = 4  # blocks read and not yet taken
LOOK_S = 0.2  # how soon the thread sees that nobody waits any more


class Silence(Exception):
    """Nothing came for too long."""


class Reader:
    """A file of the storage from `start` on.

    Args:
        digest, size: of the file, as the hub lists them.
        token_url: where the hub gives tokens for the storage; asked with `hub_headers`.
        headers: for the storage itself.
    """

    def __init__(
        self, digest: str, size: int, start: int, token_url: str, hub_headers: Mapping[str, str],
        headers: Mapping[str, str],
    ) -> None:  # fmt: skip
        self._what = digest, size, start
        self._how: dict[str, Any] = {
            "token_refresh_url": token_url, "token_refresh_headers": dict(hub_headers),
            "custom_headers": dict(headers),
        }  # fmt: skip
        self._blocks: queue.Queue[bytes | Exception | None] = queue.Queue(AHEAD)
        self._left = threading.Event()
        self._group: Any = None
        threading.Thread(target=self._pump, name="chunk storage", daemon=True).start()

    def blocks(self, silence_s: float) -> Iterator[bytes]:
        """In order, to the end of the file or of what the storage gives.

        Raises:
            Silence: nothing came for so many seconds.
            Exception: whatever the library raised.
        """
        while True:
            try:
                block = self._blocks.get(timeout=silence_s)
            except queue.Empty:
                raise Silence(f"nothing came for {silence_s:g} s") from None
            if block is None:
                return
            if isinstance(block, Exception):
                raise block
            yield block

    def leave(self, whole: bool) -> None:
        """Nobody takes any more; the thread ends when the library lets it. `whole`: all that was wanted came."""
        self._left.set()
        if not whole and self._group is not None:
            with contextlib.suppress(Exception):  # it may have ended by itself
                self._group.abort()

    def _pump(self) -> None:
        try:
            import hf_xet

            digest, size, start = self._what
            session = hf_xet.XetSession(hf_xet.XetConfig().with_config(SETTINGS))
            self._group = session.new_download_stream_group(**self._how)
            for block in self._group.download_stream(hf_xet.XetFileInfo(digest, size), start=start):
                if not self._put(bytes(block)):
                    return
            self._put(None)
        except Exception as e:  # the library has classes of its own for a few of them only
            self._put(e)

    def _put(self, block: bytes | Exception | None) -> bool:
        while not self._left.is_set():
            try:
                self._blocks.put(block, timeout=LOOK_S)
            except queue.Full:
                continue
            return True
        return False
