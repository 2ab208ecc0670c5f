"""Counts, seconds, bytes and rates as one reads them: four digits and the unit that suits, 10^9 bytes to a GB."""

SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))


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
