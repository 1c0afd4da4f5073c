"""Routes. Each reads its body, checks it, queues a job and hands its events to a response."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ds4.errors import Ds4Error
from ds4.server.admin import Admin
from ds4.server.answer import Answer, model_card, model_list
from ds4.server.edge import Connections, Edge, Stalled, TooLarge, read_body
from ds4.server.errors import HttpError, error_body, error_response, json_response, overloaded
from ds4.server.fields import Fields, parse_object
from ds4.server.job import Job
from ds4.server.metrics import CONTENT_TYPE, OTHER, Metrics
from ds4.server.openai import asked_of, read_chat, read_completion
from ds4.server.outbox import Gone, Outbox
from ds4.server.pages import Pages
from ds4.server.reports import Reports
from ds4.server.request import Generation, Limits, ServedModel
from ds4.server.requests_log import Exchange, RequestLog
from ds4.server.respond import EventStream, Log, whole
from ds4.server.worker import Worker

log = logging.getLogger("ds4.server")
Reader = Callable[[Fields, ServedModel, Limits], Generation]


def make_app(
    worker: Worker,
    limits: Limits,
    api_key: str | None = None,
    connections: Connections | None = None,
    requests: RequestLog | None = None,
    admin_key: str | None = None,
    cors: str | None = None,
    reports: Reports | None = None,
) -> ASGIApp:
    """The application. It starts the worker and the log of requests, where there is one, and stops them."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        if requests is not None:
            requests.start()
        yield
        await asyncio.to_thread(worker.stop)
        if requests is not None:
            await asyncio.to_thread(requests.stop)

    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    metrics = Metrics(worker)
    worker.on_end = metrics.end
    routes = Routes(worker, limits, requests, metrics)
    app.add_api_route("/metrics", routes.metrics, methods=["GET"], response_model=None)
    app.add_api_route("/health", routes.health, methods=["GET", "HEAD"], response_model=None)
    app.add_api_route("/v1/models", routes.models, methods=["GET"], response_model=None)
    app.add_api_route("/v1/models/{name:path}", routes.model, methods=["GET"], response_model=None)
    app.add_api_route("/v1/chat/completions", routes.chat, methods=["POST"], response_model=None)
    app.add_api_route("/v1/completions", routes.completions, methods=["POST"], response_model=None)
    Admin(worker, limits).add_to(app)
    Pages(Reports() if reports is None else reports).add_to(app)
    app.add_exception_handler(HTTPException, _route_error)
    app.add_exception_handler(Ds4Error, _own_error)
    app.add_exception_handler(Exception, _own_error)
    own = {route.path for route in app.routes if isinstance(route, APIRoute) and "{" not in route.path}
    return Edge(
        app, {} if connections is None else connections, api_key, limits, admin_key, cors=cors,
        answered=lambda path, method, status: metrics.answered(path if path in own else OTHER, method, status),
    )  # fmt: skip


async def _own_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, (Ds4Error, Gone, Stalled)):
        log.exception("a request failed", exc_info=error)
    return error.response() if isinstance(error, TooLarge) else error_response(error)


async def _route_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    known = {404: (f"there is no {path} here", "not_found"), 405: (f"{path} has no {method}", "method_not_allowed")}
    message, code = known.get(error.status_code, (str(error.detail), "bad_request"))
    return error_response(HttpError(error.status_code, message, code, headers=error.headers))


class Routes:
    """The handlers, over one worker."""

    def __init__(self, worker: Worker, limits: Limits, requests: RequestLog | None, metrics: Metrics) -> None:
        self._worker, self._limits, self._requests, self._metrics = worker, limits, requests, metrics
        self._created = int(time.time())

    async def health(self) -> Response:
        """200 once requests are answered, and while they wait for a device that is lent; before that 503 and how far
        loading is.
        """
        w = self._worker
        about: dict[str, object] = {"queue": {"running": w.running, "waiting": w.waiting}}
        if self._requests is not None:
            about["request_log"] = self._requests.health()
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
            why = "the device fails" if w.trouble is None else f"the device cannot be taken back: {w.trouble}"
            if w.stalled:
                why = f"the running request has made no step for {w.silent_s:.0f} s"
            raise overloaded(f"{why}; see the server's log", "device_failing", 10)
        except HttpError as e:
            told = {"status": state, "progress": {"done": done, "total": total}, **about, **error_body(e)}
            return json_response(told, 503, e.headers)

    async def metrics(self) -> Response:
        return Response(await asyncio.to_thread(self._metrics.page), media_type=CONTENT_TYPE)

    async def models(self) -> Response:
        return json_response(model_list(self._worker.served(), self._created))

    async def model(self, name: str) -> Response:
        card = self._worker.served()
        if name != card.name:
            raise HttpError(404, f"there is no model {name!r}; this server has {card.name!r}", "model_not_found")
        return json_response(model_card(card, self._created))

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, read_chat, chat=True)

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, read_completion, chat=False)

    async def _generate(self, request: Request, read: Reader, *, chat: bool) -> Response:
        card = self._worker.served()
        body = await read_body(request, self._limits)
        self._worker.check_room()
        # parsing and tokenizing a long prompt takes a while: not on the loop that serves everybody
        fields = await asyncio.to_thread(parse_object, body)
        generation = await asyncio.to_thread(read, fields, card, self._limits)
        job = Job(generation, Outbox(self._limits.outbox_chars))
        answer = Answer(chat, card.name, generation, card.tokenizer)
        path = request.url.path
        self._metrics.begin(job, path)
        self._worker.submit(job)
        exchange = None
        if self._requests is not None:
            asked = asked_of(fields, chat=chat)
            exchange = Exchange(self._requests, answer.id, path, card.name, asked, len(body), job)
        line = Log(path, job, exchange)
        if generation.stream:
            return EventStream(job, answer, self._worker, self._limits.ping_s, line)
        return await whole(job, answer, self._worker, request.receive, line)
