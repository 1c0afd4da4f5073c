"""Operators of the model: one function each, sizes to launches. A module a family."""
