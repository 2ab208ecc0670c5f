"""Weights in safetensors files under the names that others give them, read range by range.

Either one file, ``model.safetensors``, or several, with an index ``model.safetensors.index.json``. Matrices of linear
layers that a file keeps as (outputs, inputs) are transposed; several that lie side by side here (queries, keys and
values) are joined.

Source of the index: the page "Serialization" of `huggingface_hub`
(https://github.com/huggingface/huggingface_hub, docs/source/en/package_reference), as of 2026.
Legend: a matrix (I, O), inputs by outputs, as a linear layer has it here.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from zerosim.numerics.arrays import Array, spans
from zerosim.numerics.checks import is_floating
from zerosim.numerics.files import ANY, json_of, misfit
from zerosim.numerics.safetensors import BLOCK_NBYTES, StoredTensor, read_header

ONE_FILE, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
PREFIXES = ("", "transformer.", "model.")  # that files have before the same names, or have not
# What files have that is no weight: masks, and the rotary angles' frequencies.
NO_WEIGHTS = re.compile(r"(.*\.)?(attn\.(masked_)?bias|rotary_emb\.inv_freq)")


@dataclass(frozen=True, slots=True)
class StoredNames:
    """The names of one weight in files: of one tensor, or of those that are joined along the last axis."""

    names: tuple[str, ...]
    transposed: bool = False


@dataclass(frozen=True)  # no slots: a file is mapped once
class StoredWeight:
    """One weight of this shape in files: its tensors, each with its file, and whether they are transposed."""

    shape: tuple[int, ...]
    parts: tuple[tuple[Path, StoredTensor], ...]
    transposed: bool

    def blocks(self, start: int, count: int) -> Iterator[tuple[int, Array]]:
        """``count`` elements from ``start`` on, in blocks of whole rows: each block's place among them, and fp32
        (n,). Raises ValueError for what is no number of fp32."""
        if not count:
            return
        per_row = math.prod(self.shape[1:])
        rows_at_once = max(1, BLOCK_NBYTES // (4 * per_row))
        first, last = start // per_row, -(-(start + count) // per_row)
        arrays = self._arrays
        if len(self.shape) < 2:  # a vector's elements are its rows: parts of it lie one after the other
            arrays = [np.concatenate(arrays)]
        for row in range(first, last, rows_at_once):
            stop = min(row + rows_at_once, last)
            with np.errstate(over="ignore"):
                flat = np.concatenate([array[row:stop] for array in arrays], axis=-1).reshape(-1).astype(np.float32)
            if spoiled := int((~np.isfinite(flat)).sum()):
                files, names = zip(*((str(path), tensor.name) for path, tensor in self.parts), strict=True)
                raise ValueError(f"{', '.join(dict.fromkeys(files))}: {', '.join(names)} has NaN, inf or numbers "
                                 f"beyond fp32 in {spoiled} of {flat.size} values; look at where they come from, or "
                                 "take another copy")
            low, high = max(start, row * per_row), min(start + count, stop * per_row)
            yield low - start, flat[low - row * per_row:high - row * per_row]

    @cached_property
    def _arrays(self) -> list[Array]:
        """The parts as they lie in the files, each (I, O_p); nothing is read before it is looked at."""
        found = [np.memmap(path, np.uint8, "r", tensor.start, tensor.nbytes).view(tensor.dtype).reshape(
            tensor.shape or (1,)) for path, tensor in self.parts]
        return [array.T if self.transposed else array for array in found]

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredWeight, (self.shape, self.parts, self.transposed)  # files, not what is in them


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The weights of a model in files, by their names here: an initializer, which reads what is asked for."""

    by_name: Mapping[str, StoredWeight]

    def __call__(self, name: str, start: int, count: int) -> Array:
        """Elements start to start + count of a weight, fp32 (count,)."""
        found = np.empty(count, np.float32)
        for place, values in self.by_name[name].blocks(start, count):
            found[place:place + len(values)] = values
        return found


def has_weights(folder: Path) -> bool:
    """True for a folder with a safetensors file or an index under their usual names, or a link that leads nowhere."""
    return any(os.path.lexists(folder / name) for name in (ONE_FILE, WEIGHTS_INDEX))


