"""A museum of bugs that real implementations of ZeRO had: each re-created, shown, and found by an invariant.

`list()` names them, ``with exhibit("muon_partial_matrix"):`` is the block inside which zerosim has the bug, and
`show(name)` tells its story with a picture. An invariant takes what `observe` has seen of a training, and raises
AssertionError.
"""

import builtins

from zerosim.course.museum.exhibit import Exhibit, exhibits
from zerosim.course.museum.invariants import (
    INVARIANTS,
    all_reduce_is_gather_of_scatter,
    all_skip_or_none,
    equals_one_device,
    memory_is_sharded,
    nothing_under_way_is_written,
    padding_is_never_read,
    reload_is_the_identity,
    replicas_agree,
    same_bits_in_any_order,
    sends_what_is_planned,
    skipped_step_changes_nothing,
)
from zerosim.course.museum.runs import Observed, Setting, observe
from zerosim.course.museum.story import Museum, Story, page, story_of
from zerosim.numerics.checks import unknown_name

__all__ = ["INVARIANTS", "Exhibit", "Museum", "Observed", "Setting", "Story", "all_reduce_is_gather_of_scatter",
           "all_skip_or_none", "equals_one_device", "exhibit", "list", "memory_is_sharded", "names",
           "nothing_under_way_is_written", "observe", "padding_is_never_read", "page", "reload_is_the_identity",
           "replicas_agree", "same_bits_in_any_order", "sends_what_is_planned", "show", "skipped_step_changes_nothing"]


def names() -> builtins.list[str]:
    """The exhibits' names, in the order of the museum."""
    return builtins.list(exhibits())


def list() -> Museum:
    """The exhibits: name, project, the invariant that finds it."""
    return Museum(exhibits())


def exhibit(name: str) -> Exhibit:
    """One exhibit: its facts, and a ``with`` block in which zerosim has the bug, as far as this thread calls it.

    Raises ValueError for a name that there is not, and on entry while another exhibit is open.
    """
    if name not in exhibits():
        raise unknown_name(f"no exhibit is called {name!r}", name, exhibits(), "there are")
    return exhibits()[name]


def show(name: str) -> Story:
    """The story of one exhibit, whose run is made twice. Raises ValueError for a name that there is not."""
    return story_of(exhibit(name))
