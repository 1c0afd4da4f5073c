"""Routes. Each reads its body, checks it, queues a job and hands its events to a response."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ds4.constrain import Compiler
from ds4.errors import Ds4Error
from ds4.server.admin import Admin
from ds4.server.answer import Answer, Writer, model_card, model_list
from ds4.server.edge import Connections, Edge, Stalled, TooLarge, read_body
from ds4.server.errors import HttpError, error_response, json_response
from ds4.server.fields import Fields, parse_object
from ds4.server.health import health
from ds4.server.job import Job
from ds4.server.memory_watch import MemoryWatch
from ds4.server.messages import ask_messages
from ds4.server.messages_answer import MessagesAnswer, messages_model, messages_models
from ds4.server.metrics import CONTENT_TYPE, OTHER, Metrics
from ds4.server.openai import ask_chat, ask_completion
from ds4.server.openapi import document
from ds4.server.outbox import Gone, Outbox
from ds4.server.pages import Pages
from ds4.server.reports import Reports
from ds4.server.request import Limits, ServedModel
from ds4.server.requests_log import Exchange, RequestLog
from ds4.server.respond import EventStream, Log, whole
from ds4.server.responses import ask_response
from ds4.server.responses_answer import ResponsesAnswer
from ds4.server.responses_routes import ResponseRoutes
from ds4.server.responses_store import ResponseStore
from ds4.server.shared_fields import Asked
from ds4.server.text_routes import TextRoutes
from ds4.server.worker import Worker

log = logging.getLogger("ds4.server")
ANTHROPIC = "anthropic-version"  # a header of that API's clients, which list models in another shape
Api = Callable[[Fields, ServedModel, Limits], tuple[Asked, Writer]]  # a body to what it asks for, and who answers


def make_app(
    worker: Worker,
    limits: Limits,
    api_key: str | None = None,
    connections: Connections | None = None,
    requests: RequestLog | None = None,
    admin_key: str | None = None,
    cors: str | None = None,
    reports: Reports | None = None,
    memory: MemoryWatch | None = None,
    compiler: Compiler | None = None,
) -> ASGIApp:
    """The application. It starts the worker, and the log of requests and the watch on memory where there are any, and
    stops them. `compiler`: of formats and grammars, one that may know the vocabulary already.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        if requests is not None:
            requests.start()
        if memory is not None:
            memory.start()
        yield
        if memory is not None:
            await asyncio.to_thread(memory.stop)
        await asyncio.to_thread(worker.stop)
        if requests is not None:
            await asyncio.to_thread(requests.stop)

    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    metrics = Metrics(worker, memory)
    worker.on_end = metrics.end
    routes = Routes(
        worker, limits, requests, metrics, memory, compiler or Compiler(), keyed=api_key is not None
    )  # fmt: skip
    app.add_api_route("/metrics", routes.metrics, methods=["GET"], response_model=None)
    app.add_api_route("/health", routes.health, methods=["GET", "HEAD"], response_model=None)
    app.add_api_route("/v1/models", routes.models, methods=["GET"], response_model=None)
    app.add_api_route("/v1/models/{name:path}", routes.model, methods=["GET"], response_model=None)
    app.add_api_route("/v1/chat/completions", routes.chat, methods=["POST"], response_model=None)
    app.add_api_route("/v1/completions", routes.completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/messages", routes.messages, methods=["POST"], response_model=None)
    app.add_api_route("/v1/responses", routes.responses, methods=["POST"], response_model=None)
    app.add_api_route("/openapi.json", routes.openapi, methods=["GET"], response_model=None)
    ResponseRoutes(routes.store).add_to(app)
    TextRoutes(worker, limits).add_to(app)
    Admin(worker, limits).add_to(app)
    Pages(Reports() if reports is None else reports).add_to(app)
    app.add_exception_handler(HTTPException, _route_error)
    app.add_exception_handler(Ds4Error, _own_error)
    app.add_exception_handler(Exception, _own_error)
    routed = [route for route in app.routes if isinstance(route, APIRoute)]
    return Edge(
        app, {} if connections is None else connections, api_key, limits, admin_key, cors=cors,
        answered=lambda path, method, status: metrics.answered(label(path, routed), method, status),
    )  # fmt: skip


def label(path: str, routed: Sequence[APIRoute]) -> str:
    """What metrics call a path: its route's template, so that no client can make the page grow; else OTHER."""
    return next((route.path_format for route in routed if route.path_regex.match(path)), OTHER)


async def _own_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, (Ds4Error, Gone, Stalled)):
        log.exception("a request failed", exc_info=error)
    path = request.url.path
    return error.response(path) if isinstance(error, TooLarge) else error_response(error, path)


