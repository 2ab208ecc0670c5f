"""Files of tensors in the safetensors format: written durably, and read by ranges of elements.

A file is the header's length (8 bytes, little-endian), the header in JSON, and the tensors' bytes, row by row and
little-endian, one tensor after the other and nothing between them. The header names each tensor's type, shape, and
first and last byte; under "__metadata__" it has texts by name. Nothing in a file is ever run.
Source: Hugging Face 2022, "Safetensors", the section on the format in https://github.com/huggingface/safetensors.

Legend: a block is BLOCK_NBYTES of a tensor, the last one maybe less; a checksum is CRC-32 in 8 hex digits.
"""

import json
import math
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from zerosim.numerics.arrays import AnyArray, as_bytes, spans, to_host
from zerosim.numerics.files import json_of, write_durably
from zerosim.numerics.formats import FORMATS

BLOCK_NBYTES = 1 << 18
LARGEST_HEADER_NBYTES = 100_000_000  # of the format's own library too
METADATA = "__metadata__"

# The format's names of types, and NumPy's.
DTYPES = {code: FORMATS[name].dtype for code, name in (
    ("F32", "fp32"), ("F16", "fp16"), ("BF16", "bf16"), ("F8_E4M3", "fp8_e4m3"), ("F8_E5M2", "fp8_e5m2"))} | {
    code: np.dtype(name) for code, name in (
        ("F64", "f8"), ("I64", "i8"), ("I32", "i4"), ("I16", "i2"), ("I8", "i1"), ("U64", "u8"), ("U32", "u4"),
        ("U16", "u2"), ("U8", "u1"), ("BOOL", "?"))}
CODES = {dtype: code for code, dtype in DTYPES.items()}


def tensor_nbytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """The bytes of a tensor."""
    return dtype.itemsize * math.prod(shape)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: its bytes are those from ``start`` on, counted from the file's first."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return tensor_nbytes(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class TensorFile:
    """An open file's header: its tensors and texts by name, and the header's checksum."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    nbytes: int
    header_crc32: str


# -- Writing -----------------------------------------------------------------------------------------------------------


def write_tensors(path: Path, kinds: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]],
                  array_of: Callable[[str], AnyArray], metadata: Mapping[str, str]) -> None:
    """Writes tensors of these types and shapes by name, and texts.

    ``array_of`` gives each one's contiguous array, on the host or a device, when its turn has come; none is copied
    whole. Raises OSError, with the tensor's name, for what cannot be written, and ValueError for a type that the format
    has no name for.
    """
    _require_little_endian()
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in kinds.items():
        if dtype not in CODES:
            raise ValueError(f"{path}: {name} is of type {dtype}, which the safetensors format has not; it has "
                             f"{', '.join(DTYPES)}")
        start, end = end, end + tensor_nbytes(dtype, shape)
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that elements of 8 bytes begin where such elements may
    begun = ["the header"]

    def parts() -> Iterator[Any]:
        yield len(text).to_bytes(8, "little")
        yield text
        for name in kinds:
            begun.append(f"the tensor {name}")
            yield from _blocks(array_of(name))

    try:
        write_durably(path, parts())
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}, in {begun[-1]}", str(path)) from error


def _blocks(array: AnyArray) -> Iterator[Any]:
    flat = array.reshape(-1)
    for here in spans(flat.size, BLOCK_NBYTES // array.dtype.itemsize):
        yield as_bytes(to_host(flat[here])).data


def checksums(array: AnyArray) -> list[str]:
    """The checksum of each of a contiguous array's blocks."""
    return [crc32(block) for block in _blocks(array)]


def crc32(content: Any) -> str:
    """The checksum of bytes."""
    return f"{zlib.crc32(content):08x}"


# -- Reading -----------------------------------------------------------------------------------------------------------


