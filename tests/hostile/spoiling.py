"""One mutator of files: good bytes of JSON, TOML, safetensors or anything, and something bad in their place.

Legend: chance is a random.Random, by whose seed each bad input can be made again.
"""

import json
import os
import pickle
import re
import subprocess
import tomllib
from pathlib import Path

DEEP = 100_000
DEPTHS = (300, 480, 900, 950, 970, 980, 990, DEEP)  # some of which one half of Python's json takes, and not the other
DIGITS = "9" * 5000  # more than Python turns into a number


class Raises:
    """What a file that is unpickled or evaluated would run."""

    def __reduce__(self):
        return subprocess.check_output, (["true"],)


# Each in the place of any value, as it is written in JSON, and in TOML.
LITERALS = {
    "json": ["null", "true", "0", "-1", "1", "2", "1.5", "-0.0", "1e308", "1e999", "NaN", "-Infinity", "9" * 19,
             str(2**63), str(-2**63), str(2**31), "100000000", DIGITS, '""', '"x"', '"9"', '"' + "y" * 5000 + '"',
             '"\\ud800"', '"\\u0000"', '"../../etc/passwd"', '"/dev/null"', '"fp32"', "[]", "{}", "[[]]", "[1]",
             '["a"]', '{"a": 1}', "[null]", "[-1, -1]", "[1, 2, 3, 4, 5]", "[0, 0]",
             *("[" * deep + "]" * deep for deep in DEPTHS),
             *('{"a":' * deep + "1" + "}" * deep for deep in DEPTHS)],
    "toml": ["true", "0", "-1", "1", "1.5", "-0.0", "1e308", "1e999", "nan", "-inf", "9" * 19, str(2**63), DIGITS, '""',
             '"x"', "'9'", '"' + "y" * 5000 + '"', "[]", "{}", "[1]", "{ a = 1 }", "1979-05-27", "07:32:00",
             "1979-05-27T07:32:00Z", "0x7f", "1_000", "null", *("[" * deep + "]" * deep for deep in DEPTHS)]}
MARK = re.compile(r'"@(\d+)@[^"]*"|@again@')
SOUP = [b"", b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"{", b"[]", b"null", b"\n" * 3, b'"', b"'", b"# ", b"=", b",", b"}",
        b"]"]


def spoiled(good: bytes, structure: str, chance) -> bytes:
    """Bad bytes in the place of good ones, whose structure is "json", "toml", "safetensors", or "" for any bytes."""
    if structure == "safetensors" and chance.random() < 0.7:
        length = int.from_bytes(good[:8], "little")
        header = spoiled(good[8:8 + length], "json", chance)
        said = chance.choice([len(header)] * 9 + [0, 2**63, 2**64 - 1, max(0, len(header) - 1)])
        return said.to_bytes(8, "little") + header + good[8 + length:]
    if structure in LITERALS and chance.random() < 0.85:
        return _spoiled_tree(good.decode(), structure, chance).encode()
    return _spoiled_bytes(good, chance)


def _places(tree, found):
    """Each container of a tree of JSON with each of its keys."""
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        found.append((tree, key))
        _places(tree[key], found)
    return found


def _spoiled_tree(text: str, structure: str, chance) -> str:
    """JSON or TOML still, of which values were replaced by any others, left out, said twice, moved or renamed."""
    load, write = {"json": (json.loads, json.dumps), "toml": (tomllib.loads, as_toml)}[structure]
    tree, written = [load(text)], []
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        places = _places(tree, [])
        holder, key = chance.choice(places) if chance.random() < 0.95 else (tree, 0)
        value = holder[key]
        kind = chance.choice(["literal"] * 5 + ["other", "without", "again", "renamed", "near", "near", "wrapped"])
        if kind == "other":
            holder[key] = json.loads(json.dumps((lambda holder, key: holder[key])(*chance.choice(places))))
        elif kind == "without" and holder is not tree:
            del holder[key]
        elif kind == "again":
            holder.insert(key, value) if isinstance(holder, list) else holder.update({f"@again@{key}": value})
        elif kind == "renamed" and isinstance(holder, dict):
            holder[chance.choice(["", "a", "__class__", f"{key}s", key.upper()])] = holder.pop(key)
        elif kind == "near" and type(value) in (int, float):
            holder[key] = chance.choice([value + 1, value - 1, -value, 2 * value, value + 0.5, str(value), [value]])
        elif kind == "wrapped":
            holder[key] = chance.choice([[value], {"a": value}, str(value)])
        else:
            written.append(chance.choice(LITERALS[structure]))
            holder[key] = f"@{len(written) - 1}@"
    return MARK.sub(lambda mark: written[int(mark[1])] if mark[1] else "", write(tree[0]) if tree else "")


def _toml(tree) -> str:
    """A value as TOML has it: tables in a line."""
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(value)}" for key, value in tree.items()) + "}"
    return f"[{', '.join(map(_toml, tree))}]" if isinstance(tree, list) else json.dumps(tree)


def as_toml(tree) -> str:
    """A TOML file of it, which is no table at its top where the tree is not."""
    return "".join(f"{json.dumps(key)} = {_toml(value)}\n" for key, value in tree.items()) if isinstance(
        tree, dict) else _toml(tree)


def _spoiled_bytes(good: bytes, chance) -> bytes:
    at, stop = sorted(chance.randrange(len(good) + 1) for _ in range(2))
    kind = chance.choice(["cut", "flip", "without", "again", "soup", "utf-16", "pickle", "noise", "empty"])
    if kind == "flip" and good:
        place = chance.randrange(len(good))
        return good[:place] + bytes([good[place] ^ 1 << chance.randrange(8)]) + good[place + 1:]
    return {"cut": good[:at], "flip": good, "without": good[:at] + good[stop:], "again": good[:stop] + good[at:],
            "soup": good[:at] + chance.choice(SOUP) + good[at:], "utf-16": good.decode("latin-1").encode("utf-16"),
            "pickle": pickle.dumps(Raises()), "noise": good[:at] + chance.randbytes(40) + good[stop:],
            "empty": b""}[kind]


def put(good: bytes, structure: str, place: Path, chance) -> str:
    """Puts something bad in the place of a file; returns what."""
    kind = chance.choice(["bytes"] * 20 + ["folder", "missing", "nowhere", "circle", "elsewhere"])
    place.unlink()
    if kind == "bytes":
        bad = spoiled(good, structure, chance)
        place.write_bytes(bad)
        return f"{bad[:2000]!r}"
    if kind == "folder":
        place.mkdir()
    elif kind == "nowhere":
        place.symlink_to("nowhere")
    elif kind == "circle":
        place.symlink_to(place.name)
    elif kind == "elsewhere":
        place.symlink_to(os.devnull)
    return kind
