"""What is kept of responses: looked at, and thrown away."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from ds4.errors import RequestError
from ds4.server.errors import json_response
from ds4.server.responses_store import ResponseStore

MOST_LISTED, LISTED = 100, 20


class ResponseRoutes:
    """The handlers, over one store."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    def add_to(self, app: FastAPI) -> None:
        app.add_api_route("/v1/responses/{response_id}", self.get, methods=["GET"], response_model=None)
        app.add_api_route("/v1/responses/{response_id}", self.delete, methods=["DELETE"], response_model=None)
        app.add_api_route("/v1/responses/{response_id}/input_items", self.items, methods=["GET"], response_model=None)

    async def get(self, response_id: str) -> Response:
        return json_response(self._store.get(response_id).response)

    async def delete(self, response_id: str) -> Response:
        self._store.delete(response_id)
        return json_response({"id": response_id, "object": "response.deleted", "deleted": True})

    async def items(self, request: Request, response_id: str) -> Response:
        """What was asked, that of the responses before it too; the newest first unless `order` is "asc"."""
        kept, asked = self._store.get(response_id), request.query_params
        before = [] if kept.previous is None else self._store.before(kept.previous)[0]
        items = [*before, *kept.items]
        order, limit, after = asked.get("order", "desc"), asked.get("limit", str(LISTED)), asked.get("after")
        if order not in ("asc", "desc"):
            raise RequestError(f'order is {order!r:.40}; it must be "asc" or "desc"', "order")
        if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= MOST_LISTED):
            raise RequestError(f"limit is {limit!r:.40}; it must be between 1 and {MOST_LISTED}", "limit")
        if order == "desc":
            items.reverse()
        if after is not None:
            place = next((i for i, item in enumerate(items) if item["id"] == after), None)
            if place is None:
                raise RequestError(f"after: there is no item {after!r:.80} in this response", "after")
            items = items[place + 1 :]
        page = items[: int(limit)]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": "", "last_id": ""}
        return json_response({"object": "list", "data": page, "has_more": len(items) > len(page), **ends})
