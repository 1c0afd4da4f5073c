"""Rulers: what judges an engine against the original. Nothing is here yet."""
