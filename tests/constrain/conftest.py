"""The embedded model's vocabulary, a compiler, and calls as the model writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from ds4.constrain import Compiled, Compiler
from ds4.embedded import checkpoint
from ds4.model.tokenizer import DSML, EOS, Tokenizer

M = "\udc00"  # the marker token in a text


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(checkpoint())


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


@pytest.fixture(scope="session")
def ids(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Text to ids, `M` to the marker."""

    def made(text: str) -> list[int]:
        out: list[int] = []
        for i, part in enumerate(text.split(M)):
            out += [tokenizer.special_id(DSML)] if i else []
            out += tokenizer.encode(part) if part else []
        return out

    return made


@pytest.fixture(scope="session")
def fits(tokenizer: Tokenizer, ids: Callable[[str], list[int]]) -> Callable[[Compiled | None, str], bool]:
    """Whether a whole answer is one that the constraint allows, with the end of sentence behind it."""

    def test(compiled: Compiled | None, text: str) -> bool:
        assert compiled is not None
        answer = [*ids(text), tokenizer.special_id(EOS)]
        return compiled.start().valid(answer) == len(answer)

    return test


def parameter(name: str, value: str, string: bool = True) -> str:
    return f'<{M} parameter name="{name}" string="{str(string).lower()}">{value}</{M} parameter>\n'


def invoke(name: str, *parameters: str) -> str:
    return f'<{M} invoke name="{name}">\n' + ("".join(parameters) or "\n") + f"</{M} invoke>\n"


def block(*invokes: str) -> str:
    return f"\n\n<{M} calls>\n" + "".join(invokes) + f"</{M} calls>"


def function(name: str, properties: object = None, required: Sequence[str] = (), **more: object) -> dict[str, object]:
    parameters = {"type": "object", "properties": properties or {}, "required": list(required), **more}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}
