"""Bytes of model states: what any optimizer declares that it keeps, and how texts and tools count the rest.

Legend: N ranks. An optimizer is a value that says for a tensor's shape which slots it keeps, and where that state may
be cut: anywhere (then a rank's is that of its flat share), or on borders of tensors (then ranks own whole tensors, and
the fullest one is counted). What a convention counts is whole on every rank or is cut among them, as three indicators
say (`closed_forms.ShardedStates`): parameters, gradients, and all that the optimizer reads and writes.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from zerosim.numerics.checks import checked_count, did_you_mean
from zerosim.numerics.files import facts
from zerosim.numerics.policy import Policy
from zerosim.optim.elementwise import Adam
from zerosim.optim.promises import Stateful, state_nbytes
from zerosim.planning.closed_forms import ShardedStates
from zerosim.planning.cuts import padded_unit_lengths
from zerosim.planning.shapes import ModelShape
from zerosim.ranks.call import tensor_cut

cut_of = lru_cache(maxsize=16)(tensor_cut)  # a plan asks for that of one model again and again
ADAM = Adam()  # two fp32 tensors beside the weights, m and v: Kingma & Ba 2015, algorithm 1


def per_parameter_nbytes(optimizer: Stateful, fp32_itemsize: int = 4) -> int:
    """Bytes of state for each parameter, of an optimizer whose state may be cut anywhere.

    >>> per_parameter_nbytes(ADAM)
    8

    Raises ValueError for one that keeps more for some shapes than for others.
    """
    if not is_cut_anywhere(optimizer):
        raise ValueError(f"what {type(optimizer).__name__} keeps depends on the shapes of tensors, and is no number "
                         "of bytes for each parameter; take state_nbytes of a shape")
    return state_nbytes(optimizer, (1,), fp32_itemsize)


def is_cut_anywhere(optimizer: Stateful) -> bool:
    """True where a shard of the optimizer's state may begin inside a tensor."""
    return optimizer.cut == "anywhere"


def shares_nbytes(optimizer: Stateful, shapes: Iterable[tuple[int, ...]], ranks: int,
                  fp32_itemsize: int = 4) -> list[tuple[int, int]]:
    """For each rank (elements, bytes of state) of the whole tensors that it owns."""
    tensors = list(shapes)
    lengths = [math.prod(shape) for shape in tensors]
    cut = cut_of(tuple(lengths), ranks)
    starts = [*accumulate(lengths, initial=0)]
    nbytes = {shape: state_nbytes(optimizer, shape, fp32_itemsize) for shape in {*tensors}}  # most shapes come again
    state = [*accumulate((nbytes[shape] for shape in tensors), initial=0)]
    places = [bisect_left(starts, border) for border in cut]
    return [(starts[high] - starts[low], state[high] - state[low]) for low, high in pairwise(places)]


# -- accounting conventions -------------------------------------------------------------------------------------------


ADAM_STATE_NBYTES = per_parameter_nbytes(ADAM)


@dataclass(frozen=True, slots=True)
class Convention:
    """Bytes that a text or a tool counts for each parameter, by kind, beside the optimizer's own state.

    `gradient_copy` are gradients in fp32 that rest with the optimizer's state, `whole_layer` bytes for each
    parameter of the largest layer, whole on every rank. With `master_is_parameter` there is no master where the
    parameters that a rank's optimizer updates are on that rank. `state_itemsize` is that of state which the
    optimizer declares in fp32.
    """

    name: str
    source: str
    parameter: int = 0
    gradient: int = 0
    gradient_copy: int = 0
    master: int = 0
    whole_layer: int = 0
    master_is_parameter: bool = False
    state_itemsize: int = 4

    def per_parameter(self, states: ShardedStates, optimizer_nbytes: int = ADAM_STATE_NBYTES) -> tuple[int, int]:
        """(replicated, shared): a rank holds replicated + shared/N bytes for each parameter.

        >>> from zerosim.planning.closed_forms import STAGES
        >>> [CONVENTIONS["zero-paper"].per_parameter(states) for states in STAGES.values()]
        [(16, 0), (4, 12), (2, 14), (0, 16)]
        """
        replicated = shared = 0
        for kind, nbytes in (self.kinds(states) | {"optimizer_state": optimizer_nbytes}).items():
            is_cut = states.cuts(kind)
            shared += nbytes * is_cut
            replicated += nbytes * (not is_cut)
        return replicated, shared

    def kinds(self, states: ShardedStates) -> dict[str, int]:
        """Bytes for each parameter by kind, the optimizer's own state apart."""
        has_master = not (self.master_is_parameter and (states.optimizer_sharded or not states.parameters_sharded))
        return {"parameter": self.parameter, "gradient": self.gradient, "gradient_copy": self.gradient_copy,
                "master": self.master * has_master}


CONVENTIONS: Mapping[str, Convention] = {name: Convention(name, **row)
                                        for name, row in facts(__package__, "conventions").items()}


