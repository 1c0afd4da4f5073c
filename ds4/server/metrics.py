"""Numbers of a server for Prometheus: what was asked, how it ended, how fast it went, what is under way.

A registry of its own a server, filled by the device's thread when a request ends and by the edge when an answer
begins; what is true at the moment (queue, lending, memory) is looked at when somebody asks. Labels come from fixed
sets, so that no client can make the page grow.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_1_0_0, generate_latest
from prometheus_client.registry import Collector

from ds4.engine import Cancelled
from ds4.errors import CapacityError
from ds4.server.errors import HttpError, status_of
from ds4.server.job import Job
from ds4.server.memory_watch import STATES, STEPS
from ds4.server.outbox import Event, Failed, Finished
from ds4.server.prefix_store import PrefixStats

if TYPE_CHECKING:
    from ds4.server.memory_watch import MemoryWatch
    from ds4.server.worker import Worker

CONTENT_TYPE = CONTENT_TYPE_PLAIN_1_0_0
OTHER = "other"  # a path or a method that is none of ours
METHODS = ("GET", "HEAD", "POST", "DELETE", "OPTIONS")
SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
TICK = 1e-9  # seconds; a clock may not have moved
RATES = (1, 3, 10, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000, 2000, 5000, 10000)  # tokens/s


class Metrics:
    """Counts of one server. Any thread may call any method."""

    def __init__(self, worker: Worker, memory: MemoryWatch | None = None) -> None:
        self._registry = CollectorRegistry()
        self._paths: weakref.WeakKeyDictionary[Job, str] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"ds4_{name}", text, labels, registry=self._registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"ds4_{name}", text, buckets=buckets, registry=self._registry)

        self._answers = counter("http_responses", "Answers by path, method and status.", "path", "method", "status")
        self._requests = counter("requests", "Requests that were queued, by how they ended.", "path", "end")
        self._prompt = counter("prompt_tokens", "Tokens of prompts that were read.")
        self._answer = counter("answer_tokens", "Tokens drawn for answers, the one that ends them too.")
        self._queued = histogram("request_queue_seconds", "Seconds a request waited for the device.", SECONDS)
        self._read = histogram("request_prefill_seconds", "Seconds a prompt took.", SECONDS)
        self._drew = histogram("request_decode_seconds", "Seconds an answer took, from its prompt's end.", SECONDS)
        self._read_rate = histogram(
            "prefill_tokens_per_second", "Of a prompt: its tokens that were run, over its seconds.", RATES
        )
        self._draw_rate = histogram("decode_tokens_per_second", "Of an answer: its tokens over its seconds.", RATES)
        self._rounds = counter("decode_rounds", "Passes of decode, by how many drafts they verified.", "verified")
        self._offered = counter("drafts_verified", "Drafts verified, by position in the round.", "position")
        self._kept = counter("drafts_accepted", "Drafts accepted, by position in the round.", "position")
        self._cached = counter("cached_tokens", "Tokens of those prompts that were not run again.")
        self._registry.register(_Now(worker, memory))

    def page(self) -> bytes:
        """Everything, in the text format 1.0.0."""
        return generate_latest(self._registry)

    def answered(self, path: str, method: str, status: int) -> None:
        """An answer began; `path` is a route's template or OTHER."""
        self._answers.labels(path, method if method in METHODS else OTHER, str(status)).inc()

    def begin(self, job: Job, path: str) -> None:
        """A request is about to be queued."""
        with self._lock:
            self._paths[job] = path

    def end(self, job: Job, event: Event) -> None:
        """A request is over. Said twice of one, it is counted once."""
        with self._lock:
            path = self._paths.pop(job, None)
        if path is None:
            return
        self._requests.labels(path, _end(event)).inc()
        t, drawn, prompt = job.times, len(job.drawn), len(job.generation.prompt_ids)
        self._answer.inc(drawn)
        if t.taken is not None:
            self._queued.observe(t.taken - t.queued)
        if t.taken is not None and t.read is not None:
            self._prompt.inc(prompt)
            self._cached.inc(job.cached)
            self._read.observe(t.read - t.taken)
            self._read_rate.observe((prompt - job.cached) / max(t.read - t.taken, TICK))
        if t.read is not None and t.ended is not None:
            self._drew.observe(t.ended - t.read)
            self._draw_rate.observe(drawn / max(t.ended - t.read, TICK))
        if isinstance(event, Finished):
            self._decoded(event.decode)

    def _decoded(self, report: Mapping[str, object]) -> None:
        """What a session says of its rounds (RoundCounts.report)."""
        verified = report.get("verified_drafts")
        shares = report.get("acceptance_by_position")
        if not isinstance(verified, dict):
            return
        rounds = {int(k): int(n) for k, n in verified.items()}
        for k, n in rounds.items():
            self._rounds.labels(str(k)).inc(n)
        if not isinstance(shares, list):
            return
        for j, share in enumerate(shares, 1):
            offered = sum(n for k, n in rounds.items() if k >= j)
            self._offered.labels(str(j)).inc(offered)
            self._kept.labels(str(j)).inc(round(share * offered))


