"""A museum of bugs that real implementations of ZeRO had: each re-created, shown, and found by an invariant.

`list()` names them, ``with exhibit("muon_partial_matrix"):`` is the block inside which zerosim has the bug, and
`show(name)` tells its story. A check of `INVARIANTS` takes what `observe` has seen of a training, and raises
AssertionError.
"""

from contextlib import AbstractContextManager

from zerosim.course.catalog import Catalog
from zerosim.course.museum.exhibit import Exhibit, exhibits
from zerosim.course.museum.invariants import INVARIANTS
from zerosim.course.museum.runs import Observed, Setting, observe
from zerosim.course.museum.story import Story, story_of
from zerosim.display.views import plain
from zerosim.numerics.checks import unknown_name

__all__ = ["INVARIANTS", "Exhibit", "Observed", "Setting", "Story", "exhibit", "exhibits", "list", "observe", "show",
           "story_of"]


def list() -> Catalog:
    """The exhibits: name, project, the invariant that finds it."""
    return Catalog("exhibits", {name: plain(one) for name, one in exhibits().items()}, ("exhibit", "where", "found by"),
                   tuple((name, one.project, one.invariant) for name, one in exhibits().items()),
                   ("zerosim museum ring_off_by_one   tells one",))


def exhibit(name: str) -> AbstractContextManager[Exhibit]:
    """The ``with`` block inside which zerosim has one bug, as far as this thread calls it, with its facts.

    Raises ValueError for a name that there is not, and on entry while another exhibit is open.
    """
    return _named(name).open()


def show(name: str) -> Story:
    """The story of one exhibit, whose run is made twice. Raises ValueError for a name that there is not."""
    return story_of(_named(name))


def _named(name: str) -> Exhibit:
    if name not in [*exhibits()]:  # whatever it is, an exhibit too, which has no hash
        raise unknown_name(f"no exhibit is called {name!r}", name, exhibits(), "there are")
    return exhibits()[name]
