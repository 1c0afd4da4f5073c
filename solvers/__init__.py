"""Solvers: what makes sidecars and post-training files."""
