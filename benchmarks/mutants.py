"""Mutants: small faults put into the package one at a time, and how many of them the tests notice.

    python benchmarks/mutants.py --count 200                     # the kill rate by folder, and every survivor
    python benchmarks/mutants.py --count 20 --only zero/update
    python benchmarks/mutants.py --checkout ../old --results old.jsonl       # another checkout, with its own .venv

Operators: + and -, * and /, < and <=, > and >=, == and !=, is, in, and/or exchanged; a whole number or a slice's bound
off by one; a statement dropped (an assignment through a subscript, an augmented one, a call for its effect); two
neighboring positional arguments swapped; a condition negated; True and False exchanged; a returned value dropped. Not
touched are texts, errors that are raised, asserts, docstrings, annotations, default values, and functions that return a
text. Which mutants are made depends on each function's own source, not on its file: code that moves keeps its mutants.

First all tests run once with marks in the package, which say the lines that each of them executes; that map is kept by
the contents of the checkout. A mutant is then written into a scratch copy, and the tests that execute its line are
run, the shortest of each test function first, as far as the budget of CPU seconds goes. It is killed when one of them
fails or needs far more CPU time than before. Results are appended to a file as they come: an interrupted run goes on.
"""

import argparse
import ast
import builtins
import contextlib
import difflib
import hashlib
import importlib.machinery
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

FOLDERS = ("numerics", "ranks", "zero", "optim")
ELSEWHERE = re.compile(r"cupy|gpu|nccl|mpi/|processes/")  # what computes or sends elsewhere: other tests run it
TESTS = ("tests/numerics", "tests/ranks", "tests/zero", "tests/optim", "tests/models")
QUIETLY = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--assert=plain")
HITS = "__mutants_hits__"
FILES_AT_ONCE = 8
NOT_COPIED = (".venv", ".git", "build", "dist", "site", "__pycache__", ".hypothesis", "*_cache")
FIRST_SECONDS = 4.0  # of tests are run before the others are collected: most mutants die in them
SPARE_SECONDS, TIMES_SLOWER = 20, 4  # a mutant's tests may take so much longer than they did before
WALL_SECONDS = 1800  # for one that waits without end
MEMORY_NBYTES = 8 << 30


# -- making mutants ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """One change of one file: the bytes from ``start`` to ``stop`` become ``text``. The lowest ``order`` is made first.
    """

    key: str
    order: float
    operator: str
    path: str  # within the checkout
    line: int
    last_line: int
    start: int
    stop: int
    text: str

    @property
    def folder(self) -> str:
        return self.path.split("/")[1]

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line}"

    def source(self, before: bytes) -> bytes:
        """The file with the change."""
        return before[:self.start] + self.text.encode() + before[self.stop:]


# How often one of each is taken, beside the others: positional arguments and returns are many, flags and slices few.
WEIGHTS = {"arithmetic": 1.0, "comparison": 1.0, "logic": 1.0, "off by one": 1.0, "slice bound": 2.0, "dropped": 0.8,
           "swapped": 0.2, "negated": 0.7, "flag": 2.0, "return": 0.5}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*")}
COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: (r"is\s+not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in")}
SYMMETRIC = {"min", "max", "isinstance", "issubclass", "maximum", "minimum", "may_share_memory", "gcd", "lcm"}
UNHEARD_KEYWORDS = {"strict", "stacklevel", "maxsize"}
UNHEARD_CALLS = {"warn", "add_note"}
Change = tuple[str, int, int, str]  # operator, first byte, last, text


class Source:
    """One file's text and where its nodes stand in it, in bytes."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self.starts = [0, *(match.end() for match in re.finditer(b"\n", text))]

    def start(self, node: Any) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def stop(self, node: Any) -> int:
        return self.starts[node.end_lineno - 1] + node.end_col_offset

    def of(self, node: Any) -> str:
        return self.text[self.start(node):self.stop(node)].decode()

    def operator(self, left: ast.AST, right: ast.AST, pattern: str) -> tuple[int, int] | None:
        """Where the operator between two nodes stands; None where there is more than it, such as a comment."""
        low = self.stop(left)
        gap = self.text[low:self.start(right)].decode()
        match = re.fullmatch(rf"[\s()\\]*({pattern})[\s()\\]*", gap)
        return match and (low + len(gap[:match.start(1)].encode()), low + len(gap[:match.end(1)].encode()))


