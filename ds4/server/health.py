"""What `/health` says."""

from __future__ import annotations

import time

from starlette.responses import Response

from ds4.server.errors import HttpError, error_body, json_response, overloaded
from ds4.server.memory_watch import MemoryWatch
from ds4.server.requests_log import RequestLog
from ds4.server.worker import Worker


def health(worker: Worker, log: RequestLog | None, memory: MemoryWatch | None, *, known: bool) -> Response:
    """200 once requests are answered, and while they wait for a device that is lent; before that 503 and how far
    loading is.

    Args:
        known: who asks has the key; others do not hear whose requests there are.
    """
    w = worker
    about: dict[str, object] = {"queue": {"running": w.running, "waiting": w.waiting}}
    if known:
        about["requests"] = requests_of(w)
    if log is not None:
        about["request_log"] = log.health()
    if memory is not None:
        about["memory"] = memory.told()
    done, total = w.progress
    if w.state == "returning":
        about |= {"progress": {"done": done, "total": total}, "trouble": w.trouble}
    if (lease := w.lease) is not None:
        about["lent"] = lease.told()
    if w.well and w.card is not None:
        status = "ok" if w.state == "ready" else w.state
        return json_response({"status": status, "model": w.card.name, "sidecars": w.card.sidecars, **about})
    state = w.state if w.state in ("loading", "failed") else "failing"
    try:
        w.served()
        raise overloaded(f"{_trouble(w)}; see the server's log", "device_failing", 10)
    except HttpError as e:
        told = {"status": state, "progress": {"done": done, "total": total}, **about, **error_body(e)}
        return json_response(told, 503, e.headers)


def requests_of(worker: Worker) -> list[dict[str, object]]:
    """The requests that run: how much of the prompt is read (`cached` of it without running it), how many tokens of
    the answer are drawn, for how long.
    """
    now, told = time.monotonic(), list[dict[str, object]]()
    for run in list(worker.turns.runs):
        job = run.job
        told.append(
            {
                "id": run.mark, "prompt": len(job.generation.prompt_ids), "read": job.read, "cached": job.cached,
                "drawn": len(job.drawn), "seconds": round(now - job.times.queued, 1),
            }
        )  # fmt: skip
    return told


def _trouble(w: Worker) -> str:
    if w.stalled:
        one = w.running == 1
        return (
            f"{'one request runs and' if one else f'{w.running} requests run and none'} has made no step for "
            f"{w.silent_s:.0f} s, none has ended for {time.monotonic() - w.last_end:.0f} s"
        )
    return "the device fails" if w.trouble is None else f"the device cannot be taken back: {w.trouble}"