def _end(event: Event) -> str:
    """How a request ended, from a fixed set."""
    if isinstance(event, Finished):
        return event.reason
    if not isinstance(event, Failed):
        return OTHER
    error = event.error
    if isinstance(error, Cancelled):
        return "cancelled"
    if isinstance(error, HttpError) and error.code in ("shutting_down", "no_memory"):
        return error.code
    if isinstance(error, CapacityError):
        return "no_memory"
    return "refused" if status_of(error) < 500 else "failed"


class _Now(Collector):
    """What is so when it is asked for, and what others count."""

    def __init__(self, worker: Worker, memory: MemoryWatch | None) -> None:
        self._worker, self._memory = worker, memory

    def collect(self) -> Iterator[Metric]:
        w = self._worker
        yield _gauge("requests_running", "Requests that the device works on.", w.running)
        yield _gauge("requests_waiting", "Requests in the queue.", w.waiting)
        yield _gauge("ready", "1 if a request would probably be answered.", float(w.well))
        yield _gauge("lent", "1 while the device is lent.", float(w.lease is not None))
        yield _gauge("step_age_seconds", "Since the last step of any request; 0 if none runs.", w.silent_s)
        shared = {str(requests): count for requests, count in dict(w.turns.shared).items()}
        yield _counts("shared_passes", "Passes that several requests shared, by how many.", "requests", shared)
        if w.memory is not None:
            used, total = w.memory
            yield _gauge("device_memory_used_bytes", "Memory of the device in use after the last request.", used)
            yield _gauge("device_memory_bytes", "Memory of the device.", total)
        held, most = w.states
        yield _gauge("state_bytes", "Device memory that sequences hold, kept lanes too.", held)
        if most is not None:
            yield _gauge("state_limit_bytes", "What --mem-budget-mb leaves to sequences.", most)
        if w.prefixes is not None:
            yield from _prefixes(w.prefixes.stats)
        if self._memory is not None:
            yield from _watched(self._memory)


def _prefixes(stats: PrefixStats) -> Iterator[Metric]:
    """Of kept prompts."""
    found = {"memory": stats.hits - stats.disk_hits, "disk": stats.disk_hits, "none": stats.lookups - stats.hits}
    yield _counts("prefix_lookups", "Prompts, by where something kept of them was found.", "found", found)
    asked = {"reused": stats.reused_tokens, "run": stats.asked_tokens - stats.reused_tokens}
    yield _counts("prefix_tokens", "Tokens of prompts that were looked up, by what became of them.", "how", asked)
    stored = {"memory": stats.stored, "disk": stats.written}
    yield _counts("prefixes_stored", "Texts that were kept.", "place", stored)
    evicted = {"memory": stats.evicted, "disk": stats.evicted_files}
    yield _counts("prefixes_evicted", "Texts that went to make room.", "place", evicted)
    yield _counts("prefixes_refused", "Texts that were not used or not kept.", "reason", dict(stats.refused))
    held = {"memory": stats.memory_bytes, "disk": stats.disk_bytes}
    entries = {"memory": stats.memory_entries, "disk": stats.disk_entries}
    for name, text, values in (("bytes", "Bytes of kept texts.", held), ("entries", "Kept texts.", entries)):
        family = GaugeMetricFamily(f"ds4_prefix_{name}", text, labels=("place",))
        for place, value in values.items():
            family.add_metric((place,), value)
        yield family


def _watched(memory: MemoryWatch) -> Iterator[Metric]:
    """Of the watch on this machine's memory."""
    if memory.seen is not None:
        yield _gauge("memory_available_bytes", "MemAvailable of the machine, at the last look.", memory.seen)
    yield _gauge("memory_floor_bytes", "Below this, memory is made or kept free.", memory.floor)
    low = STATES.index(memory.state)
    yield _gauge("memory_low", "0: enough; 1: what is kept is dropped; 2: requests are refused too.", low)
    yield _counts("memory_relief", "What was done for memory.", "step", {s: memory.done[s] for s in STEPS})


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"ds4_{name}", text, value=value)


def _counts(name: str, text: str, label: str, counts: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"ds4_{name}", text, labels=(label,))
    for key, count in counts.items():
        family.add_metric((key,), count)
    return family