def mutants_of(path: str, text: bytes, seed: int) -> Iterator[Mutant]:
    """All mutants of one file."""
    source, tree = Source(text), ast.parse(text)
    for function in functions_in(tree):
        own = normalized(function)
        counts: Counter[str] = Counter()
        changes = [change for statement in body_of(function) for change in changes_of(source, statement)]
        for operator, start, stop, new in sorted(changes, key=lambda change: change[1:3]):
            number = counts[operator]
            counts[operator] += 1
            digest = hashlib.sha256(f"{seed}\n{own}\n{operator}\n{number}".encode()).hexdigest()
            order = -math.log1p(-int(digest[:13], 16) / 16**13) / WEIGHTS[operator]
            line, last = text.count(b"\n", 0, start) + 1, text.count(b"\n", 0, stop) + 1
            yield Mutant(digest[:16], order, operator, path, line, last, start, stop, new)


def functions_in(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods whose changes someone could notice; those that return a text say what others did."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            returned = ast.unparse(node.returns) if node.returns else ""
            if node.name not in ("__repr__", "__str__") and returned != "str":
                yield node


def body_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    """The statements, without a docstring."""
    return function.body[ast.get_docstring(function, clean=False) is not None:]


class _Normal(ast.NodeTransformer):
    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return ast.Raise()  # an error's words may change


def normalized(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The function's source without docstring, comments, layout and the words of its errors."""
    copied: Any = ast.parse(ast.unparse(function)).body[0]
    copied.body = body_of(copied) or [ast.Pass()]
    return ast.unparse(_Normal().visit(copied))


def changes_of(source: Source, node: ast.AST) -> Iterator[Change]:
    """The changes of one node and all that is in it."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Raise | ast.Assert | ast.JoinedStr):
        return  # a function inside has changes of its own
    yield from own_changes(source, node)
    for name, value in ast.iter_fields(node):
        if name != "annotation":
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not is_unheard(child):
                    yield from changes_of(source, child)


def is_unheard(node: ast.AST) -> bool:
    """True for arguments and calls that change no value."""
    return (isinstance(node, ast.keyword) and node.arg in UNHEARD_KEYWORDS) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and called(node.value) in UNHEARD_CALLS)


def called(node: ast.Call) -> str:
    """The last part of the function's name."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def own_changes(source: Source, node: ast.AST) -> Iterator[Change]:
    """The changes of one node itself."""

    def instead(operator: str, of: ast.AST, text: str) -> Change:
        return operator, source.start(of), source.stop(of), text

    match node:
        case ast.BinOp() if type(node.op) in ARITHMETIC and not any(map(is_text, (node.left, node.right))):
            old, new = ARITHMETIC[type(node.op)]
            if at := source.operator(node.left, node.right, re.escape(old)):
                yield "arithmetic", *at, new
        case ast.Compare():
            for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                old, new = COMPARISONS[type(op)]
                if at := source.operator(left, right, old):
                    yield "comparison", *at, new
        case ast.BoolOp():
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in zip(node.values, node.values[1:], strict=False):
                if at := source.operator(left, right, old):
                    yield "logic", *at, new
        case ast.Constant(value=bool()):
            yield instead("flag", node, str(not node.value))
        case ast.Constant(value=int()):
            yield instead("off by one", node, str(node.value + 1))
        case ast.Slice():
            for bound, sign in ((node.lower, "+"), (node.upper, "-")):
                if bound is not None and not isinstance(bound, ast.Constant):
                    yield instead("slice bound", bound, f"({source.of(bound)}) {sign} 1")
        case ast.Assign() if any(isinstance(part, ast.Subscript) for target in node.targets
                                 for part in getattr(target, "elts", [target])):
            yield instead("dropped", node, "pass")
        case ast.AugAssign() | ast.Expr(value=ast.Call()):
            yield instead("dropped", node, "pass")
        case ast.Call() if called(node) not in SYMMETRIC:
            for left, right in zip(node.args, node.args[1:], strict=False):
                texts = source.of(left), source.of(right)
                starred = any(isinstance(part, ast.Starred | ast.GeneratorExp) for part in (left, right))
                if texts[0] != texts[1] and not starred:
                    between = source.text[source.stop(left):source.start(right)].decode()
                    yield "swapped", source.start(left), source.stop(right), f"{texts[1]}{between}{texts[0]}"
        case ast.Return() if node.value is not None and not is_none(node.value):
            yield instead("return", node, "return None")
    for test in conditions_of(node):
        yield instead("negated", test, f"(not ({source.of(test)}))")


def conditions_of(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        return [node.test]
    return list(node.ifs) if isinstance(node, ast.comprehension) else []


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def chosen(checkout: Path, seed: int, count: int, only: str) -> list[Mutant]:
    """The first ``count`` mutants by their order; the same for the same functions, wherever they stand."""
    found = []
    for folder in FOLDERS:
        for file in sorted((checkout / "zerosim" / folder).rglob("*.py")):
            path = file.relative_to(checkout).as_posix()
            if only in path and not ELSEWHERE.search(path):
                found += mutants_of(path, file.read_bytes(), seed)
    return sorted(found, key=lambda mutant: (mutant.order, mutant.path))[:count]


# -- which tests execute which lines ----------------------------------------------------------------------------------


class Marks:
    """Statements that say that they were executed: a byte for each of the package's functions' statements.

    They are written into the modules as these are imported; a tracer would take many times as long.
    """

    def __init__(self, root: str) -> None:
        self.root, self.package = root, os.path.join(root, "zerosim", "")
        self.hits = bytearray()
        self.places: list[tuple[str, int]] = []  # of each statement: its file, and its lines as the bits of a number

    def install(self) -> None:
        """Marks every module of the package that is imported from now on."""
        setattr(builtins, HITS, self.hits)
        loader_class = importlib.machinery.SourceFileLoader
        plain = loader_class.get_code

        def get_code(loader: Any, name: str) -> Any:
            path = str(loader.get_filename(name))
            if not path.startswith(self.package):
                return plain(loader, name)
            # Neither read from a cache of compiled modules nor written to one: marks are those of this process.
            return compile(self.marked(ast.parse(loader.get_data(path)), path), path, "exec", dont_inherit=True)

        loader_class.get_code = get_code  # type: ignore[method-assign]

    def marked(self, tree: ast.Module, path: str) -> ast.Module:
        """The module with a mark before each statement of its functions."""
        file = path[len(self.root) + 1:].replace(os.sep, "/")
        inside = {id(node) for function in ast.walk(tree) for node in ast.walk(function)
                  if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)}
        for node in [node for node in ast.walk(tree) if id(node) in inside and not isinstance(node, ast.ClassDef)]:
            for name in ("body", "orelse", "finalbody"):
                statements = getattr(node, name, None)
                if isinstance(statements, list):
                    marked = [part for statement in statements for part in (self._mark(statement, file), statement)]
                    first = is_text(getattr(statements[0], "value", None)) if statements else False
                    setattr(node, name, marked[first:])  # a docstring stays the first
        return tree

    def _mark(self, statement: ast.stmt, file: str) -> ast.stmt:
        inner = next((part[0].lineno for part in (getattr(statement, "body", []), getattr(statement, "cases", []))
                      if part and hasattr(part[0], "lineno")), (statement.end_lineno or 0) + 1)
        self.places.append((file, (1 << max(inner, statement.lineno + 1)) - (1 << statement.lineno)))
        self.hits.append(0)
        mark = ast.parse(f"{HITS}[{len(self.places) - 1}] = 1").body[0]
        for node in ast.walk(mark):
            ast.copy_location(node, statement)
            if hasattr(node, "end_lineno"):
                node.end_lineno, node.end_col_offset = node.lineno, node.col_offset
        return mark

    def taken(self) -> dict[str, int]:
        """The lines executed since the last call, by file, as the bits of a number."""
        found: dict[str, int] = {}
        for match in re.finditer(b"\x01", bytes(self.hits)):
            file, lines = self.places[match.start()]
            found[file] = found.get(file, 0) | lines
        self.hits[:] = bytes(len(self.hits))
        return found


class Collector:
    """Notes the lines of the package that each test executes, and its CPU seconds.

    What the import of a test's file and fixtures of wider scope execute counts for every test of the file.
    """

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self.shared: dict[str, dict[str, int]] = {}  # by test file
        self.collected_seconds: dict[str, float] = {}
        self.now: dict[str, int] = {}
        self.passed: dict[str, bool] = {}
        self.tests: dict[str, tuple[float, dict[str, int]]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Notes whether all of a test's phases passed."""
        self.passed[report.nodeid] = self.passed.get(report.nodeid, True) and report.passed

    def around_collection(self, file: str) -> Iterator[None]:
        """Around the import of a test file."""
        start = time.process_time()
        yield
        _join(self.shared.setdefault(file, {}), self.marks.taken())
        self.collected_seconds[file] = self.collected_seconds.get(file, 0.0) + time.process_time() - start

    def around_fixture(self, fixture: Any, file: str) -> Iterator[None]:
        """Around a fixture's setup: a wider one's lines are everybody's."""
        wide = fixture.scope != "function"
        if wide:
            _join(self.now, self.marks.taken())
        yield
        if wide:
            _join(self.shared.setdefault(file, {}), self.marks.taken())

    def around_test(self, name: str) -> Iterator[None]:
        """Around a test, with its setup and teardown."""
        self.marks.taken()
        self.now = {}
        start = time.process_time()
        yield
        _join(self.now, self.marks.taken())
        self.tests[name] = time.process_time() - start, self.now

    def found(self, files: Iterable[str]) -> dict[str, Any]:
        """What a map keeps of these test files."""
        found: dict[str, Any] = {file: {"collected_seconds": round(self.collected_seconds.get(file, 0.0), 3),
                                        "tests": {}} for file in files}
        for name, (seconds, lines) in self.tests.items():
            file = name.partition("::")[0]
            if self.passed.get(name):
                _join(lines, self.shared.get(file, {}))
                found[file]["tests"][name] = [round(seconds, 4), {of: f"{bits:x}" for of, bits in lines.items()}]
        return found


def _join(into: dict[str, int], more: dict[str, int]) -> None:
    for file, bits in more.items():
        into[file] = into.get(file, 0) | bits


def collect(out: str, checkout: str, files: list[str]) -> int:
    """Runs test files in this process with marks in the package, and writes what was found."""
    import pytest

    sys.dont_write_bytecode = True
    sys.path[0] = checkout  # instead of this script's folder
    marks = Marks(checkout)
    marks.install()
    import zerosim

    if not str(zerosim.__file__).startswith(checkout):
        raise SystemExit(f"the tests would run with {zerosim.__file__}, and not with the copy in {checkout}")
    collector = Collector(marks)

    class Plugin:
        pytest_runtest_logreport = staticmethod(collector.pytest_runtest_logreport)

        @pytest.hookimpl(hookwrapper=True)
        def pytest_make_collect_report(self, collector: Any) -> Iterator[None]:
            yield from around_collection(collector.nodeid.partition("::")[0])

        @pytest.hookimpl(hookwrapper=True)
        def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
            yield from collector.around_fixture(fixturedef, request.node.nodeid.partition("::")[0])

        @pytest.hookimpl(hookwrapper=True)
        def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
            yield from collector.around_test(item.nodeid)

    around_collection = collector.around_collection
    code = pytest.main([*QUIETLY, *files], plugins=[Plugin()])
    Path(out).write_text(json.dumps(collector.found(files)), encoding="utf-8")
    return int(code)


# -- running ----------------------------------------------------------------------------------------------------------


def environment(checkout: Path) -> dict[str, str]:
    """One BLAS thread, the same examples of hypothesis each time, and the copy's package before any other."""
    threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**os.environ, **threads, "PYTHONPATH": str(checkout), "CI": "1", "PYTHONHASHSEED": "0"}


@dataclass(frozen=True)
class Ended:
    """A run that has ended: its exit code (negative: a signal), CPU seconds, and what it printed."""

    code: int
    seconds: float
    text: str


class Server:
    """A process that has imported what no mutant changes, and forks for each run of tests in a copy."""

    def __init__(self, python: str, copy: Path) -> None:
        self.copy = copy
        words = [python, str(Path(__file__).resolve()), "--serve", str(copy)]
        self.process = subprocess.Popen(words, cwd=copy, env=environment(copy), text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE)

    def test(self, names: list[str], cpu_seconds: float) -> Ended:
        """Runs these tests until one fails."""
        listed, printed = self.copy / "selected.txt", self.copy / "printed.txt"
        listed.write_text("\n".join(names), encoding="utf-8")
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([f"@{listed}", str(printed), math.ceil(cpu_seconds)]) + "\n")
        self.process.stdin.flush()
        code, seconds = json.loads(self.process.stdout.readline())
        return Ended(code, seconds, printed.read_text(encoding="utf-8", errors="replace"))

    def close(self) -> None:
        """Ends the process."""
        self.process.communicate()


def serve(checkout: str) -> int:
    """Answers each line of stdin: runs pytest on the tests that a file lists, and says exit code and CPU seconds."""
    import numpy  # noqa: F401
    import pytest

    sys.path[0] = checkout  # instead of this script's folder
    for line in sys.stdin:
        tests, printed, cpu_seconds = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setsid()
            output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
                os.dup2(file, stream)
            limit(cpu_seconds)
            signal.alarm(WALL_SECONDS)
            code = pytest.main([*QUIETLY, "-x", tests])
            sys.stdout.flush()
            os._exit(code)
        _, status, usage = os.wait4(child, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        print(json.dumps([os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime]), flush=True)
    return 0


def limit(cpu_seconds: float) -> None:
    """Limits this process's CPU time and memory."""
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(cpu_seconds), math.ceil(cpu_seconds) + 5))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_NBYTES, MEMORY_NBYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def copied(checkout: Path, folder: str) -> Path:
    """A copy of the checkout without what is made or installed in it."""
    target = Path(folder) / "copy"
    shutil.copytree(checkout, target, ignore=shutil.ignore_patterns(*NOT_COPIED), symlinks=True)
    return target.resolve()


