"""Weights in Hugging Face's files, under its names: exported from a checkpoint, and loaded into an engine.

Either one file, ``model.safetensors``, or several, ``model-00001-of-00003.safetensors``, with an index
``model.safetensors.index.json``. GPT-2's and Llama's weights have the names there that `transformers` gives them; of
other models they keep their own. Where that library keeps the matrices of linear layers as (outputs, inputs), as
Llama's, they are transposed; where it keeps several that lie side by side here (queries, keys and values), they are
joined. Optimizer state is not among them.

Sources: of the names modeling_gpt2.py, modeling_llama.py and, for norms of heads, modeling_qwen3.py of `transformers`
(https://github.com/huggingface/transformers, src/transformers/models); of the index the page "Serialization" of
`huggingface_hub` (https://github.com/huggingface/huggingface_hub, docs/source/en/package_reference); as of 2026.
Legend: a matrix (I, O), inputs by outputs, as a linear layer has it here.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from zerosim.numerics.arrays import spans
from zerosim.numerics.checks import is_floating, require_count
from zerosim.numerics.files import write_durably
from zerosim.numerics.rounding import round_to
from zerosim.numerics.safetensors import BLOCK_NBYTES, DTYPES, StoredTensor, read_header, tensor_nbytes, write_tensors
from zerosim.zero.checkpoint import (
    MASTER,
    PARAMETER,
    Checkpoint,
    TrainingState,
    open_checkpoint,
    path_of,
    read_sources,
    resting_of,
    together,
)

ONE_FILE, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
SUFFIX = ".safetensors"
PREFIXES = ("", "transformer.", "model.")  # that files have before the same names, or have not
# What files have that is no weight: masks, and the rotary angles' frequencies.
NO_WEIGHTS = re.compile(r"(.*\.)?(attn\.(masked_)?bias|rotary_emb\.inv_freq)")
FILES = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")


@dataclass(frozen=True, slots=True)
class StoredNames:
    """The names of one weight there: of one tensor, or of those that are joined along the last axis."""

    names: tuple[str, ...]
    transposed: bool = False


Names = tuple[tuple[str, tuple[str, ...], bool], ...]  # a pattern here, the names there, and whether transposed there
GPT2: Names = (
    (r"(wte|wpe)", (r"transformer.\1.weight",), False),
    (r"block(\d+)\.(ln_[12]\.\w+)", (r"transformer.h.\1.\2",), False),
    (r"block(\d+)\.attention\.qkv\.(\w+)", (r"transformer.h.\1.attn.c_attn.\2",), False),
    (r"block(\d+)\.attention\.projection\.(\w+)", (r"transformer.h.\1.attn.c_proj.\2",), False),
    (r"block(\d+)\.ffn\.up\.(\w+)", (r"transformer.h.\1.mlp.c_fc.\2",), False),
    (r"block(\d+)\.ffn\.down\.(\w+)", (r"transformer.h.\1.mlp.c_proj.\2",), False),
    (r"(ln_f\.\w+)", (r"transformer.\1",), False),
    (r"(lm_head\.weight)", (r"\1",), True))
LLAMA: Names = (
    (r"wte", ("model.embed_tokens.weight",), False),
    (r"block(\d+)\.attention_norm\.weight", (r"model.layers.\1.input_layernorm.weight",), False),
    (r"block(\d+)\.attention\.qkv\.(\w+)", tuple(rf"model.layers.\1.self_attn.{x}_proj.\2" for x in "qkv"), True),
    (r"block(\d+)\.attention\.projection\.(\w+)", (r"model.layers.\1.self_attn.o_proj.\2",), True),
    (r"block(\d+)\.attention\.query_norm\.weight", (r"model.layers.\1.self_attn.q_norm.weight",), False),
    (r"block(\d+)\.attention\.key_norm\.weight", (r"model.layers.\1.self_attn.k_norm.weight",), False),
    (r"block(\d+)\.ffn_norm\.weight", (r"model.layers.\1.post_attention_layernorm.weight",), False),
    (r"block(\d+)\.ffn\.gate_up\.(\w+)", tuple(rf"model.layers.\1.mlp.{x}_proj.\2" for x in ("gate", "up")), True),
    (r"block(\d+)\.ffn\.down\.(\w+)", (r"model.layers.\1.mlp.down_proj.\2",), True),
    (r"norm\.weight", ("model.norm.weight",), False),
    (r"(lm_head\.weight)", (r"\1",), True))


def stored_names(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StoredNames]:
    """The names there of a model's parameters, by their names here: those of the table that has all of them, or their
    own."""
    for table in (GPT2, LLAMA):
        found = {name: one for name in shapes if (one := _named(name, shapes[name], table)) is not None}
        if found.keys() == shapes.keys():
            return found
    return {name: StoredNames((name,)) for name in shapes}


def _named(name: str, shape: tuple[int, ...], table: Names) -> StoredNames | None:
    for pattern, names, transposed in table:
        match = re.fullmatch(pattern, name)
        if match:
            return StoredNames(tuple(match.expand(there) for there in names), transposed and len(shape) == 2)
    return None


# -- Exporting ---------------------------------------------------------------------------------------------------------


def export_weights(checkpoint: str | Path, out: str | Path, *, shard_nbytes: int | None = None,
                   kind: str = MASTER) -> list[Path]:
    """Writes a checkpoint's weights into the folder ``out``, or the file, FILE.safetensors; returns the files, the
    index last.

    One file, or, where ``shard_nbytes`` is given, files of at most so many bytes of weights, or of one larger tensor,
    and an index. ``kind`` is "master", or "parameter" for the copies in the compute format, where there are any. Needs
    the memory of one tensor. Raises ValueError for what is no whole checkpoint, and for a folder that has weights which
    would lie beside the new ones, or between them after a failure; OSError for what cannot be written.
    """
    require_count("shard_nbytes", shard_nbytes, 1, "a number of bytes", none="for one file")
    source, place = open_checkpoint(path_of(checkpoint)), path_of(out)
    is_file = place.suffix == SUFFIX and not place.is_dir()
    if is_file and shard_nbytes is not None:
        raise ValueError(f"shard_nbytes={shard_nbytes} asks for several files, and {str(out)!r} is one; name a folder, "
                         "or leave shard_nbytes out")
    folder = place.parent if is_file else place
    tensors = source.content["tensors"]
    shapes = {name: tuple(one["shape"]) for name, one in source.content["parameters"].items()}
    missing = next((name for name in shapes if math.prod(shapes[name]) and f"{kind}/{name}" not in tensors), None)
    if missing is not None:
        raise ValueError(f"{checkpoint} has no {kind} of {missing}; export kind={MASTER!r}, which every checkpoint has")
    kinds: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
    arrays: dict[str, Callable[[], np.ndarray]] = {}
    for name, there in stored_names(shapes).items():
        shape, start = shapes[name], 0
        dtype = DTYPES[tensors.get(f"{kind}/{name}", {"dtype": "F32"})["dtype"]]  # without elements it is in no file
        for part, width in zip(there.names, _widths(name, there, shapes), strict=True):
            columns = slice(start, start + width)
            lies = (*shape[:-1], width) if shape else ()
            kinds[part] = dtype, tuple(reversed(lies)) if there.transposed else lies
            arrays[part] = partial(_whole, source, f"{kind}/{name}", shape, dtype, columns, transposed=there.transposed)
            start += width
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shards(kinds, shard_nbytes)
    names = [place.name] if is_file else [ONE_FILE] if len(shards) == 1 else [
        f"model-{number:05}-of-{len(shards):05}{SUFFIX}" for number in range(1, len(shards) + 1)]
    others = sorted(file.name for file in folder.iterdir() if FILES.fullmatch(file.name))
    if FILES.fullmatch(names[0]) and others and not others == names == [ONE_FILE]:  # which is replaced at once
        raise ValueError(f"weights were to be exported into {str(out)!r}, where there are others: "
                         f"{', '.join(others[:3])}; name another folder, or remove them first")
    for file, shard in zip(names, shards, strict=True):
        write_tensors(folder / file, {part: kinds[part] for part in shard}, lambda part: arrays[part](),
                      {"format": "pt"})  # which `transformers` asks for
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(tensor_nbytes(*kind) for kind in kinds.values())},
                 "weight_map": {part: file for file, shard in zip(names, shards, strict=True) for part in shard}}
        write_durably(folder / WEIGHTS_INDEX, [json.dumps(index, indent=2).encode()])
        names.append(WEIGHTS_INDEX)
    return [folder / name for name in names]


def _widths(name: str, there: StoredNames, shapes: Mapping[str, tuple[int, ...]]) -> list[int]:
    """The columns of each joined matrix: equally many, but for queries, which are as many as the projection has
    inputs."""
    whole, count = (*shapes[name][-1:], 1)[0], len(there.names)
    if count != 3:
        return [whole // count] * count
    projection = name.replace(".qkv.", ".projection.").removesuffix("bias").removesuffix("weight") + "weight"
    queries = shapes[projection][0]
    return [queries, (whole - queries) // 2, (whole - queries) // 2]


def _whole(source: Checkpoint, key: str, shape: tuple[int, ...], dtype: np.dtype[Any], columns: slice, *,
           transposed: bool) -> np.ndarray:
    """The columns of a tensor, put together from its pieces in all files."""
    found = np.empty(math.prod(shape), dtype)
    buffer = np.empty(BLOCK_NBYTES, np.uint8)
    for block, target in read_sources(source.sources(key, shape, 0, found), buffer):
        target[...] = block
    if not shape:
        return found.reshape(())
    part = found.reshape(shape)[..., columns]
    return np.ascontiguousarray(part.T if transposed else part)


def _shards(kinds: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]], most: int | None) -> list[list[str]]:
    """The tensors of each file, in order: a file is full when the next one does not fit."""
    shards: list[list[str]] = [[]]
    room = math.inf if most is None else most
    left = room
    for name, kind in kinds.items():
        if shards[-1] and tensor_nbytes(*kind) > left:
            shards.append([])
            left = room
        shards[-1].append(name)
        left -= tensor_nbytes(*kind)
    return shards


# -- Loading -----------------------------------------------------------------------------------------------------------


def load_weights(path: str | Path, training: TrainingState, abandon: Callable[[], object]) -> None:
    """Fills this rank's weights, in every copy, from files; it reads what it needs of each tensor.

    ``path`` is a safetensors file, or a folder with one or with an index. Optimizer state stays as it is; ``abandon``
    drops a step under way, once all weights have been found. There are no checksums in these files. Raises
    CheckpointError on every rank where one does not find all weights in the right shapes: then nothing was changed.
    """
    folder = path_of(path)
    training.update.refuse_if_broken_off()  # which left optimizer state that is in no file of weights
    rank = training.rank.agreeing(f"load of weights from {str(path)!r}")
    shapes = {entry.name: entry.shape for group in training.param_groups for entry in group.layout.entries}
    found = together(rank, partial(_found, folder, shapes))
    abandon()
    with training.update.changing_state(f"load of weights from {str(path)!r}"):
        together(rank, partial(_fill, found, training))
    if training.update.on_host:
        training.update.on_host.delayed = {}  # of the weights of before


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One weight in files: its tensors, each with its file, and whether they are transposed."""

    parts: tuple[tuple[Path, StoredTensor], ...]
    transposed: bool

    def arrays(self) -> list[np.ndarray]:
        """The parts as they lie in the files, each (I, O_p); nothing is read before it is looked at."""
        found = [np.memmap(path, np.uint8, "r", tensor.start, tensor.nbytes).view(tensor.dtype).reshape(
            tensor.shape or (1,)) for path, tensor in self.parts]
        return [array.T if self.transposed else array for array in found]


