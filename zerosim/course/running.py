"""A reader's own program, from a file, on any world of ranks: the results, bytes held and bytes sent of each rank.

The same file runs in one process and under mpiexec; equal fingerprints say that it gave equal bits.
"""

import ast
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from inspect import Parameter, iscoroutine, isfunction, isgenerator, signature
from pathlib import Path
from typing import Any, NoReturn

from rich.markup import escape

from zerosim.connect import LAUNCHERS, installed_program
from zerosim.display.saving import is_one_of_many
from zerosim.display.views import TextLine, View, marked_table
from zerosim.numerics.arrays import sha256
from zerosim.numerics.units import counted
from zerosim.ranks.cluster import Cluster, RankProgram
from zerosim.ranks.errors import BackendError
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


def load(place: str) -> RankProgram:
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
    if spec is None or not isinstance(spec.loader, SourceFileLoader):
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
        # From its source: bytecode would be left beside the file, and taken for a text of the same second and length.
        exec(spec.loader.source_to_code(file.read_bytes(), str(file)), vars(module))
    except (Exception, SystemExit) as error:
        return partial(_raise, error)
    program: RankProgram | None = getattr(module, name, None)
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


def with_settings(program: RankProgram, given: Mapping[str, Any]) -> RankProgram:
    """The program with these keyword arguments; ValueError for one that it does not take."""
    if not given:
        return program
    parameters = list(signature(program).parameters.values())
    takes_all = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)
    names = [parameter.name for parameter in parameters[1:] if parameter.kind is not Parameter.POSITIONAL_ONLY]
    if unknown := [name for name in given if not takes_all and name not in names]:
        raise ValueError(f"--with sets {unknown[0]!r}, which the program does not take beside its rank; it "
                         f"takes {', '.join(names) or 'nothing'}")
    return partial(program, **given)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _as_said(value: Any) -> str:
    """The text of a setting that is read back as this value: quoted where a text would be read as a number, say."""
    return repr(value) if isinstance(value, str) and _literal(value) != value else str(value)


def run(cluster: Any, program: Callable[..., Any]) -> list[RanPart]:
    """Runs the program on the cluster; the parts of all ranks, wherever they ran, in rank order.

    A result that cannot be shown is an error of its rank, which ends the run on all of them.
    """
    results = cluster.run(lambda rank: _shown(program(rank)))
    if is_one_of_many(cluster):
        here = cluster.ranks[0].index
        parts: list[RanPart] = cluster.gather(_part(cluster, 0, here, results[here]))
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


# -- The same on processes of their own, started from a notebook or a script as one would from a shell ----------------

OPEN_MPI = ("Open MPI", "OpenRTE")  # wants a flag for more processes than cores, and of root, as in a container
ASKED_FOR = ("--oversubscribe", "--allow-run-as-root")
SECONDS = 300.0  # a job takes a few; on a busy machine, where its processes share a core, ten times as many


def launched(place: str, ranks: int, settings: Mapping[str, Any] | None = None, *,
             seconds: float = SECONDS) -> list[RanPart]:
    """Runs ``FILE.py:FUNCTION`` on N processes over MPI; the parts of all ranks, in rank order.

    It is ``mpiexec -n N zerosim run FILE.py:FUNCTION --json``, with the settings as ``--with NAME=VALUE``. What ranks
    return comes back as text, and as a SHA-256 to compare with `zerosim.numerics.arrays.sha256` of a result here.
    Raises BackendError where MPI is not installed, ValueError for no ranks, and RuntimeError, with what the job said,
    where it fails or does not end in time.
    """
    if ranks < 1:
        raise ValueError(f"{ranks} processes were asked for; take one at least")
    words = [*_launcher(), "-n", str(ranks), sys.executable, "-m", "zerosim", "run", place, "--json"]
    for name, value in (settings or {}).items():
        words += ["--with", f"{name}={_as_said(value)}"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{ranks} processes of {place} did not end within {seconds:g} seconds; give them more, or "
                           "look for ranks that wait for each other") from None
    if done.returncode:
        raise RuntimeError(f"{ranks} processes of {place} ended with exit code {done.returncode} and said: "
                           f"{done.stderr.strip() or done.stdout.strip() or 'nothing'}")
    return [RanPart(**row) for row in json.loads(done.stdout)["rows"]]


def _launcher() -> list[str]:
    """The launcher beside this interpreter or on the PATH, and its flags; BackendError where one or mpi4py is not."""
    found = installed_program(*LAUNCHERS)
    if found is None or find_spec("mpi4py") is None:
        missing = "mpi4py is not installed" if found else f"there is no {' or '.join(LAUNCHERS)} here"
        raise BackendError("mpi", f"processes over MPI cannot be had: {missing}; pip install 'zerosim[mpi]'")
    said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=SECONDS).stdout
    return [found, *(ASKED_FOR if any(name in said for name in OPEN_MPI) else ())]


# -- The printed table and the JSON -----------------------------------------------------------------------------------

SHOWN = 16   # hex digits of a fingerprint
LONGEST = 60  # characters of a result, and fewer where a line is not so long
BESIDE = 56   # columns that the others take


def run_view(world: str, parts: Sequence[RanPart], columns: int) -> View:
    """A line for each rank, for a terminal of so many columns."""
    longest = min(LONGEST, max(SHOWN, columns - BESIDE))
    rows = ((str(part.rank), f"{part.sent_nbytes:,}", f"{part.peak_nbytes:,}", (part.sha256 or "none")[:SHOWN],
             escape(_one_line(part.result, longest))) for part in parts)
    table = marked_table(">rank", ">bytes sent", ">peak bytes", "SHA-256", "result", rows=rows)
    return View(counted(len(parts), "rank"), f", {world}", (TextLine(""), table))


def as_json(world: str, parts: Sequence[RanPart], blas: Sequence[Any], blas_threads: int) -> dict[str, Any]:
    """The same as plain data, and the BLAS, and its threads, whose bits these are."""
    return {"world": world, "ranks": len(parts), "blas_threads": blas_threads,
            "blas": [{"name": library.name, "version": library.version, "architecture": library.architecture}
                     for library in blas],
            "rows": [asdict(part) for part in parts]}


def _one_line(text: str, longest: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= longest else line[:longest - 1] + "…"