def digest_of(checkout: Path, tests: Iterable[str]) -> str:
    """Of the package and the tests: what a map is kept by."""
    digest = hashlib.sha256()
    for file in sorted([*(checkout / "zerosim").rglob("*.py"), *(checkout / "tests").rglob("*.py")]):
        digest.update(f"{file.relative_to(checkout)}\n".encode() + file.read_bytes())
    digest.update("\n".join(tests).encode())
    return digest.hexdigest()[:12]


@dataclass(frozen=True)
class Test:
    """One test: its id, CPU seconds, what its file takes to collect, and the lines that it executes, by file."""

    name: str
    seconds: float
    collected_seconds: float
    lines: dict[str, int]

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]

    @property
    def function(self) -> str:
        return self.name.partition("[")[0]

    def covers(self, mutant: Mutant) -> bool:
        """True where the test executes a line of the mutant."""
        lines = (1 << mutant.last_line + 1) - (1 << mutant.line)
        return bool(self.lines.get(mutant.path, 0) & lines)


def mapped(asked: argparse.Namespace, path: Path) -> list[Test]:
    """The map of tests, file by file; those that were mapped before are read."""
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    files = [file.relative_to(asked.checkout).as_posix() for folder in asked.tests
             for file in sorted((asked.checkout / folder).rglob("test_*.py")) or [asked.checkout / folder]]
    missing = [file for file in files if file not in known]
    if missing:
        print(f"mapping {len(missing)} test files, once", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
            copy = copied(asked.checkout, scratch)
            out = Path(scratch) / "found.json"
            for at in range(0, len(missing), FILES_AT_ONCE):
                some = missing[at:at + FILES_AT_ONCE]
                out.unlink(missing_ok=True)
                script = str(Path(__file__).resolve())
                start = time.monotonic()
                # What a test starts must compile nothing into the copy: a compiled module would be read without marks.
                ended = subprocess.run([asked.python, script, "--collect", str(out), str(copy), *some], cwd=copy,
                                       env=environment(copy) | {"PYTHONDONTWRITEBYTECODE": "1"},
                                       stdin=subprocess.DEVNULL, capture_output=True, text=True)
                found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
                if not any(lines for of_file in found.values() for _, lines in of_file["tests"].values()):
                    raise SystemExit(f"{', '.join(some)} could not be mapped:\n{ended.stdout[-3000:]}{ended.stderr}")
                known |= found
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(known), encoding="utf-8")
                tests = sum(len(known[file]["tests"]) for file in some)
                seconds = time.monotonic() - start
                print(f"{seconds:7.1f} s  {tests:5} tests  {' '.join(some)}", file=sys.stderr, flush=True)
    return [Test(name, seconds, known[file]["collected_seconds"], {path: int(bits, 16) for path, bits in lines.items()})
            for file in files for name, (seconds, lines) in known[file]["tests"].items()]


