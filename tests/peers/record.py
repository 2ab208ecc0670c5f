"""Runs all cases and writes what they come to: `make peers-table`, into the package's facts and docs/peers.md."""

import json
import re
import tomllib
from collections import Counter
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from tests.peers.cases import CASES, VERDICTS, by_peers, judged

FACTS = Path(str(files("zerosim.course.published").joinpath("peers.toml")))
PAGE = Path(__file__).parent.parent.parent / "docs" / "peers.md"
PEERS = ("torch", "deepspeed", "transformers", "numpy")


def facts() -> str:
    """The file of facts: versions, then a row for each case."""
    lines = ["# Written by `python -m tests.peers.record`; docs/peers.md shows it, and `make peers` holds it.",
             "", "[versions]"]
    lines += [f"{name} = {json.dumps(version(name))}" for name in PEERS]
    there = by_peers()
    for case in CASES:
        verdict, differ, largest = judged(case, there[case.name], case.arguments)
        row = {"name": case.name, "ranks": case.ranks, "verdict": verdict, "differ": differ,
               "of": case.model.parameter_count, "largest": float(f"{largest:.1e}"), "why": case.why}
        if "refused" in there[case.name]:
            row["said"] = there[case.name]["refused"]
        lines += ["", "[[row]]", *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in row.items())]
    return "\n".join(lines) + "\n"


def table(text: str) -> str:
    """The page's table of a file of facts."""
    read = tomllib.loads(text)
    versions = ", ".join(f"{name} {number}" for name, number in read["versions"].items())
    counts = Counter(row["verdict"] for row in read["row"])
    lines = [f"{len(read['row'])} runs, of {versions}: " + "; ".join(
                 f"{counts[key]} *{words}*" for key, words in VERDICTS.items()) + ".", "",
             "| run | ranks | found | weights that differ | by at most | why |",
             "|---|---|---|---|---|---|"]
    for row in read["row"]:
        figures = ("", "") if row["verdict"] == "refused" else (
            f"{row['differ']} of {row['of']:,}", f"{row['largest']:.1e}" if row["differ"] else "0")
        said = f": {row['said']}" if "said" in row else ""
        lines.append(f"| {row['name']} | {row['ranks']} | {VERDICTS[row['verdict']]} | {figures[0]} | {figures[1]} | "
                     f"{row['why']}{said} |")
    return "\n".join(lines)


def page(text: str, facts: str) -> str:
    """The page, with the table of these facts."""
    return re.sub(r"(<!-- table -->\n).*(?=\n<!-- end -->)", lambda found: found[1] + table(facts), text,
                  flags=re.DOTALL)


if __name__ == "__main__":
    FACTS.write_text(found := facts(), encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text("utf-8"), found), encoding="utf-8")
