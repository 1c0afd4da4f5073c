"""Solvers: what makes sidecars and post-training files. Nothing is here yet."""
