"""Random numbers that are a function of a key and an index, and of nothing else.

Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") turns a counter into random words, so a
range can be begun anywhere: however it is cut among ranks and blocks, element i gets the same words.
"""

from __future__ import annotations

from hashlib import blake2b
from operator import index

import numpy as np
import numpy.typing as npt

from zerosim.numerics.arrays import spans

# (seed, purpose, step, tensor): (0, "init", 0, "layer0.weight")
Key = tuple[int, str, int, str | int]

_WORDS_PER_COUNT = 8  # one count of Philox4x64 gives four words of 64 bits


def bits(key: Key, start: int, count: int) -> npt.NDArray[np.uint32]:
    """Words start ... start + count - 1 of the key's stream (count,).

    >>> key = (0, "example", 0, "w")
    >>> bool((bits(key, 0, 10)[3:] == bits(key, 3, 7)).all())
    True
    """
    _check_range(start, count)
    counter, skip = divmod(start, _WORDS_PER_COUNT)
    stream = np.random.Philox(key=_philox_key(key), counter=counter)
    raw = stream.random_raw((skip + count + 1) // 2)
    # Little endian on every machine: the lower half of a word comes first.
    return np.asarray(raw, "<u8").view("<u4").astype(np.uint32, copy=False)[skip : skip + count]


def uniform(key: Key, start: int, count: int) -> npt.NDArray[np.float32]:
    """Numbers k/2^24 in [0, 1), k the upper 24 bits of word i (count,)."""
    return (bits(key, start, count) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


@np.errstate(all="ignore")  # no warning of a number that is too small for float32
def normal(key: Key, start: int, count: int) -> npt.NDArray[np.float32]:
    """Standard normal numbers (count,): the cosine half of Box and Muller's transform (1958), element i from words
    2i and 2i + 1, computed in float64 and rounded once."""
    _check_range(start, count)
    out = np.empty(count, np.float32)
    for span in spans(count):
        words = bits(key, 2 * (start + span.start), 2 * (span.stop - span.start))
        u = (words + 0.5) * 2.0**-32  # never 0, so the logarithm is finite
        out[span] = np.sqrt(-2.0 * np.log(u[0::2])) * np.cos(2.0 * np.pi * u[1::2])
    return out


def _philox_key(key: Key) -> int:
    seed, purpose, step, tensor = key
    tensor = tensor if isinstance(tensor, str) else index(tensor)
    # repr tells 1 from "1" and quotes whatever a name may contain, so that no two keys are spelled the same.
    spelled = repr((index(seed), str(purpose), index(step), tensor))
    return int.from_bytes(blake2b(spelled.encode(), digest_size=16).digest(), "little")


def _check_range(start: int, count: int) -> None:
    if start < 0 or count < 0:
        raise ValueError(f"random words need start >= 0 and count >= 0, got start {start}, count {count}")
