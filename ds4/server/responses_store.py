"""Responses that may be gone on with: in memory, bounded by count and bytes, the longest unused going first.

A response holds what was new in its request and what was answered; what came before is its predecessor's. Looking a
conversation up uses all of it, so that a living one goes as a whole or not at all, as long as it fits. What is kept
is JSON, so that the bound on bytes is one on memory.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds4.server.errors import HttpError, json_bytes

Item = Mapping[str, Any]


@dataclass(frozen=True)
class Kept:
    """A response, and what was new in its request.

    Attributes:
        previous: the id of what it goes on with.
        data: JSON of the response, and of the items that were new.
        ids: of all its items.
    """

    id: str
    previous: str | None
    data: tuple[bytes, bytes]
    ids: tuple[str, ...]

    @staticmethod
    def of(response: Mapping[str, Any], items: Sequence[Item], previous: str | None) -> Kept:
        ids = tuple(str(item["id"]) for item in (*response["output"], *items))
        return Kept(str(response["id"]), previous, (json_bytes(response), json_bytes(list(items))), ids)

    @property
    def size(self) -> int:
        return sum(map(len, (*self.data, *self.ids)))

    @property
    def response(self) -> dict[str, Any]:
        response: dict[str, Any] = json.loads(self.data[0])
        return response

    @property
    def items(self) -> list[Item]:
        items: list[Item] = json.loads(self.data[1])
        return items


class ResponseStore:
    """Any thread may call any method.

    Args:
        most: responses.
        most_bytes: of what is kept of them. One that is larger by itself is not kept.
    """

    def __init__(self, most: int = 1024, most_bytes: int = 64 << 20) -> None:
        self._most, self._most_bytes, self._bytes = most, most_bytes, 0
        self._kept: OrderedDict[str, Kept] = OrderedDict()  # the longest unused first
        self._holder: dict[str, str] = {}  # of an item, the response that came with it last
        self._lock = threading.Lock()

    def put(self, kept: Kept) -> None:
        with self._lock:
            if kept.size > self._most_bytes:
                return
            self._kept[kept.id] = kept
            self._bytes += kept.size
            self._holder |= dict.fromkeys(kept.ids, kept.id)
            while len(self._kept) > self._most or self._bytes > self._most_bytes:
                self._drop(next(iter(self._kept)))

    def get(self, response_id: str) -> Kept:
        """
        Raises:
            HttpError: 404, it is not kept.
        """
        with self._lock:
            return self._found(response_id, None)

    def delete(self, response_id: str) -> None:
        """
        Raises:
            HttpError: 404, it is not kept.
        """
        with self._lock:
            self._found(response_id, None)
            self._drop(response_id)

    def before(self, response_id: str) -> tuple[list[Item], int]:
        """Everything that was asked and answered up to a response, it too, and the bytes that it takes.

        Raises:
            HttpError: 404, it or one before it is not kept; names the one.
        """
        with self._lock:
            chain: list[Kept] = []
            following: str | None = response_id
            while following is not None:
                chain.append(self._found(following, "previous_response_id"))
                following = chain[-1].previous
        items: list[Item] = []
        for kept in reversed(chain):
            items += [*kept.items, *kept.response["output"]]
        return items, sum(kept.size for kept in chain)

    def item(self, item_id: str) -> Item | None:
        """An item by its id; None: it is not kept."""
        with self._lock:
            kept = self._kept.get(self._holder.get(item_id, ""))
        if kept is None:
            return None
        items: list[Item] = [*kept.response["output"], *kept.items]
        return next((item for item in items if item["id"] == item_id), None)

    def _drop(self, response_id: str) -> None:
        kept = self._kept.pop(response_id)
        self._bytes -= kept.size
        for item_id in kept.ids:
            if self._holder.get(item_id) == response_id:
                del self._holder[item_id]

    def _found(self, response_id: str, param: str | None) -> Kept:
        kept = self._kept.get(response_id)
        if kept is None:
            where = "" if param is None else f"{param}: "
            raise HttpError(
                404, f"{where}there is no response {response_id!r:.80}: it was not stored, was deleted, or made room "
                "for newer ones", "not_found" if param is None else "previous_response_not_found", param,
            )  # fmt: skip
        self._kept.move_to_end(response_id)
        return kept
