"""The one table of collectives, their algorithms and what each of them allows.

Beside the rows of the table there is ``native``: whatever the library that carries the messages, MPI's or NCCL's, does
of itself. Its order of additions is the library's, so it promises a bound where the rows promise bits.
"""

from collections.abc import Callable
from dataclasses import dataclass

from zerosim.numerics.names import did_you_mean
from zerosim.ranks.algorithms import all_gather, all_reduce, reduce_scatter, rooted
from zerosim.ranks.algorithms.all_gather import no_buffers
from zerosim.ranks.algorithms.party import Buffer, Party, Steps


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A row: the generator that one rank runs, the buffers it declares, and which options it takes.

    ``power_of_two``: refuses other N. ``folds``: takes any N, but where N is no power of two some ranks sit out.
    ``cuts``: works on the chunks of the cut that it is given, unless ranks sit out. ``wire``: partial sums may travel
    in another format. ``accumulate``: additions may be made in a wider format.
    """

    steps: Callable[..., Steps]
    buffers: Callable[[Party], list[Buffer]] = no_buffers
    power_of_two: bool = False
    folds: bool = False
    cuts: bool = True
    wire: bool = False
    accumulate: bool = False


NATIVE = "native"


def _not_ours(party: Party, x: object, out: object) -> Steps:
    """Raises ValueError: how a library carries a collective out is not known here."""
    raise ValueError(f"the hops of {party.call.operation} by {NATIVE!r} are its library's own, and nobody here sees "
                     "them; ask for an algorithm of the table to see hops")


_LIBRARYS_OWN = Algorithm(_not_ours)

ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "reduce_scatter": {
        "ring": Algorithm(reduce_scatter.ring, reduce_scatter.ring_buffers, wire=True),
        "pairwise": Algorithm(reduce_scatter.pairwise, reduce_scatter.pairwise_buffers, accumulate=True),
        "halving": Algorithm(reduce_scatter.halving, reduce_scatter.halving_buffers, power_of_two=True),
    },
    "all_gather": {
        "ring": Algorithm(all_gather.ring),
        "doubling": Algorithm(all_gather.doubling, power_of_two=True),
        "bruck": Algorithm(all_gather.bruck, all_gather.bruck_buffers),
    },
    "all_reduce": {
        "ring": Algorithm(all_reduce.ring, reduce_scatter.ring_buffers, wire=True),
        "doubling": Algorithm(all_reduce.doubling, all_reduce.whole_buffer, folds=True, cuts=False),
        "rabenseifner": Algorithm(all_reduce.rabenseifner, all_reduce.rabenseifner_buffers, folds=True),
        "tree": Algorithm(all_reduce.tree, rooted.landing_buffer, cuts=False),
        "naive": Algorithm(all_reduce.naive, rooted.landing_buffer, cuts=False),
        "everyone": Algorithm(all_reduce.everyone, all_reduce.everyone_buffers, cuts=False, accumulate=True),
    },
    "broadcast": {"tree": Algorithm(rooted.broadcast_tree), "naive": Algorithm(rooted.broadcast_naive)},
    "reduce": {
        "tree": Algorithm(rooted.reduce_tree, rooted.reduce_buffers),
        "naive": Algorithm(rooted.reduce_naive, rooted.landing_buffer),
    },
    "gather": {"pairwise": Algorithm(rooted.gather_pairwise)},
    "all_to_all": {"pairwise": Algorithm(rooted.all_to_all_pairwise)},
    "barrier": {"dissemination": Algorithm(rooted.barrier_dissemination)},
}


def algorithm_of(operation: str, name: str, ranks: int) -> Algorithm:
    """The row for an operation and an algorithm's name.

    ``native`` has a row that declares nothing. Raises ValueError for an unknown name, or for an N that the algorithm
    does not serve.
    """
    if name == NATIVE:
        return _LIBRARYS_OWN
    rows = ALGORITHMS[operation]
    if str(name) not in rows:
        raise ValueError(f"{operation} has no algorithm {name!r}; choose one of {', '.join(rows)}"
                         f"{did_you_mean(name, rows)}")
    row = rows[name]
    if row.power_of_two and ranks & (ranks - 1):
        others = ", ".join(other for other, r in rows.items() if not r.power_of_two)
        raise ValueError(f"{operation} by {name} needs a power of two of ranks, because partners at distance "
                         f"1, 2, 4, ... must all exist; this group has {ranks}. Use {others}.")
    return row