def find_weights(path: Path, names: Mapping[str, StoredNames], shapes: Mapping[str, tuple[int, ...]]) -> StoredWeights:
    """The weights of these shapes in a file, or in a folder with one or an index.

    Raises ValueError or OSError where one is not there in its shape, and for one that is of no weight of the model.
    """
    tensors = _tensors(path)
    weights = {}
    for name, there in names.items():
        parts = tuple(_part(path, tensors, name, part) for part in there.names)
        odd = next((tensor for _, tensor in parts if not is_floating(tensor.dtype)), None)
        if odd is not None:
            raise ValueError(f"{path}: {odd.name} is of type {odd.dtype}, and {name} is to be of floating point")
        stored = [tuple(reversed(tensor.shape)) if there.transposed else tensor.shape for _, tensor in parts]
        joined = (*stored[0][:-1], sum(shape[-1] for shape in stored)) if stored[0] else ()
        if joined != shapes[name] or any(shape[:-1] != joined[:-1] for shape in stored):
            said = ", ".join(f"{tensor.name} {tensor.shape}" for _, tensor in parts)
            raise ValueError(f"{path}: {name} is of shape {shapes[name]}, and there is {said}; build the model that "
                             "the file is of")
        weights[name] = StoredWeight(shapes[name], parts, there.transposed)
    _require_all_read(path, tensors, weights)
    return StoredWeights(weights)


def _require_all_read(path: Path, tensors: Mapping[str, tuple[Path, StoredTensor]],
                      weights: Mapping[str, StoredWeight]) -> None:
    """Raises ValueError for a weight in the files that the model has not: without it, it is another model."""
    read = {tensor.name for weight in weights.values() for _, tensor in weight.parts}
    for name in (name for name in tensors if name not in read):
        is_tied_head = name == "lm_head.weight" and "wte" in weights
        if not NO_WEIGHTS.fullmatch(name) and not (is_tied_head and _same(tensors[name], *weights["wte"].parts)):
            but = ", and is another than the embedding, to which the head is tied here" if is_tied_head else ""
            raise ValueError(f"{path}: the tensor {name} is of no weight of this model{but}; build the model that the "
                             "file is of")


def _same(one: tuple[Path, StoredTensor], other: tuple[Path, StoredTensor]) -> bool:
    """True for tensors of the same type, shape and bits, which are compared block by block."""
    if (one[1].dtype, one[1].shape) != (other[1].dtype, other[1].shape):
        return False
    a, b = (np.memmap(path, np.uint8, "r", tensor.start, tensor.nbytes) for path, tensor in (one, other))
    return all(np.array_equal(a[here], b[here]) for here in spans(len(a), BLOCK_NBYTES))


def _tensors(path: Path) -> dict[str, tuple[Path, StoredTensor]]:
    """All tensors by name, of a file or of a folder's files."""
    if path.is_dir():
        index = path / WEIGHTS_INDEX
        if not has_weights(path):
            raise ValueError(f"weights were asked for of the folder {path}, which has neither {ONE_FILE} nor "
                             f"{WEIGHTS_INDEX}; name the folder or the file that has them")
        if os.path.lexists(path / ONE_FILE) or not index.exists():  # as `transformers`, of both
            path /= ONE_FILE
        else:
            try:
                found = json_of(index.read_text(encoding="utf-8"))
                if wrong := misfit(found, {"weight_map": {ANY: str}, ANY: object}, "it"):
                    raise ValueError(wrong)
                files = sorted(set(found["weight_map"].values()))
                if any(Path(file).name != file for file in files):
                    raise ValueError("it names files of other folders")
            except ValueError as error:
                raise ValueError(f"{index} is no index of safetensors files ({error}); take another copy of it"
                                 ) from None
            if missing := [file for file in files if not (path / file).is_file()]:
                raise ValueError(f"{index} names {missing[0]!r}, and there is no such file beside it; take the whole "
                                 "folder")
            return {name: (path / file, tensor) for file in files
                    for name, tensor in read_header(path / file).tensors.items()}
    return {name: (path, tensor) for name, tensor in read_header(path).tensors.items()}


def _part(path: Path, tensors: Mapping[str, tuple[Path, StoredTensor]], name: str,
          there: str) -> tuple[Path, StoredTensor]:
    """The tensor of this name, or of the same with another prefix."""
    bare = there
    for prefix in PREFIXES:
        bare = bare.removeprefix(prefix)
    for candidate in (there, *(prefix + bare for prefix in PREFIXES)):
        if candidate in tensors:
            return tensors[candidate]
    raise ValueError(f"{path}: there is no tensor {there}, which is {name} here; build the model that the file is of")