def _found(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StoredWeight]:
    """The places of all weights. Raises ValueError or OSError where one is not there in its shape."""
    tensors = _tensors(path)
    weights = {}
    for name, there in stored_names(shapes).items():
        parts = tuple(_part(path, tensors, name, part) for part in there.names)
        odd = next((tensor for _, tensor in parts if not is_floating(tensor.dtype)), None)
        if odd is not None:
            raise ValueError(f"{path}: {odd.name} is of type {odd.dtype}, and {name} is to be of floating point")
        lies = [tuple(reversed(tensor.shape)) if there.transposed else tensor.shape for _, tensor in parts]
        joined = (*lies[0][:-1], sum(shape[-1] for shape in lies)) if lies[0] else ()
        if joined != shapes[name] or any(shape[:-1] != joined[:-1] for shape in lies):
            said = ", ".join(f"{tensor.name} {tensor.shape}" for _, tensor in parts)
            raise ValueError(f"{path}: {name} is of shape {shapes[name]}, and there is {said}; build the model that "
                             "the file is of")
        weights[name] = StoredWeight(parts, there.transposed)
    _require_all_read(path, tensors, weights)
    return weights


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
        if not index.exists():
            path /= ONE_FILE
        else:
            try:
                files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
                if any(Path(file).name != file for file in files):
                    raise ValueError("it names files of other folders")
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise ValueError(f"{index} is no index of safetensors files ({type(error).__name__}: {error}); take "
                                 "another copy of it") from None
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


