"""The OpenAPI document says what the server does, and nothing that it allows or forbids breaks the server."""

from __future__ import annotations

import contextlib
import re
import unittest
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

import pytest
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

from ds4.server.app import make_app
from ds4.server.openapi import document
from ds4.server.request import Limits
from ds4.server.worker import Worker
from tests.server.standin import Served, StandIn, StandInConfig, StandInSession, ids_of, serve

ELSEWHERE = re.compile(r"/($|web|report|admin)")  # a page and its files; orders, which have a key of their own


def refs(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from [value["$ref"]] if "$ref" in value else []
        for v in value.values():
            yield from refs(v)
    elif isinstance(value, list):
        for v in value:
            yield from refs(v)


def test_it_has_every_path_and_no_other() -> None:
    app = cast(Any, make_app(Worker(lambda progress: StandIn(), 1), Limits()))
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in app._app.routes
        if isinstance(route, APIRoute) and not ELSEWHERE.match(route.path)
        for method in (route.methods or set()) - {"HEAD"}
    }
    told = document(Limits())
    methods = ("get", "post", "delete")
    assert {(path, m) for path, item in told["paths"].items() for m in item if m in methods} == routes
    found = {*refs(told)}
    assert found == {f"#/components/schemas/{name}" for name in told["components"]["schemas"]}


def test_it_is_served() -> None:
    with serve(StandIn(ids_of("ok"), config=StandInConfig(77)), api_key="k-of-a-test") as server:
        assert server.get("/openapi.json").status_code == 401
        told = server.get("/openapi.json", headers={"x-api-key": "k-of-a-test"}).json()
        assert told == document(Limits(), 77, key=True) and told["openapi"].startswith("3.1")
        assert told["components"]["schemas"]["ResponseRequest"]["allOf"][1]["properties"]["max_output_tokens"] == {
            "anyOf": [{"type": "integer", "minimum": 1, "maximum": 77}, {"type": "null"}]
        }


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """Its script obeys no grammar, and nobody minds."""
    with pytest.MonkeyPatch.context() as patch, serve_free(patch) as served:
        yield served


def serve_free(patch: pytest.MonkeyPatch) -> AbstractContextManager[Served]:
    patch.setattr(StandInSession, "constrain", lambda session, constraint: None)
    return serve(StandIn(ids_of("Hm</think>ok"), config=StandInConfig(500)))


@pytest.mark.long
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_what_it_allows_and_what_it_forbids(server: Served, mode: str) -> None:
    """Requests made from it, and made to break it: no 5xx, only statuses, types and objects that it tells of."""
    import schemathesis
    from schemathesis import checks
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    wanted = [
        checks.not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance,
    ]  # fmt: skip
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    for result in schema.get_all_operations():
        operation = cast(Any, result).ok()
        statuses = _asked(operation, schemathesis.GenerationMode(mode), wanted)
        if operation.method == "post":  # else nothing was tested
            assert (200 if mode == "positive" else 400) in statuses, (operation.label, statuses)


def _asked(operation: Any, mode: Any, checks: list[Any]) -> set[int]:
    """Statuses of 40 requests, each answer checked; none where nothing about an operation can be wrong."""
    statuses: set[int] = set()

    @settings(
        max_examples=40, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],
    )  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        statuses.add(case.call_and_validate(checks=checks).status_code)

    with contextlib.suppress(Unsatisfiable, unittest.SkipTest):
        ask()
    return statuses