async def _route_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    known = {404: (f"there is no {path} here", "not_found"), 405: (f"{path} has no {method}", "method_not_allowed")}
    message, code = known.get(error.status_code, (str(error.detail), "bad_request"))
    return error_response(HttpError(error.status_code, message, code, headers=error.headers), path)


class Routes:
    """The handlers, over one worker."""

    def __init__(
        self, worker: Worker, limits: Limits, requests: RequestLog | None, metrics: Metrics,
        memory: MemoryWatch | None, compiler: Compiler, *, keyed: bool,
    ) -> None:  # fmt: skip
        self._worker, self._limits, self._requests, self._metrics = worker, limits, requests, metrics
        self._memory = memory
        self._created = int(time.time())
        self._keyed, self._compiler = keyed, compiler
        self.store = ResponseStore()

    async def health(self, request: Request) -> Response:
        return health(self._worker, self._requests, self._memory, known=request.state.known)

    async def metrics(self) -> Response:
        return Response(await asyncio.to_thread(self._metrics.page), media_type=CONTENT_TYPE)

    async def openapi(self) -> Response:
        card = self._worker.card
        context = None if card is None else card.config.max_position_embeddings
        return json_response(document(self._limits, context, key=self._keyed))

    async def models(self, request: Request) -> Response:
        card = self._worker.served()
        if ANTHROPIC in request.headers:
            return json_response(messages_models(card, self._created))
        return json_response(model_list(card, self._created))

    async def model(self, request: Request, name: str) -> Response:
        card = self._worker.served()
        if name != card.name:
            raise HttpError(404, f"there is no model {name!r}; this server has {card.name!r}", "model_not_found")
        made = messages_model if ANTHROPIC in request.headers else model_card
        return json_response(made(card, self._created))

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, _chat)

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, _completion)

    async def messages(self, request: Request) -> Response:
        return await self._generate(request, _messages)

    async def responses(self, request: Request) -> Response:
        return await self._generate(request, self._response)

    def _response(self, fields: Fields, card: ServedModel, limits: Limits) -> tuple[Asked, Writer]:
        asked = ask_response(fields, card, limits, self.store)
        return asked.asked, ResponsesAnswer(card.name, asked, card.tokenizer, self.store)

    async def _generate(self, request: Request, api: Api) -> Response:
        card = self._worker.served()
        body = await read_body(request, self._limits)
        self._worker.check_room()
        # parsing and tokenizing a long prompt takes a while: not on the loop that serves everybody
        fields = await asyncio.to_thread(parse_object, body)
        asked, answer = await asyncio.to_thread(api, fields, card, self._limits)
        generation = await asyncio.to_thread(asked.constrained, self._compiler, card.tokenizer)
        job = Job(generation, Outbox(self._limits.outbox_chars))
        path = request.url.path
        self._metrics.begin(job, path)
        self._worker.submit(job)
        exchange = None
        if self._requests is not None:
            size = len(body) + asked.size
            exchange = Exchange(self._requests, answer.id, path, card.name, asked.logged, size, job)
        line = Log(path, job, exchange)
        if asked.generation.stream:
            return EventStream(job, answer, self._worker, self._limits.ping_s, line, at_once=asked.progress)
        return await whole(job, answer, self._worker, request.receive, line)


def _chat(fields: Fields, card: ServedModel, limits: Limits) -> tuple[Asked, Writer]:
    asked = ask_chat(fields, card, limits)
    return asked, Answer(True, card.name, asked.generation, card.tokenizer, asked.progress)


def _completion(fields: Fields, card: ServedModel, limits: Limits) -> tuple[Asked, Writer]:
    asked = ask_completion(fields, card, limits)
    return asked, Answer(False, card.name, asked.generation, card.tokenizer, asked.progress)


def _messages(fields: Fields, card: ServedModel, limits: Limits) -> tuple[Asked, Writer]:
    asked = ask_messages(fields, card, limits)
    return asked, MessagesAnswer(card.name, asked.generation)