def _fill(weights: Mapping[str, StoredWeight], training: TrainingState) -> None:
    kernels = training.rank.kernels
    for group in training.param_groups:
        for one in resting_of(group, owned=False):
            kind, _, name = one.key.partition("/")
            if kind in (MASTER, PARAMETER):
                for start, values in _elements(weights[name], one.shape, one.start, one.array.size):
                    training.rank.memory.hold(values, "workspace", name)
                    # As first values are: rounded to the master's format, and from there to the copy's.
                    rounded = values if group.frozen else round_to(values, group.policy.master)
                    with group.transfers.writing(one.array[start:start + len(values)]) as target:
                        kernels.cast_pack(rounded, target)


def _elements(weight: StoredWeight, shape: tuple[int, ...], start: int, count: int) -> Iterator[tuple[int, np.ndarray]]:
    """``count`` elements from ``start`` on, in blocks of whole rows: each block's place among them, and fp32 (n,)."""
    per_row = math.prod(shape[1:])
    rows_at_once = max(1, BLOCK_NBYTES // (4 * per_row))
    first, last = start // per_row, -(-(start + count) // per_row)
    arrays = weight.arrays()
    if len(shape) < 2:  # a vector's elements are its rows: parts of it lie one after the other
        arrays = [np.concatenate(arrays)]
    for row in range(first, last, rows_at_once):
        stop = min(row + rows_at_once, last)
        flat = np.concatenate([array[row:stop] for array in arrays], axis=-1).reshape(-1).astype(np.float32)
        low, high = max(start, row * per_row), min(start + count, stop * per_row)
        yield low - start, flat[low - row * per_row:high - row * per_row]
