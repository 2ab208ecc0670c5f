"""A reader's own program, from a file, on any world of ranks: what each rank returned, held and sent.

The same file runs in one process and under mpiexec; equal fingerprints say that it gave equal bits.
"""

import ast
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import iscoroutine, isfunction, isgenerator
from pathlib import Path
from typing import Any, NoReturn

from zerosim.backends.processes.transport import ProcessCluster
from zerosim.numerics.arrays import sha256
from zerosim.ranks.cluster import Cluster, Program
from zerosim.ranks.rank import Rank

LOADED = "__loaded_by_zerosim__"  # an attribute of modules that `load` has made


@dataclass(frozen=True, slots=True)
class RanPart:
    """One rank's part of a run. ``sha256`` is that of its result; None for a result that has no fingerprint."""

    rank: int
    result: str
    sha256: str | None
    sent_nbytes: int
    peak_nbytes: int


def load(place: str) -> Program:
    """The function of ``FILE.py:NAME``, from a file that is run as a module of its own name.

    Of a file that raises while it is run comes a program that raises the same: so it ends the run as any rank's error
    does, also where it happens in one process of many.

    Raises ValueError where there is no such file or function, where the file has the name of a module that Python knows
    already (one that was loaded here before may be replaced), and where the text has no colon.
    """
    path, colon, name = place.rpartition(":")
    if not colon or not path or not name:
        raise ValueError(f"no program in {place!r}; write FILE.py:FUNCTION, as in train.py:program")
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"no file {path!r} to take the function {name!r} from; the path is taken from {Path.cwd()}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path!r} is not a Python file; its name must end in .py")
    known = sys.modules.get(file.stem)
    is_ours = getattr(known, "__file__", None) == str(file) or hasattr(known, LOADED)
    if file.stem in sys.stdlib_module_names or (known and not is_ours):
        raise ValueError(f"{path!r} cannot be taken for a module: there is one called {file.stem!r} already, which "
                         "other code imports by that name; rename the file")
    module = importlib.util.module_from_spec(spec)
    setattr(module, LOADED, True)  # the next file of the same name, another student's say, may take its place
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.parent.resolve()))  # as Python does for a script
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        return partial(_raise, error)
    program: Program | None = getattr(module, name, None)
    if not callable(program):
        there = ", ".join(key for key, value in vars(module).items() if isfunction(value) and not key.startswith("_"))
        raise ValueError(f"{path} has no function {name!r}; it has {there or 'none'}")
    return program


def _raise(error: BaseException, rank: Rank, /, *args: Any, **given: Any) -> NoReturn:
    raise error


def settings(texts: Sequence[str]) -> dict[str, Any]:
    """``NAME=VALUE`` texts as keyword arguments; values are Python literals where they can be, else texts.

    Raises ValueError for a text without a name.

    >>> settings(["stage=3", "compute=bf16", "sizes=[4, 5]"])
    {'stage': 3, 'compute': 'bf16', 'sizes': [4, 5]}
    """
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"{text!r} sets nothing; write NAME=VALUE, as in stage=3")
        found[name] = _literal(value)
    return found


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def run(cluster: Cluster, program: Callable[..., Any]) -> list[RanPart]:
    """Runs the program on the cluster; the parts of all ranks, wherever they ran, in rank order.

    A result that cannot be shown is an error of its rank, which ends the run on all of them.
    """
    results = cluster.run(lambda rank: _shown(program(rank)))
    if isinstance(cluster, ProcessCluster):
        parts: list[RanPart] = cluster.gather(_part(cluster, 0, cluster.index, results[cluster.index]))
        return parts
    return [_part(cluster, rank, rank, shown) for rank, shown in enumerate(results)]


def _shown(result: Any) -> Any:
    """A result as text, and its fingerprint; a generator as it is, since the cluster says what is wrong with it."""
    if isgenerator(result) or iscoroutine(result):
        return result
    try:
        fingerprint = sha256(result)
    except (ValueError, RecursionError):  # a list that contains itself has no end
        fingerprint = None
    return repr(result), fingerprint


def _part(cluster: Cluster, place: int, rank: int, shown: tuple[str, str | None]) -> RanPart:
    return RanPart(rank, *shown, cluster.trace[place].sent_nbytes(), cluster.memory[place].peak_nbytes)
