"""A JSON object read field by field: null means the default; a wrong type or value is an error with its name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ds4.constrain.schema import lone_surrogate
from ds4.errors import RequestError, kind_of

MOST_DEEP = 256  # levels of what is written again
MOST_DIGITS = 300  # of a number that certainly has a float
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # only such an escape can make a lone surrogate


def parse_object(body: bytes) -> Fields:
    """The body of a request as an object.

    Raises:
        RequestError: not UTF-8, not JSON (NaN and Infinity are none), nested too deep, not an object, with a
            number too large to be written again, or with a lone surrogate, which no text has.
    """
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant, parse_float=_finite, parse_int=_whole)
    except UnicodeDecodeError as e:
        raise RequestError(f"the body is not UTF-8: byte {e.start}", code="invalid_json") from e
    except RecursionError as e:
        raise RequestError("the body is nested too deep", code="invalid_json") from e
    except ValueError as e:
        raise RequestError(f"the body is not valid JSON: {e}", code="invalid_json") from e
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, is {kind_of(value)}", code="invalid_json")
    if _HALF.search(body):
        _refuse_surrogates(value)
    return Fields(value)


def _refuse_surrogates(body: dict[str, Any]) -> None:
    """Names the field, and the place in it."""
    left: list[tuple[str | None, str, Any]] = [(None, "", body)]
    for field, place, value in left:  # which grows meanwhile
        if isinstance(value, dict):
            for key, one in value.items():
                if lone := lone_surrogate(key):
                    where = f"{place or 'the body':.200}"
                    raise RequestError(f"{where} has a name with a lone surrogate, {lone}, which no text has", field)
                left.append((field or key, f"{place}.{key}" if place else key, one))
        elif isinstance(value, list):
            left += ((field, f"{place}[{i}]", one) for i, one in enumerate(value))
        elif isinstance(value, str) and (lone := lone_surrogate(value)):
            raise RequestError(f"{place:.200} holds a lone surrogate, {lone}, which no text has", field)


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        _finite(digits)
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits:.40} is too large a number")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def deep(value: object, most: int = MOST_DEEP) -> bool:
    """Whether JSON is nested deeper than `most`. What was read on a short stack cannot always be written on a longer
    one.
    """
    level = [value]
    for _ in range(most):
        level = [v for x in level if isinstance(x, (dict, list)) for v in (x.values() if isinstance(x, dict) else x)]
        if not level:
            return False
    return any(isinstance(x, (dict, list)) for x in level)


@contextmanager
def naming(param: str) -> Iterator[None]:
    """Errors from below that do not know which field they belong to belong to `param`."""
    try:
        yield
    except RequestError as e:
        if e.param is not None:
            raise
        raise RequestError(str(e), param, e.code) from e


class Fields:
    """Typed reads of a JSON object. `where` goes before the field's name in errors."""

    def __init__(self, raw: Mapping[str, Any], where: str = "") -> None:
        self.raw, self._where = raw, where

    @property
    def place(self) -> str:
        """Its own name in errors; empty for a body."""
        return self._where.removesuffix(".")

    def has(self, name: str) -> bool:
        return self.raw.get(name) is not None

    def wrong(self, name: str, expected: str) -> RequestError:
        full = self._where + name
        return RequestError(f"{full} must be {expected}, is {kind_of(self.raw.get(name))}", full)

    def _typed(self, name: str, kind: type | tuple[type, ...], expected: str) -> Any:
        value = self.raw.get(name)
        if value is None:
            return None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.wrong(name, expected)
        return value

    def needed(self, name: str) -> str:
        """A text that must be there, and not be empty."""
        value = self.string(name)
        if not value:
            full = self._where + name
            raise RequestError(
                f"{full} is {'missing or null' if value is None else 'empty'}; it must be a string", full
            )
        return value

    def string(self, name: str) -> str | None:
        value: str | None = self._typed(name, str, "a string")
        return value

    def boolean(self, name: str) -> bool | None:
        value: bool | None = self._typed(name, bool, "true or false")
        return value

    def items(self, name: str) -> Sequence[Any] | None:
        value: Sequence[Any] | None = self._typed(name, list, "a list")
        return value

    def objects(self, name: str) -> list[Fields] | None:
        """A list of objects, each with its place in its fields' names."""
        found = self.items(name)
        if found is None:
            return None
        out = []
        for i, value in enumerate(found):
            full = f"{self._where}{name}[{i}]"
            if not isinstance(value, dict):
                raise RequestError(f"{full} must be an object, is {kind_of(value)}", full)
            out.append(Fields(value, full + "."))
        return out

    def nested(self, name: str) -> Fields | None:
        value = self._typed(name, dict, "an object")
        return None if value is None else Fields(value, f"{self._where}{name}.")

    def integer(self, name: str, low: int, high: int) -> int | None:
        value: int | None = self._typed(name, int, "an integer")
        if value is not None and not low <= value <= high:
            raise RequestError(
                f"{self._where}{name} is {value}; it must be between {low} and {high}", self._where + name
            )
        return value

    def number(self, name: str) -> float | None:
        value = self._typed(name, (int, float), "a number")
        if value is None:
            return None
        if not -1e300 < value < 1e300 or not math.isfinite(value):
            raise RequestError(f"{self._where}{name} is out of range", self._where + name)
        return float(value)

    def refuse(self, name: str, accepted: Sequence[object], why: str) -> None:
        """A field that exists in the API and not here: `accepted` values change nothing, any other is an error.

        `why` goes on after the name.
        """
        value = self.raw.get(name)
        if value is None or any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in accepted):
            return
        raise RequestError(f"{self._where}{name} {why}", self._where + name, "unsupported_parameter")
