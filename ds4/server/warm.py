"""The first tokens of an engine, before those of anybody else."""

from __future__ import annotations

from dataclasses import replace

from ds4.engine import Sampling
from ds4.engine.constraint import Anything
from ds4.engine.sampling import Penalties
from ds4.server.request import ServedEngine

WARM_TOKENS, WARM_DRAWS = 40, 4


def warm_up(engine: ServedEngine) -> None:
    """Read a few tokens and draw a few: kernels are built and steps captured before the first request has to wait
    for it, and a device that does not work is found out now.

    Raises:
        Ds4Error: it does not work.
    """
    session, bos = engine.session(), engine.config.bos_token_id
    most = engine.config.max_position_embeddings - 3 * WARM_DRAWS
    for _ in session.reading([bos] * max(1, min(WARM_TOKENS, most))):
        pass
    plain = Sampling(temperature=1.0, top_p=0.9, seeded=False)  # this way all kernels of drafts run
    penalties = Penalties(presence=0.1, logit_bias=((bos, 0.1),))
    penalised = replace(plain, penalties=penalties, top=1)
    for sampling, constraint in ((plain, None), (penalised, None), (plain, Anything(engine.tokenizer.vocab_size))):
        session.constrain(constraint)
        for _ in range(WARM_DRAWS):
            session.next(sampling)
