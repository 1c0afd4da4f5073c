"""`/admin/`: mount other sidecars, lend the device. Who may come in is the edge's business: only the admin key opens
these paths.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import Future
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from ds4.errors import RequestError
from ds4.server.edge import read_body
from ds4.server.errors import HttpError, json_response, overloaded
from ds4.server.fields import Fields, parse_object
from ds4.server.orders import Lease
from ds4.server.outbox import Gone
from ds4.server.request import Limits
from ds4.server.worker import Worker

log = logging.getLogger("ds4.server")
LEASE_S, LEAST_LEASE_S, MOST_LEASE_S = 60.0, 0.5, 3600.0
LEAST_WAIT_S, MOST_WAIT_S = 0.1, 86_400.0
BORROWER_CHARS = 100


class Admin:
    """The handlers, over one worker."""

    def __init__(self, worker: Worker, limits: Limits) -> None:
        self._worker, self._limits = worker, limits

    def add_to(self, app: FastAPI) -> None:
        for path, handler in (
            ("/admin/reload", self.reload),
            ("/admin/lend", self.lend),
            ("/admin/lend/{lease}/keep", self.keep),
            ("/admin/lend/{lease}/return", self.give_back),
        ):
            app.add_api_route(path, handler, methods=["POST"], response_model=None)

    async def reload(self) -> Response:
        """200 and what is mounted, once that is so. 202 while the device is lent: that is seen to when it is back."""
        if self._worker.lease is not None:
            return json_response({"status": "lent", "sidecars": self._worker.served().sidecars}, 202)
        order = self._worker.reload()
        sidecars = await _outcome(order.future)
        return json_response({"status": "ok", "sidecars": sidecars})

    async def lend(self, request: Request) -> Response:
        """200 and a lease, once the requests that came before are answered and device memory is free."""
        fields = parse_object(await read_body(request, self._limits))
        borrower = fields.string("for")
        if borrower is None or not borrower.strip() or not borrower.isprintable() or len(borrower) > BORROWER_CHARS:
            raise RequestError(f"for must say who borrows the device, in 1 to {BORROWER_CHARS} characters", "for")
        lease_s = _seconds(fields, "lease_s", LEAST_LEASE_S, MOST_LEASE_S)
        wait_s = _seconds(fields, "wait_s", LEAST_WAIT_S, MOST_WAIT_S)
        order = self._worker.lend(borrower, LEASE_S if lease_s is None else lease_s)
        gone = asyncio.ensure_future(_disconnected(request.receive))
        done = asyncio.wrap_future(order.future)
        answered = False
        try:
            either: set[asyncio.Future[Any]] = {done, gone}
            await asyncio.wait(either, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if not order.future.done() and self._worker.call_off(order):
                if gone.done():
                    raise Gone
                raise overloaded(f"the device is in use; nothing was lent within {wait_s} s", "device_in_use", 60)
            lease = await asyncio.shield(done)  # the engine may be closing
            if gone.done():
                raise Gone
            answered = True
        finally:
            gone.cancel()
            if not answered and not self._worker.call_off(order):
                order.future.add_done_callback(self._return_unused)
        return json_response({"lease": lease.id, "lease_s": lease.lease_s, "waiting": self._worker.waiting})

    async def keep(self, lease: str, request: Request) -> Response:
        """200 and how many requests wait for the device."""
        fields = await self._optional(request)
        kept = self._worker.keep(lease, _seconds(fields, "lease_s", LEAST_LEASE_S, MOST_LEASE_S))
        return json_response({"lease_s": kept.lease_s, "waiting": self._worker.waiting})

    async def give_back(self, lease: str) -> Response:
        """202: the model is loaded again from now on."""
        self._worker.give_back(lease)
        return json_response({"status": "returning"}, 202)

    async def _optional(self, request: Request) -> Fields:
        if request.headers.get("content-length", "0").strip() == "0":
            return Fields({})
        return parse_object(await read_body(request, self._limits))

    def _return_unused(self, future: Future[Lease]) -> None:
        """Whoever asked does not know of its lease. Called where it was asked for, or in the worker's thread."""
        if not future.cancelled() and future.exception() is None:
            log.info("%s asked for the device and left", future.result().borrower)
            with contextlib.suppress(HttpError):  # it may be over
                self._worker.give_back(future.result().id)


async def _outcome(future: Future[Any]) -> Any:
    """What the worker makes of an order. A client that leaves takes back nothing: others may have asked too."""
    return await asyncio.shield(asyncio.wrap_future(future))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _seconds(fields: Fields, name: str, low: float, high: float) -> float | None:
    value = fields.number(name)
    if value is not None and not low <= value <= high:
        raise RequestError(f"{name} is {value:g}; it must be between {low:g} and {high:g} seconds", name)
    return value
