"""`--log-requests`: finished requests to files on this machine, by a thread of its own; nothing is sent anywhere.

What a request costs on the way is a few references put on a list. JSON, disk and lock are the writer's business, so a
slow or full disk delays no answer and breaks none: rows that could not be written are counted, said in the server's
log when it begins and when it ends, and shown by /health.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import date, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from ds4.posttrain.log import append, make_folder, prune, row_bytes
from ds4.server.answer import complete_calls
from ds4.server.job import Job
from ds4.server.outbox import Event, Finished
from ds4.server.stream import CONTENT, REASONING, CallDelta, Delta

log = logging.getLogger("ds4.server")
MOST_WAITING_BYTES = 64 << 20  # of request bodies whose rows wait for the disk
LOOK_S = 600.0  # how often an idle server looks whether a day is over


def now() -> datetime:
    """This machine's own time, with its offset from UTC."""
    return datetime.now().astimezone()


@dataclass
class Exchange:
    """A request and its answer, as far as it has come.

    Attributes:
        asked: of the request what its prompt was made of: messages, thinking and effort; or prompt.
        size: bytes of its body.
        at: when it came.
    """

    log: RequestLog
    id: str
    path: str
    model: str
    asked: Mapping[str, Any]
    size: int
    job: Job
    at: datetime = field(default_factory=now)
    texts: dict[str, list[str]] = field(default_factory=lambda: {CONTENT: [], REASONING: []})
    calls: list[CallDelta] = field(default_factory=list)

    def hear(self, event: Event) -> None:
        """An event that its reader was given. The last one of a whole answer puts the request on the writer's list;
        requests that failed, or whose client left, are not kept.
        """
        if isinstance(event, Delta):
            self.texts[event.channel].append(event.text)
        elif isinstance(event, CallDelta):
            self.calls.append(event)
        elif isinstance(event, Finished):
            self.log.put(self, event)

    def row(self, end: Finished) -> dict[str, Any]:
        """What the log keeps (docs/posttraining.md)."""
        g, times = self.job.generation, self.job.times
        answer: dict[str, Any] = {"content": "".join(self.texts[CONTENT])}
        if g.in_reasoning:
            answer["reasoning"] = "".join(self.texts[REASONING])
        if calls := complete_calls(self.calls):
            answer["calls"] = [{"name": c.name, "arguments": c.text} for c in calls]
        sampling = asdict(g.sampling)
        sampling.pop("top")  # it changes no token
        return {
            "id": self.id, "at": self.at.isoformat(timespec="milliseconds"), "path": self.path, "model": self.model,
            "sidecars": self.job.sidecars, **self.asked, "answer": answer, "answer_ids": self.job.drawn,
            "finish_reason": end.reason,
            "sampling": {**sampling, "max_tokens": g.max_tokens, "stop": g.stops},
            "usage": {"prompt_tokens": len(g.prompt_ids), "completion_tokens": end.tokens},
            "timings": times.report(),
        }  # fmt: skip


class RequestLog:
    """The writer. `put` is for any thread and never waits.

    Args:
        folder: made if it is not there; its owner's alone.
        keep_days: files of this many days are kept, today's too.
        clock: the local time.

    Raises:
        UsageError: the folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        keep_days: int,
        clock: Callable[[], datetime] = now,
        most_waiting_bytes: int = MOST_WAITING_BYTES,
    ) -> None:
        make_folder(folder)
        self._folder, self._keep_days, self._clock, self._most = folder, keep_days, clock, most_waiting_bytes
        self._change = threading.Condition()
        self._waiting: list[tuple[date, Exchange, Finished]] = []
        self._bytes = 0
        self._stopping = False
        self._pruned: date | None = None  # the day of the last look
        self._counts: Counter[str] = Counter()
        self._wrong: str | None = None  # why the last rows could not be written
        self._thread = threading.Thread(target=self._main, name="ds4-requests-log", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Write what waits, as far as the disk takes it in time, and end."""
        with self._change:
            self._stopping = True
            self._change.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                log.warning("request log: %s does not take the last rows in time; they are lost", self._folder)

    def put(self, exchange: Exchange, end: Finished) -> None:
        """A request is finished. With too much waiting for the disk its row is lost, and counted."""
        with self._change:
            if self._waiting and self._bytes + exchange.size > self._most:
                first = self._lost(1, f"{self._bytes} bytes of requests wait for the disk")
            else:
                first = False
                self._waiting.append((self._clock().date(), exchange, end))
                self._bytes += exchange.size
                self._change.notify_all()
        if first:
            self._say_failing()

    def health(self) -> dict[str, object]:
        """For /health: whether rows are written, how many were and were not. No path and no text."""
        with self._change:
            return {
                "status": "ok" if self._wrong is None else "failing",
                "written": self._counts["written"],
                "lost": self._counts["lost"],
            }

    # ---- the writer's thread ----

    def _main(self) -> None:
        while True:
            self._keep_to_days()
            with self._change:
                if not self._waiting and not self._stopping:
                    self._change.wait(LOOK_S)
                batch, self._waiting, self._bytes = self._waiting, [], 0
                if not batch and self._stopping:
                    return
            if batch:
                self._write(batch)

    def _write(self, batch: list[tuple[date, Exchange, Finished]]) -> None:
        """All that waited, a day at a time: one lock and one forced write, however many rows there are."""
        for day, group in groupby(batch, key=lambda waiting: waiting[0]):
            rows = []
            for _, exchange, end in group:
                try:
                    rows.append(row_bytes(exchange.row(end)))
                except Exception:  # ours to mend; the other rows are none the worse
                    log.exception("request log: the row of %s could not be made", exchange.id)
                    with self._change:
                        self._counts["lost"] += 1
            if rows:
                self._append(day, rows)

    def _append(self, day: date, rows: list[bytes]) -> None:
        try:
            append(self._folder, day, rows)
        except OSError as e:
            with self._change:
                first = self._lost(len(rows), e.strerror or str(e))
            if first:
                self._say_failing()
            return
        with self._change:
            self._counts["written"] += len(rows)
            again, self._wrong = self._wrong is not None, None
            lost = self._counts["lost"]
        if again:
            log.warning("request log: %s is written again; %d rows were lost so far", self._folder, lost)

    def _lost(self, n: int, why: str) -> bool:
        """Count rows; whether they are the first ones after some that were written."""
        self._counts["lost"] += n
        first, self._wrong = self._wrong is None, why
        return first

    def _say_failing(self) -> None:
        log.warning(
            "request log: %s cannot be written (%s); requests are answered as before, their rows are lost",
            self._folder, self._wrong,
        )  # fmt: skip

    def _keep_to_days(self) -> None:
        """Once a day, remove what is older than is kept."""
        today = self._clock().date()
        if today == self._pruned:
            return
        try:
            gone = prune(self._folder, today, self._keep_days)
        except OSError as e:
            log.warning("request log: old files of %s cannot be removed (%s)", self._folder, e.strerror or e)
        else:
            if gone:
                log.info(
                    "request log: removed %s, older than %d days", ", ".join(p.name for p in gone), self._keep_days
                )
        self._pruned = today
