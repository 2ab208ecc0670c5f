"""Counts, seconds, bytes and rates as one reads them, four digits and the unit that suits, and as one types them.

A kB, MB, GB, TB is 10^3, 10^6, 10^9, 10^12 bytes, a KiB, MiB, GiB, TiB 2^10, 2^20, 2^30, 2^40; of other counts k, M, B
and T are thousands, millions, billions and trillions.
"""

import re
from collections.abc import Mapping
from decimal import Decimal

SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))
# What may stand behind a number that is typed, in large letters or in small ones.
OF_COUNTS = {"k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
OF_NBYTES = {"B": 1, "bytes": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
             "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
TYPED = re.compile(r"([+-]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:e[+-]?\d+)?)\s*([a-z]*)", re.IGNORECASE)
THOUSANDS = re.compile(r"([+-]?\d{1,3}(?:,\d{3})+)\b")


def counted(count: int, what: str) -> str:
    """``1 rank``, ``2 ranks``, ``3 micro-batches``."""
    return f"{count:,} {what}" + ("" if count == 1 else "es" if what.endswith("ch") else "s")


def seconds_text(seconds: float) -> str:
    """``54.49 ms``.

    >>> seconds_text(0.0544920), seconds_text(3.4e-6), seconds_text(0), seconds_text(75)
    ('54.49 ms', '3.4 µs', '0 s', '75 s')
    """
    return _text(seconds, SECONDS)


def bytes_text(nbytes: float) -> str:
    """``12.24 MB``, or all digits below a thousand.

    >>> bytes_text(12_240_000), bytes_text(14e9), bytes_text(999), bytes_text(0)
    ('12.24 MB', '14 GB', '999 bytes', '0 bytes')
    """
    return _text(nbytes, BYTES)


def gigabytes(nbytes: float) -> str:
    """Bytes in GB, for a column of a table or a sentence beside it.

    >>> gigabytes(107_814_649_856), gigabytes(16_129e9)
    ('107.81', '16,129')
    """
    return f"{nbytes / 1e9:,.2f}" if abs(nbytes) < 1e12 else f"{nbytes / 1e9:,.0f}"  # decimals of so many are noise


def rate_text(bytes_per_second: float) -> str:
    """``450 GB/s``.

    >>> rate_text(450e9), rate_text(1.25e9)
    ('450 GB/s', '1.25 GB/s')
    """
    return bytes_text(bytes_per_second) + "/s"


def _text(value: float, units: tuple[tuple[float, str], ...]) -> str:
    if not value:
        return f"0 {next(name for unit, name in units if unit == 1)}"
    # 999.96 µs is 1 ms with four digits: the unit is chosen for the number as it is written.
    rounded = float(f"{value:.4g}")
    unit, name = next((row for row in units if rounded >= row[0]), units[-1])
    number = rounded / unit
    return f"{number:,.0f} {name}" if number >= 1000 else f"{number:.4g} {name}"


def count_of(text: int | float | str, what: str) -> int:
    """A count as one types it; raises ValueError for what is no whole number from 1 to below 2^62.

    >>> count_of("7B", "parameters"), count_of("7.5e9", "parameters"), count_of("1,024", "ranks")
    (7000000000, 7500000000, 1024)
    """
    return _whole_number(text, what, OF_COUNTS, 1, "7B, 7.5e9 or 7,500,000,000")


def nbytes_of(text: int | float | str, what: str = "nbytes", *, least: int = 0) -> int:
    """A number of bytes as one types it; raises ValueError for what is no whole number from ``least`` to below 2^62.

    >>> nbytes_of("14GB"), nbytes_of("8 MiB"), nbytes_of("14e9"), nbytes_of("0.5kb")
    (14000000000, 8388608, 14000000000, 500)
    """
    return _whole_number(text, what, OF_NBYTES, least, "14GB, 8MiB, 14e9 or 1048576")


def _whole_number(text: int | float | str, what: str, units: Mapping[str, int], least: int, example: str) -> int:
    typed = THOUSANDS.sub(lambda number: number[0].replace(",", ""), str(text).strip())
    found = TYPED.fullmatch(typed)
    by_name = {name.lower(): unit for name, unit in units.items()} | {"": 1}
    if found is None or found[2].lower() not in by_name:
        raise ValueError(f"{what}={text!r} is no number; write it as {example}, with {', '.join(units)} or no unit")
    number = Decimal(found[1].replace("_", "")) * by_name[found[2].lower()]
    if number != number.to_integral_value() or not least <= number < 2**62:
        raise ValueError(f"{what}={text!r} must be a whole number, from {least} to below 2^62")
    return int(number)