def selected(mutant: Mutant, tests: list[Test], budget: float) -> list[list[Test]]:
    """The tests to run, in two parts: the shortest of each test function before second ones, within the budget."""
    turns: Counter[str] = Counter()
    covering = []
    for test in sorted((test for test in tests if test.covers(mutant)), key=lambda test: test.seconds):
        covering.append((turns[test.function], test.seconds, test))
        turns[test.function] += 1
    parts: list[list[Test]] = [[], []]
    spent, files = 0.0, set()
    for _, seconds, test in sorted(covering, key=lambda found: found[:2]):
        seconds += 0.0 if test.file in files else 0.3 * test.collected_seconds
        if spent + seconds <= budget or not files:
            spent += seconds
            files.add(test.file)
            parts[spent > FIRST_SECONDS and bool(parts[0])].append(test)
    return [part for part in parts if part]


def judged(mutant: Mutant, tests: list[Test], server: Server, budget: float, *, control: bool) -> dict[str, Any]:
    """The mutant's fate, and what it took; as a control, that of the file as it is."""
    file = server.copy / mutant.path
    before, stat = file.read_bytes(), file.stat()
    after = before if control else mutant.source(before)
    found: dict[str, Any] = {**asdict(mutant), "folder": mutant.folder, "diff": diff_of(before, after), "tests": 0,
                             "outcome": "survived", "by": "no test executes it", "cpu_seconds": 0.0}
    try:
        ast.parse(after)
        file.write_bytes(after)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9 * (1000 + mutant.start)))  # no compiled file fits
        for part in selected(mutant, tests, budget):
            allowed = SPARE_SECONDS + TIMES_SLOWER * sum(test.seconds for test in part)
            ended = server.test([test.name for test in part], allowed)
            found["tests"] += len(part)
            found["cpu_seconds"] = round(found["cpu_seconds"] + ended.seconds, 2)
            found["by"] = ""
            if ended.code:
                found |= {"outcome": "killed", "by": killer(ended)}
                break
    finally:
        file.write_bytes(before)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return found


