"""Answers that follow a schema, a grammar or a budget: fields of a request into what the engine obeys."""

from ds4.constrain.calls import Calls
from ds4.constrain.compiler import Compiler
from ds4.constrain.content import Content, read_format, read_grammar
from ds4.constrain.matcher import Answer, Compiled

__all__ = ["Answer", "Calls", "Compiled", "Compiler", "Content", "read_format", "read_grammar"]
