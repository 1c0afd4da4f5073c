"""Rulers: what judges an engine against the original. They know engines and teachers, and no solver."""