def killer(ended: Ended) -> str:
    """The first test that failed, or what else ended the run."""
    if ended.code < 0:
        return f"signal {signal.Signals(-ended.code).name}"
    match = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", ended.text, re.MULTILINE)
    return match[1] if match else f"exit code {ended.code}: {ended.text.strip().splitlines()[-1][:200]}"


def diff_of(before: bytes, after: bytes) -> str:
    """The lines that differ, with - and +."""
    lines = difflib.unified_diff(before.decode().splitlines(), after.decode().splitlines(), lineterm="", n=0)
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def report(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Prints survivors, and a line for each folder and operator; returns the counts."""
    for found in sorted(results, key=lambda found: (found["path"], found["line"])):
        if found["outcome"] == "survived":
            print(f"survived  {found['path']}:{found['line']}  {found['operator']}; "
                  f"{found['by'] or counted(found['tests'])}\n{found['diff']}\n")
    counts: dict[str, Any] = {}
    for what in ("folder", "operator"):
        for name in dict.fromkeys([*(FOLDERS if what == "folder" else WEIGHTS), *(found[what] for found in results)]):
            of = [found["outcome"] == "killed" for found in results if found[what] == name]
            if of:
                counts[name] = {"made": len(of), "killed": sum(of), "survived": len(of) - sum(of)}
    killed = sum(found["outcome"] == "killed" for found in results)
    counts["all"] = {"made": len(results), "killed": killed, "survived": len(results) - killed}
    print(f"{'':14}{'made':>6}{'killed':>8}{'survived':>10}{'kill rate':>11}")
    for name, of in counts.items():
        print(f"{name:14}{of['made']:6}{of['killed']:8}{of['survived']:10}{of['killed'] / max(1, of['made']):11.1%}")
    return counts


def counted(tests: int) -> str:
    return f"{tests} test{'s' * (tests != 1)} passed"


def judge_all(wanted: list[Mutant], tests: list[Test], results: Path,
              asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Judges those that the results' file does not know yet, and returns what it knows of all."""
    known: dict[tuple[str, str], dict[str, Any]] = {}
    if results.exists():
        lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
        known = {(found["key"], found["path"]): found for found in lines}
    todo = [mutant for mutant in wanted if (mutant.key, mutant.path) not in known]
    results.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch, ThreadPoolExecutor(asked.jobs) as pool:
        servers: SimpleQueue[Server] = SimpleQueue()
        for index in range(asked.jobs if todo else 0):
            (Path(scratch) / str(index)).mkdir()
            servers.put(Server(asked.python, copied(asked.checkout, f"{scratch}/{index}")))

        def one(mutant: Mutant) -> dict[str, Any]:
            server = servers.get()
            try:
                return judged(mutant, tests, server, asked.budget, control=asked.control)
            finally:
                servers.put(server)

        for number, found in enumerate(pool.map(one, todo), 1):
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
            known[found["key"], found["path"]] = found
            print(f"{number:4} of {len(todo)}  {found['outcome']:8} {found['cpu_seconds']:6.1f} s  "
                  f"{found['path']}:{found['line']} {found['operator']}", file=sys.stderr, flush=True)
        while not servers.empty():
            servers.get().close()
    return [known[mutant.key, mutant.path] for mutant in wanted]


def main() -> int:
    """Makes, judges and reports; 0 whatever survives."""
    if sys.argv[1:2] == ["--collect"]:
        return collect(sys.argv[2], sys.argv[3], sys.argv[4:])
    if sys.argv[1:2] == ["--serve"]:
        return serve(sys.argv[2])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="which of all that are possible")
    parser.add_argument("--only", default="", help="only of files whose path contains this text")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time, each with a copy of its own")
    parser.add_argument("--budget", type=float, default=60.0, help="CPU seconds of tests for each mutant")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="the folders of tests")
    parser.add_argument("--checkout", type=Path, default=Path(__file__).parents[1], help="what is mutated and tested")
    parser.add_argument("--python", help="its interpreter; without it, that of its .venv, or this one")
    parser.add_argument("--results", type=Path, help="a file of JSON lines, to which results are appended")
    parser.add_argument("--map", type=Path, help="the file of which test executes what")
    parser.add_argument("--json", type=Path, help="write the counts into this file too")
    parser.add_argument("--control", action="store_true", help="run the same tests and change nothing: none is killed")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    asked = parser.parse_args()
    asked.checkout = asked.checkout.resolve()
    for folder in asked.tests:
        if not (asked.checkout / folder).exists():
            parser.error(f"there are no tests {folder} in {asked.checkout}")
    own = asked.checkout / ".venv" / "bin" / "python"
    asked.python = asked.python or (str(own) if own.exists() else sys.executable)
    wanted = chosen(asked.checkout, asked.seed, asked.count, asked.only)
    if asked.list:
        for mutant in wanted:
            before = (asked.checkout / mutant.path).read_bytes()
            print(f"{mutant.key}  {mutant.place}  {mutant.operator}\n{diff_of(before, mutant.source(before))}\n")
        print(dict(Counter(mutant.operator for mutant in wanted)), dict(Counter(mutant.folder for mutant in wanted)))
        return 0
    digest = digest_of(asked.checkout, asked.tests)
    made = asked.checkout / "build" / "mutants"
    tests = mapped(asked, asked.map or made / f"map-{digest}.json")
    results = asked.results or made / f"{'control' if asked.control else 'results'}-{digest}.jsonl"
    counts = report(judge_all(wanted, tests, results, asked))
    if asked.json:
        asked.json.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
