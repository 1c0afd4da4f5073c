"""Offline work in pieces: one small interface, with processes here or a Dask cluster behind it."""