def read_header(path: Path) -> TensorFile:
    """The header of a file, which is checked against the file's length.

    Raises OSError for what cannot be read, and ValueError, with the file's name, and the tensor's where it is one's,
    for what is no file of this format, or not all of it.
    """
    _require_little_endian()
    nbytes = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if nbytes < 8 or not 2 <= length <= min(nbytes - 8, LARGEST_HEADER_NBYTES):
            raise ValueError(f"{path} is no safetensors file, or was cut off: it has {nbytes} bytes, and its header is "
                             f"to have {length}; take another copy of it")
        text = file.read(length)
    try:
        header = json_of(text.decode())
        metadata = header.pop(METADATA, {})
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its metadata hold something else than texts")
        unread = [(name, entry["dtype"]) for name, entry in header.items() if entry["dtype"] not in DTYPES]
        tensors = {} if unread else {name: _stored(name, entry, 8 + length) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} has a header that a safetensors file cannot have ({error}); take another copy of it"
                         ) from None
    for name, code in unread:
        raise ValueError(f"{path}: the tensor {name} is of type {code!r}, which zerosim does not read; it reads "
                         f"{', '.join(DTYPES)}; convert it")
    _check_places(path, tensors, 8 + length, nbytes)
    return TensorFile(path, tensors, metadata, nbytes, crc32(text))


def _stored(name: str, entry: Mapping[str, Any], start: int) -> StoredTensor:
    code, shape, (low, high) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (*shape, low, high)):
        raise ValueError(f"the tensor {name} has a shape or a place that no tensor can have: {shape}, {low} to {high}")
    found = StoredTensor(name, DTYPES[code], tuple(shape), start + low)
    if found.nbytes != high - low:
        raise ValueError(f"the tensor {name} {found.shape} of {code} takes {found.nbytes} bytes, not {high - low}")
    return found


def _check_places(path: Path, tensors: Mapping[str, StoredTensor], start: int, nbytes: int) -> None:
    """Raises ValueError unless the tensors fill the rest of the file, each byte of it once."""
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.nbytes)):
        if tensor.start != start:
            raise ValueError(f"{path}: the tensor {tensor.name} begins at byte {tensor.start}, where {start} is the "
                             "next; take another copy of the file")
        start += tensor.nbytes
        if start > nbytes:
            raise ValueError(f"{path} was cut off at {nbytes} bytes, inside the tensor {tensor.name}, which ends at "
                             f"{start}; take another copy of the file")
    if start != nbytes:
        raise ValueError(f"{path} has {nbytes} bytes, and its tensors end at {start}; take another copy of it")


def read_blocks(file: BinaryIO, path: Path, tensor: StoredTensor, low: int, high: int, buffer: np.ndarray,
                sums: list[str]) -> Iterator[tuple[int, np.ndarray]]:
    """The elements [low, high) of a tensor, block by block: the first one's number, and a view (n,) of ``buffer``.

    ``buffer`` (BLOCK_NBYTES,) uint8 is used for each; of the file nothing is read but blocks in which these elements
    lie, and each is compared with its checksum. Raises ValueError, with the names of file and tensor, where it differs,
    and OSError with them for what cannot be read.
    """
    per_block = BLOCK_NBYTES // tensor.dtype.itemsize
    size = math.prod(tensor.shape)
    for number in range(low // per_block, -(-high // per_block)):
        first, last = number * per_block, min((number + 1) * per_block, size)
        content = buffer[:(last - first) * tensor.dtype.itemsize]
        try:
            file.seek(tensor.start + first * tensor.dtype.itemsize)
            found = file.readinto(content.data)  # type: ignore[attr-defined]
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}, in the tensor {tensor.name}", str(path)) from error
        if found != len(content):
            raise ValueError(f"{path} was cut off inside the tensor {tensor.name}; take another copy of the file")
        if number >= len(sums) or crc32(content.data) != sums[number]:
            raise ValueError(f"{path}: the tensor {tensor.name} is damaged: its elements {first} to {last} have the "
                             f"checksum {crc32(content.data)}, and were written with "
                             f"{sums[number] if number < len(sums) else 'none'}; take another copy of the file")
        elements = content.view(tensor.dtype)
        yield max(low, first), elements[max(low, first) - first:min(high, last) - first]


def _require_little_endian() -> None:
    if sys.byteorder != "little":
        raise ValueError("safetensors files are little-endian, and this machine is not")