def convention_of(convention: str | Convention | Policy) -> Convention:
    """The convention of a name, a convention itself, or zerosim's own: the bytes of an engine of this policy.

    >>> own = convention_of(Policy("bf16", accumulate="fp32"))
    >>> own.parameter, own.gradient, own.gradient_copy, own.master
    (2, 4, 0, 4)

    Raises ValueError for a name that there is not, with the nearest.
    """
    if isinstance(convention, Convention):
        return convention
    if isinstance(convention, Policy):
        return Convention("zerosim", "the bytes that the engine holds", convention.compute_dtype.itemsize,
                          convention.accumulate_dtype.itemsize, master=convention.master_dtype.itemsize,
                          master_is_parameter=convention.compute_dtype == convention.master_dtype,
                          state_itemsize=convention.state_dtype.itemsize)
    if str(convention) not in CONVENTIONS:
        raise ValueError(f"no accounting convention is called {convention!r}; there are {', '.join(CONVENTIONS)}, "
                         "and zerosim, the engine's own"
                         f"{did_you_mean(convention, CONVENTIONS)}")
    return CONVENTIONS[convention]


def states_nbytes(model: ModelShape, ranks: int, states: ShardedStates,
                  convention: str | Convention | Policy = "zero-paper", *, optimizer: Stateful = ADAM,
                  nodes: int = 1) -> dict[str, int]:
    """Bytes of model states on a rank, by kind, padding included; empty kinds are left out.

    >>> from zerosim.planning.closed_forms import STAGES
    >>> from zerosim.planning.shapes import model_of_parameters
    >>> states_nbytes(model_of_parameters(7 * 10**9), 8, STAGES[2])
    {'parameter': 14000000000, 'gradient': 1750000000, 'master': 3500000000, 'optimizer_state': 7000000000}

    All ranks hold the same where the optimizer's state may be cut anywhere. Else ranks own whole tensors, nothing is
    padded, and it is the rank that holds most. On several `nodes` each has all states.
    Raises ValueError for fewer than one rank, for an unknown convention, and for whole tensors on nodes.
    """
    named = convention_of(convention)
    count = checked_count("ranks", ranks, 1)
    if is_cut_anywhere(optimizer):
        total = sum(padded_unit_lengths(model.unit_lengths, count))
        whole, share = (state_nbytes(optimizer, (n,), named.state_itemsize) for n in (total, total // count * nodes))
        shares = [(total // count * nodes, share)]
    elif nodes > 1:
        raise ValueError(f"{type(optimizer).__name__} updates whole tensors, and a plan of shards inside nodes is of "
                         "optimizers whose state may be cut anywhere, such as AdamW; take one, or no mesh")
    else:
        shapes = [tensor.shape for tensor in model.tensors]
        total, whole = model.parameters, sum(state_nbytes(optimizer, shape, named.state_itemsize) for shape in shapes)
        shares = [*dict.fromkeys(shares_nbytes(optimizer, shapes, count, named.state_itemsize))]  # many own as much
    held = [{kind: each * (elements if states.cuts(kind) else total) for kind, each in named.kinds(states).items()}
            | {"optimizer_state": state if states.optimizer_sharded else whole} for elements, state in shares]
    fullest = max(held, key=lambda kinds: sum(kinds.values()))
    return {kind: nbytes for kind, nbytes in fullest.items() if nbytes}


def estimate_nbytes(parameters: int, ranks: int, states: ShardedStates,
                    convention: str | Convention | Policy = "zero-paper", *, largest_layer: int = 0,
                    optimizer_nbytes: int = ADAM_STATE_NBYTES) -> int:
    """Bytes on a rank as the convention's own formula gives them: nothing is padded, and the largest layer is added.

    >>> from zerosim.planning.closed_forms import STAGES
    >>> estimate_nbytes(2_851_000_000, 8, STAGES[3], "deepspeed-zero3", largest_layer=32_000_000)
    6542750000

    Shares are rounded down. Raises ValueError for counts below one and for an unknown convention.
    """
    named, count = convention_of(convention), checked_count("parameters", parameters, 1)
    replicated, shared = named.per_parameter(states, optimizer_nbytes)
    layer = checked_count("largest_layer", largest_layer, 0)
    return replicated * count + shared * count // checked_count("ranks", ranks, 1) + named.whole_layer * layer


def formula(states: ShardedStates, convention: str | Convention | Policy = "zero-paper",
            optimizer_nbytes: int = ADAM_STATE_NBYTES) -> str:
    """Bytes of a rank for each parameter, as one writes them.

    >>> from zerosim.planning.closed_forms import STAGES
    >>> [formula(states, "megatron-fp16") for states in STAGES.values()]
    ['20', '4 + 16/N', '2 + 18/N', '20/N']
    """
    replicated, shared = convention_of(convention).per_parameter(states, optimizer_nbytes)
    return " + ".join([f"{replicated}"] * bool(replicated) + [f"{shared}/N"] * bool(shared)) or "0"
