"""Vectors that differ from rank to rank: equal data would hide a wrong order, a wrong owner and a missing average."""

import ml_dtypes
import numpy as np

FLOATS = {"fp32": np.dtype(np.float32), "fp64": np.dtype(np.float64), "fp16": np.dtype(np.float16),
          "bf16": np.dtype(ml_dtypes.bfloat16), "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
          "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2)}
NARROW = {name: dtype for name, dtype in FLOATS.items() if dtype.itemsize <= 2}
INTEGERS = {"int32": np.dtype(np.int32), "int64": np.dtype(np.int64), "uint8": np.dtype(np.uint8)}
OTHERS = {"bool": np.dtype(np.bool_), "complex64": np.dtype(np.complex64), "complex128": np.dtype(np.complex128)}


def whole_numbers(ranks: int, length: int, dtype: np.dtype | type = np.int64, seed: int = 0) -> list[np.ndarray]:
    """N vectors (n,) of integers, small enough for sums of 64 of them in any type of 32 bits and more."""
    rng = np.random.default_rng([seed, ranks, length])
    return [rng.integers(0, 1000, length).astype(dtype) + np.dtype(dtype).type(rank) for rank in range(ranks)]


def normals(ranks: int, length: int, dtype: np.dtype | type = np.float32, seed: int = 0) -> list[np.ndarray]:
    """N vectors (n,) of standard normals, rounded to the type, by way of fp32 if it is narrower."""
    rng, first = np.random.default_rng([seed, ranks, length]), np.float64 if dtype == np.float64 else np.float32
    return [rng.standard_normal(length).astype(first).astype(dtype) for _ in range(ranks)]


def any_bits(ranks: int, length: int, dtype: np.dtype | type, seed: int = 0) -> list[np.ndarray]:
    """N vectors (n,) of any bits at all: subnormals, infinities and every NaN among them."""
    dtype, rng = np.dtype(dtype), np.random.default_rng([seed, ranks, length])
    return [np.frombuffer(rng.bytes(length * dtype.itemsize), dtype).copy() for _ in range(ranks)]


def anything(ranks: int, length: int, dtype: np.dtype, seed: int = 0) -> list[np.ndarray]:
    """N vectors (n,) of any type, to be moved about but not added."""
    if dtype == np.bool_:
        return [vector % 2 == 1 for vector in whole_numbers(ranks, length, seed=seed)]
    if dtype.kind == "c":
        return [(a + 1j * b).astype(dtype) for a, b in zip(normals(ranks, length, seed=seed),
                                                         normals(ranks, length, seed=seed + 1), strict=True)]
    return any_bits(ranks, length, dtype, seed)
