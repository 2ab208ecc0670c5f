"""Blockwise quantization: small integers and a scale for each block of a vector, packed in bytes; ZeRO++'s use of it.

A block's scale is its largest magnitude over the largest integer; an element is the nearest multiple of it. So an error
is at most half a scale, and one large element spoils its own block alone. A block with inf or NaN comes back without a
finite element: an overflow is not hidden.

Legend: n elements, in blocks of b, the last one shorter; L the largest integer, 127 or 7; s a block's scale, fp32.
Sources: Dettmers et al. 2022 (8-bit optimizers by blockwise quantization, arXiv:2110.02861), section 2; Wang et al.
2023 (ZeRO++, arXiv:2306.10209), section 3.1.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from zerosim.numerics.arrays import copy_elements, has_data, on_device, to_host
from zerosim.numerics.checks import FP32, is_count, unknown_name

Array = Any
BITS = {"int8": 8, "int4": 4}
PARTS: Mapping[str, tuple[str, Any]] = {  # by name, the field and its usual value
    "hpz": ("hpz", True), "qwz": ("quantized_weights", "int8"), "qgz": ("quantized_gradients", "int4")}
SPAN = 1 << 16  # elements that are worked on at once, in whole blocks


@dataclass(frozen=True, slots=True)
class Blockwise:
    """The format: "int8" or "int4", and the elements of a block.

    Raises ValueError for another name, and for blocks that are empty or odd.
    """

    name: str
    block: int = 256

    def __post_init__(self) -> None:
        if self.name not in BITS:
            raise unknown_name(f"no quantized format {self.name!r}", self.name, BITS)
        if not is_count(self.block) or self.block < 2 or self.block % 2:
            raise ValueError(f"block={self.block!r} must be an even number of elements, 2 or more, that share a scale")

    @property
    def largest(self) -> int:
        """L: -L to L are used, so that negation changes no magnitude."""
        return (1 << (BITS[self.name] - 1)) - 1

    def nbytes(self, count: int) -> int:
        """Bytes of n elements: a scale for each block, then the integers, filled up to a multiple of 4.

        >>> Blockwise("int8").nbytes(1024), Blockwise("int4").nbytes(1024), Blockwise("int4").nbytes(3)
        (1040, 528, 8)
        """
        return 4 * (-(-count // self.block)) + -(-count * BITS[self.name] // 32) * 4

    def quantize(self, kernels: Any, x: Array, out: Array) -> None:
        """x (n,) of any float format -> out, ``nbytes(n)`` bytes. Of a device's array they are made on the host."""
        if not has_data(x):
            return
        if on_device(x):
            mine, made = to_host(x), np.empty(len(out), np.uint8)
            self.quantize(kernels.serving(mine), mine, made)
            copy_elements(made, out)
            return
        scales, integers = self._parts(out, len(x))
        out[len(out) - 4 * min(1, len(x)):] = 0  # what fills up
        for here, blocks, there in self._spans(len(x)):
            values = self._in_blocks(kernels, here.stop - here.start)
            flat = values.reshape(-1)
            flat[here.stop - here.start:] = 0
            kernels.cast_pack(x[here], flat[:here.stop - here.start])
            with np.errstate(all="ignore"):
                scale = np.abs(values).max(axis=1) / np.float32(self.largest)
                past = np.isfinite(scale) & ~np.isfinite(scale * self.largest)  # rounded up, near fp32's largest number
                scales[blocks] = scale = np.where(past, np.nextafter(scale, np.float32(0)), scale)
                values /= np.where(scale > 0, scale, np.float32(1))[:, None]
            values[...] = np.nan_to_num(np.rint(values), nan=0, posinf=0, neginf=0)
            np.clip(values, -self.largest, self.largest, out=values)
            small = flat[:2 * (-(-(here.stop - here.start) // 2))].astype(np.int8)
            if self.name == "int4":
                small = (small[0::2] & 15) | (small[1::2] << 4)
            integers[there] = small.view(np.uint8)[:there.stop - there.start]

    def dequantize(self, kernels: Any, packed: Array, out: Array, *, add: bool = False) -> None:
        """The bytes of n elements -> out (n,), each rounded once to its format; with ``add`` onto what is there. Of a
        device's arrays they are read on the host."""
        if not has_data(packed):
            return
        if on_device(packed):
            made = to_host(out)
            self.dequantize(kernels.serving(made), to_host(packed), made, add=add)
            copy_elements(made, out)
            return
        scales, integers = self._parts(packed, len(out))
        for here, blocks, there in self._spans(len(out)):
            count = here.stop - here.start
            values = self._in_blocks(kernels, count)
            flat, small = values.reshape(-1), integers[there].view(np.int8)
            if self.name == "int4":
                flat[0:2 * len(small):2], flat[1:2 * len(small):2] = (small << 4) >> 4, small >> 4
            else:
                flat[:count] = small
            flat[count:] = 0
            with np.errstate(all="ignore"):
                values *= scales[blocks][:, None]
            if add:
                kernels.add_rounded(out[here], flat[:count], out[here])
            else:
                kernels.cast_pack(flat[:count], out[here])

    def error_bound(self, x: Array) -> Array:
        """x (n,) -> (n,), float64: the most by which an element differs when it comes back in fp32.

        Half a scale; fp32 rounds the scale, the quotient, up to L, and the product, to 2^-24 each: less than 2^-15 of a
        scale. Below fp32's normal numbers a scale is rounded to 2^-149, and L of them may be missing.
        """
        wide = np.zeros(-(-len(x) // self.block) * self.block)
        wide[:len(x)] = np.abs(x)
        scales = wide.reshape(-1, self.block).max(axis=1) / self.largest
        bound: np.ndarray = np.repeat(scales * (0.5 + 2.0**-15) + self.largest * 2.0**-149, self.block)[:len(x)]
        return bound

    def _parts(self, packed: Array, count: int) -> tuple[Array, Array]:
        """The scales, (blocks,), fp32, and the bytes of integers of what is packed."""
        scales = 4 * (-(-count // self.block))
        return packed[:scales].view(np.float32), packed[scales:]

    def _spans(self, count: int) -> Iterator[tuple[slice, slice, slice]]:
        """Stretches of elements, of their blocks and of their integers' bytes."""
        each = max(1, SPAN // self.block) * self.block
        for low in range(0, count, each):
            high = min(count, low + each)
            yield (slice(low, high), slice(low // self.block, -(-high // self.block)),
                   slice(low * BITS[self.name] // 8, -(-high * BITS[self.name] // 8)))

    def _in_blocks(self, kernels: Any, count: int) -> Array:
        """Scratch of so many elements in whole blocks, (blocks, b), fp32."""
        blocks = -(-count // self.block)
        return kernels.scratch("quantized", blocks * self.block, FP32).reshape(blocks, self.block)


@dataclass(frozen=True, slots=True)
class ZeroPlusPlus:
    """The parts of ZeRO++ that an engine takes: hpZ, and the formats, "int8" or "int4", of qwZ and of qgZ (None: as the
    policy says). ``block`` elements share a scale. With none of them it is ZeRO, whose states know of no nodes.

    Raises ValueError for other formats and blocks.
    """

    hpz: bool = False
    quantized_weights: str | None = None
    quantized_gradients: str | None = None
    block: int = 256

    def __post_init__(self) -> None:
        if not isinstance(self.hpz, bool):
            raise ValueError(f"hpz={self.hpz!r} must be True or False")
        for form in (self.quantized_weights or "int8", self.quantized_gradients or "int8"):
            Blockwise(form, self.block)

    @classmethod
    def parse(cls, text: "str | ZeroPlusPlus | None") -> "ZeroPlusPlus | None":
        """The parts by name, as in "hpz+qwz+qgz" (int8 weights, int4 gradients) or "qgz=int8"; "flat" has none of them,
        "none" is None.

        Raises ValueError for what names no part.
        """
        if text is None or isinstance(text, ZeroPlusPlus) or text == "none":
            return None if isinstance(text, str) else text
        chosen: dict[str, Any] = {}
        for word in str(text).split("+") if text != "flat" else ():
            name, _, form = word.strip().partition("=")
            if name not in PARTS or (form and name == "hpz"):
                raise ValueError(f"zeropp={text!r} names no parts of ZeRO++; write some of hpz, qwz and qgz, as in "
                                 "'hpz+qwz+qgz' or 'qgz=int8', or 'flat' for none of them")
            field, usual = PARTS[name]
            if field in chosen:
                raise ValueError(f"zeropp={text!r} names {name} twice; leave one out")
            chosen[field] = form or usual
        return cls(**chosen)

    @classmethod
    def on_mesh(cls, text: "str | ZeroPlusPlus | None", mesh: object, ranks: int) -> "ZeroPlusPlus | None":
        """The parts, as `parse` finds them, for so many ranks on a mesh. Raises ValueError where there is none."""
        asked = cls.parse(text)
        if asked is not None and mesh is None:
            raise ValueError(f"zeropp={str(text)!r} saves what crosses nodes, and there is no mesh; name one, as "
                             f"{ranks}x1")
        return asked

    def __str__(self) -> str:
        words = ["hpz"] * self.hpz + [f"{name}={form}" for name, form in (
            ("qwz", self.quantized_weights), ("qgz", self.quantized_gradients)) if form]
        return "ZeRO++ (" + ", ".join([*(words or ["flat"]), *[f"block {self.block}"] * (self.block != 256)]) + ")"

    @property
    def weights(self) -> Blockwise | None:
        """The format of weights on the wire."""
        return None if self.quantized_weights is None else Blockwise(self.quantized_weights, self.block)

    @property
    def gradients(self) -> Blockwise | None:
        """The format of gradients on the wire."""
        return None if self.quantized_gradients is None else Blockwise(self.quantized_gradients, self.block)
