"""What no rank sees alone: whether a gradient overflowed, its norm, and the norms of single tensors.

Legend: N ranks, E tensors. A sum of squares is one float64 per owner, over what it owns, parameter by parameter and in
fixed blocks; the owners' sums are added in rank order. So the result depends on the layout and on nothing else: ranks
that hold everything add the same partial sums as ranks that hold a shard each.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from zerosim.zero.layout import ParameterPiece
from zerosim.zero.placements import SHARDED
from zerosim.zero.states import States, at


def overflowed(families: Sequence[States]) -> bool:
    """True on every rank when any rank saw inf or NaN in what it updates."""
    rank, scanned = families[0].rank, _scanned(families)
    mine = not all(map(rank.kernels.all_finite, scanned))
    rank.trace.compute(nbytes=sum(sums.nbytes for sums in scanned))
    return bool(told(families[0], np.array([mine], np.uint8)).any())


def _scanned(families: Sequence[States]) -> list[np.ndarray]:
    """The sums of gradients that this rank updates with, without padding."""
    return [states.gradient_sum.array[at(piece, states.gradient_sum.placement)]
            for states in families for piece in states.regions_held(states.stage.optimizer)]


def gradient_norm(families: Sequence[States]) -> float:
    """The global norm of the mean gradient: every element of every parameter of the families counted once."""
    mine = []
    for owner in owners(families[0]):
        partial = 0.0  # plain additions: from CPython 3.12 on sum() compensates, which gives other bits
        for states in families:
            for piece in states.layout.parameter_pieces(owner):
                partial += _squares(states, piece)
        mine.append(partial)
    families[0].rank.trace.compute(nbytes=sum(sums.nbytes for sums in _scanned(families)))
    return rooted(told(families[0], np.array(mine, np.float64)))


def _squares(states: States, piece: ParameterPiece) -> float:
    reduced = states.gradient_sum
    squares: float = states.rank.kernels.sum_of_squares(reduced.array[at(piece, reduced.placement)], reduced.divisor)
    return squares


def tensor_norms(states: States, names: Sequence[str],
                 squares: Callable[[ParameterPiece], tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """For each named tensor two norms, of which ``squares`` gives the sums of squares piece by piece."""
    if not names:
        return {}
    mine = []
    for owner in owners(states):
        pieces = {piece.entry.name: piece for piece in states.layout.parameter_pieces(owner)}
        mine.append([squares(pieces[name]) if name in pieces else (0.0, 0.0) for name in names])
    table = told(states, np.array(mine, np.float64).reshape(-1)).reshape(-1, len(names), 2)
    return {name: (rooted(table[:, at, 0]), rooted(table[:, at, 1])) for at, name in enumerate(names)}


def owners(states: States) -> Sequence[int]:
    """Whose partial sums this rank computes: its own where state is sharded, else everybody's."""
    return [states.rank.index] if states.stage.optimizer is SHARDED else range(states.rank.size)


def told(states: States, mine: np.ndarray) -> np.ndarray:
    """What every rank found, in rank order; nothing is sent where each knows all."""
    if states.stage.optimizer is not SHARDED:
        return mine
    found: np.ndarray = states.rank.all_gather(mine, purpose="control")
    return found


def rooted(partials: np.ndarray) -> float:
    """The root of (N,) sums of squares, added from rank 0 on; NaN where there is one among them."""
    total = 0.0
    for partial in partials:
        total += float(partial)
    return math.sqrt(total)
