"""A trained model looked at: its loss on text held out, a digest of its weights, and what it writes.

Rank 0 computes, and every rank takes part, since weights that rest sharded are gathered.
Legend: B batch, t tokens, V vocabulary.
"""

from hashlib import sha256

import numpy as np

from zerosim.models.gpt import GPT, generate, logits_of
from zerosim.models.text import VOCABULARY, Corpus, readable
from zerosim.zero.engine import Engine

PROMPT = "Call me "
TEMPERATURE = 0.8
HELD_OUT_ROWS = 16


def logits(engine: Engine, model: GPT, tokens: np.ndarray) -> np.ndarray | None:
    """tokens (B, t) -> logits (B, t, V) on rank 0; None on the others, which only lend what they own."""
    if engine.rank.index == 0:
        return logits_of(engine.context(), model, engine.weights, tokens)
    for unit in model.units:
        with engine.weights(unit):
            pass
    return None


def held_out_loss(engine: Engine, model: GPT, corpus: Corpus) -> float | None:
    """The mean loss in nats on sequences that were not trained on; None on other ranks than 0."""
    x, target = corpus.held_out(HELD_OUT_ROWS, model.config.context)
    found = logits(engine, model, x)
    return None if found is None else model.loss.forward(engine.context(), found, target)[0]


def digest(engine: Engine) -> str:
    """SHA-256 of all master weights, in the order of the model, in hexadecimal; on every rank of what it sees."""
    found = sha256()
    for name in engine.model.shapes:
        found.update(np.ascontiguousarray(engine.state(name)["master"]).tobytes())
    return found.hexdigest()


def sample(engine: Engine, model: GPT, count: int, seed: int) -> str | None:
    """What the model writes after the prompt, ``count`` tokens of it; None on other ranks than 0.

    Raises ValueError for logits that are NaN or infinite.
    """
    nothing = np.zeros((1, 1, VOCABULARY))

    def next_logits(tokens: np.ndarray) -> np.ndarray:
        found = logits(engine, model, tokens)
        return nothing if found is None else found

    written = generate(next_logits, list(PROMPT.encode()), count, context=model.config.context,
                       temperature=TEMPERATURE, seed=seed)
    return readable(written) if engine.rank.index == 0 else None
