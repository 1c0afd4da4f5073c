"""The mutants: one broken line of a product kernel each, and the test that notices."""

from __future__ import annotations

from tests.mutants.harness import Mutant

MUTANTS: tuple[Mutant, ...] = ()
