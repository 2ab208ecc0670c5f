"""Checks of the house rules, as functions of one file's text. Each returns its violations as lines."""

import ast
import re
from collections.abc import Iterable, Iterator

from tests.architecture.source import Source

MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTABLE_CALLS = {"list", "dict", "set", "defaultdict", "Counter", "deque", "bytearray"}
WORK = (ast.For, ast.While, ast.With, ast.AsyncFor, ast.AsyncWith)
COUNTERS = {"zerosim/ranks/trace.py": re.compile(r"(^|_)sent(_|$)"),
            "zerosim/ranks/memory.py": re.compile(r"(^|_)(now|peak|held)_nbytes")}
HALF = re.compile(r"float16|fp16|\bhalf\b|['\"][<>=|]?(e|f2)['\"]")
CASTS = ("zerosim/numerics/rounding.py", "zerosim/numerics/kernels.py")
# Words, one of which is in each place that only some machine has, and what stands around them there.
NOT_IN_A_CLONE = {what: (words, re.compile(around.format("|".join(map(re.escape, words))))) for what, words, around in (
    ("an absolute path", tuple("/" + name for name in ("work", "home", "root", "Users")), r"(?<![\w.:/~])(?:{})\b"),
    ("a package registry's host", ("pypi", "pythonhosted", "anaconda", "npmjs", "debian"), r"\b(?:{})\.(?:org|com)\b"),
    ("a folder of the workshop", ("../" + "shared",), r"{}\b"),
    ("a paper of the workshop", ("SPEC", "CONTRACTS", "DESIGN", "SPEED", "BACKENDS", "EDGE_CASES"),
     r"\b(?:{})(?:\.md|\s*§|, section)"))}


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _asks_no_number(operator: ast.cmpop, right: ast.expr) -> bool:
    return isinstance(operator, ast.Is | ast.IsNot) or (
        isinstance(operator, ast.In | ast.NotIn) and _last_name(right) == "STAGES")


def stage_comparisons(source: Source) -> list[str]:
    """Questions for the number of a stage, which is a row of a table; `is None`, `in STAGES` ask none."""
    asked = []
    for node in source.nodes:
        if isinstance(node, ast.Match):
            sides = [node.subject]
        elif isinstance(node, ast.Compare) and not all(map(_asks_no_number, node.ops, node.comparators)):
            sides = [node.left, *node.comparators]
        else:
            continue
        asked += [source.at(node, f"compares {ast.unparse(side)}; look its row up in the table instead")
                  for side in sides if _last_name(side).lower().endswith("stage")]
    return asked


def _assigned_attributes(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.stmt, str]]:
    """Each assignment to an attribute or to an item of one (`x.a = 1`, `x.a += 1`, `x.a["k"] += 1`)."""
    for node in nodes:
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                inner = part.value if isinstance(part, ast.Subscript) else part
                if isinstance(inner, ast.Attribute):
                    yield node, inner.attr


def counted_elsewhere(source: Source) -> list[str]:
    """Counters of sent or held bytes changed outside the file that counts them; `tiny` stands alone."""
    return [source.at(node, f"changes {name}; such bytes are counted in {home} alone")
            for home, counter in COUNTERS.items() if source.path not in (home, "zerosim/tiny.py")
            for node, name in _assigned_attributes(source.nodes) if counter.search(name)]


def half_casts_elsewhere(source: Source) -> list[str]:
    """`astype` to fp16 outside the casting kernels: NumPy's is up to fifty times slower on small numbers."""
    if source.path in CASTS:
        return []
    return [source.at(node, f"{ast.unparse(node)}: casts to and from fp16 go through the kernels' cast_pack")
            for node in source.nodes
            if isinstance(node, ast.Call) and _last_name(node.func) == "astype"
            and HALF.search(ast.unparse(node).partition(".astype(")[2])]


def work_at_import(source: Source) -> list[str]:
    """Loops and bare calls at the top of a module, and names that can be changed behind everyone's back."""
    found = [source.at(node, f"{ast.unparse(node).splitlines()[0]}: no work at import")
             for node in source.tree.body
             if isinstance(node, WORK) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))]
    found += [source.at(node, "a global statement: what changes is handed over")
              for node in source.nodes if isinstance(node, ast.Global)]
    return found + [source.at(node, f"{name} is mutable and not in UPPER CASE: a global that can change")
                    for node, name in _mutable_globals(source.tree)
                    if name != name.upper() and not name.startswith("__")]


def _mutable_globals(tree: ast.Module) -> Iterator[tuple[ast.stmt, str]]:
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            value, targets = node.value, node.targets if isinstance(node, ast.Assign) else [node.target]
            made = isinstance(value, ast.Call) and _last_name(value.func) in MUTABLE_CALLS
            if made or isinstance(value, MUTABLE):
                yield from ((node, _last_name(target)) for target in targets)


def environment_read_inside(source: Source) -> list[str]:
    """Environment variables read anywhere but at the edges, in the command line and in `connect`."""
    if source.floor in ("cli", "connect"):
        return []
    return [source.at(node, f"reads {ast.unparse(node)}; only the command line and connect do, and hand it over")
            for node in source.nodes
            if isinstance(node, ast.Attribute | ast.Name) and _last_name(node) in {"environ", "getenv"}]


def class_names_used_twice(sources: Iterable[Source]) -> list[str]:
    """Names that two classes of the package have, with their places."""
    places: dict[str, list[str]] = {}
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{source.path}:{node.lineno}")
    return [f"class {name} stands at {' and '.join(found)}" for name, found in places.items() if len(found) > 1]


def places_outside_a_clone(source: Source) -> list[str]:
    """The lines of a text that name a place which only some machine has: a clone works anywhere."""
    return [f"{source.path}:{number}: names {what}: {match.group()}"
            for what, (words, pattern) in NOT_IN_A_CLONE.items() if any(word in source.text for word in words)
            for number, line in enumerate(source.text.splitlines(), 1) if (match := pattern.search(line))]
