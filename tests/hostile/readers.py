"""Every reader of files, each with good files, and what reads them: in Python, and by a command."""

import hashlib
import json
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import zerosim as zs
from tests.hostile.spoiling import as_toml
from tests.zero.training import bits, flat_state
from zerosim.frameworks import from_deepspeed
from zerosim.models import MLP, from_hugging_face, text
from zerosim.planning import hardware, model_shape, recording
from zerosim.zero import CheckpointError, export_weights


def as_json(thing: Any) -> bytes:
    """A JSON file of it, as programs write them."""
    return json.dumps(thing, indent=1).encode()


CONFIG = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
          "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 256, "max_position_embeddings": 16,
          "rms_norm_eps": 1e-5, "rope_theta": 100.0, "tie_word_embeddings": True, "hidden_act": "silu",
          "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                           "original_max_position_embeddings": 8}}
GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 256,
        "layer_norm_epsilon": 1e-5, "n_inner": 12}
DEEPSPEED = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
             "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8}},
             "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 1e-3}},
             "fp16": {"enabled": True, "initial_scale_power": 12}, "gradient_clipping": 1.0,
             "zero_optimization": {"stage": 3, "reduce_bucket_size": 1000, "overlap_comm": True,
                                   "offload_optimizer": {"device": "cpu"}}}
MEASURED = {"source": "measured", "date": "2025-06-01"}
HARDWARE = {"device": {"mine": {"flops_per_second": {"fp32": 1e12, "bf16": 4e12}, "capacity_nbytes": 80 * 10**9,
                                "reported_nbytes": 80 * 10**9, "memory_bytes_per_second": 2e12, "link": "wire",
                                "host_link": "pcie4", **MEASURED}},
            "link": {"wire": {"bytes_per_second": 4e11, "latency_seconds": 2.1e-6, **MEASURED}}}
ANSWER = b"def mean(rank, x):\n    return rank.all_reduce(x) / rank.size\n"
MODEL = MLP([3, 5, 2])


@dataclass(frozen=True)
class Reader:
    """Good files by name, of which one is spoiled: of which structure; what reads them, and the command that does."""

    name: str
    files: Callable[[], dict[str, bytes]]
    spoiled: str
    structure: str
    read: Callable[[Path], Any]
    command: Callable[[Path], list[str]]
    seconds: bool = False  # its command takes
    mend: Callable[[Path], Any] = id  # makes checksums right, as who spoils a file on purpose does
    codes: tuple[int, ...] = (2,)  # by which the command may end, beside 0


def engine(rank, model=MODEL, stage=1):
    return zs.Engine(rank, model, zs.optim.Adam(lr=0.1), stage=stage, policy="bf16")


def one_step(rank):
    found = engine(rank)
    x = np.ones((2, 3), np.float32) * (1 + rank.index)
    found.step(x, x[:, :2])
    return found


def run_of(folder: Path) -> None:
    cluster = zs.Cluster(2)
    cluster.run(one_step)
    cluster.save(folder / "run.json")


def checkpoint_of(folder: Path) -> None:
    zs.Cluster(2).run(lambda rank: one_step(rank).save(folder, progress={"epoch": 1}))


def weights_of(folder: Path) -> None:
    model = from_hugging_face(GPT2)
    with TemporaryDirectory() as saved:
        zs.Cluster(1).run(lambda rank: engine(rank, model).save(saved))
        export_weights(saved, folder, config=GPT2, shard_nbytes=6000)


def made(by: Callable[[Path], None]) -> Callable[[], dict[str, bytes]]:
    """The files that a function writes into a folder, written once."""
    @cache
    def files() -> dict[str, bytes]:
        with TemporaryDirectory() as name:
            by(Path(name))
            return {file.name: file.read_bytes() for file in Path(name).iterdir()}
    return files


def edited(place: tuple[Any, ...], value: Any) -> Callable[[bytes], bytes]:
    """An index of a checkpoint in which one value, by its keys, is another."""
    def edit(good: bytes) -> bytes:
        whole = holder = json.loads(good)
        for key in ("checkpoint", *place[:-1]):
            holder = holder[key]
        holder[place[-1]] = value
        return as_json(whole)
    return edit


def mend_index(folder: Path) -> None:
    """Makes the checksum of a checkpoint's index right, and those of the headers in it."""
    with suppress(ValueError, TypeError, KeyError, OSError, RecursionError, AttributeError):
        content = json.loads((folder / "index.json").read_text())["checkpoint"]
        for entry in content["files"]:
            shard = (folder / entry["name"]).read_bytes()
            length = int.from_bytes(shard[:8], "little")
            entry |= {"nbytes": len(shard), "header_crc32": f"{zlib.crc32(shard[8:8 + length]):08x}"}
        checksum = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        (folder / "index.json").write_text(json.dumps({"sha256": checksum, "checkpoint": content}))


def read_recording(folder: Path) -> Any:
    return recording.load(folder / "run.json")


def load_checkpoint(folder: Path) -> Any:
    """A load that is refused changes nothing."""
    def program(rank):
        found = engine(rank, stage=3)
        before = {name: bits(array) for name, array in flat_state(found).items()}
        try:
            found.load(folder)
        except CheckpointError:
            assert before == {name: bits(array) for name, array in flat_state(found).items()}
            raise
    return zs.Cluster(1).run(program)


def load_weights(folder: Path) -> Any:
    return zs.Cluster(1).run(lambda rank: engine(rank, from_hugging_face(folder)))


def configs(folder: Path) -> Any:
    with suppress(ValueError):
        model_shape(folder / "config.json")
    return from_hugging_face(folder / "config.json")


SHARD, WEIGHTS = "shard-000001-rank-00000-of-00002.safetensors", "model-00001-of-00002.safetensors"
PLAN = ["plan", "--ranks", "4", "--batch", "1"]
TRAIN = ["train", "--ranks", "1", "--steps", "1", "--model"]
READERS = {reader.name: reader for reader in [
    Reader("recording", made(run_of), "run.json", "json", read_recording,
           lambda folder: ["report", f"{folder / 'run.json'}", "--out", f"{folder.parent / 'page.html'}"]),
    Reader("configuration of a Llama", lambda: {"config.json": as_json(CONFIG)}, "config.json", "json", configs,
           lambda folder: [*PLAN, "--model", f"{folder / 'config.json'}"]),
    Reader("configuration of a GPT-2", lambda: {"config.json": as_json(GPT2)}, "config.json", "json", configs,
           lambda folder: [*PLAN, "--model", f"{folder}"]),
    Reader("configuration of DeepSpeed", lambda: {"ds_config.json": as_json(DEEPSPEED)}, "ds_config.json", "json",
           lambda folder: from_deepspeed(folder / "ds_config.json", ranks=4),
           lambda folder: ["plan", "--model", "gpt2", "--ranks", "4", "--ds-config", f"{folder / 'ds_config.json'}"]),
    Reader("devices and links", lambda: {"mine.toml": as_toml(HARDWARE).encode()}, "mine.toml", "toml",
           lambda folder: hardware.read(folder / "mine.toml"),
           lambda folder: [*PLAN, "--model", "gpt2", "--hardware", f"{folder / 'mine.toml'}", "--device", "mine"]),
    Reader("text", lambda: {"book.txt": ("Naïve cafés. " * 90).encode()}, "book.txt", "",
           lambda folder: text.read(folder / "book.txt"),
           lambda folder: [*TRAIN, "gpt-nano", "--text", f"{folder / 'book.txt'}"], seconds=True),
    *(Reader(f"{name} of a checkpoint", made(checkpoint_of), file, structure, load_checkpoint,
             lambda folder: ["export", f"{folder}", f"{folder.parent / 'out.safetensors'}"], mend=mend)
      for name, file, structure, mend in (
          ("index", "index.json", "json", mend_index), ("shard", SHARD, "safetensors", id),
          ("forged shard", SHARD, "safetensors", mend_index))),
    Reader("weights", made(weights_of), WEIGHTS, "safetensors", load_weights,
           lambda folder: [*TRAIN, f"{folder}"], seconds=True),
    Reader("index of weights", made(weights_of), "model.safetensors.index.json", "json", load_weights,
           lambda folder: [*TRAIN, f"{folder}"], seconds=True),
    Reader("answer to a puzzle", lambda: {"answer.py": ANSWER}, "answer.py", "",
           id, lambda folder: ["puzzles", "mean", "--check", f"{folder / 'answer.py'}:mean"], seconds=True,
           codes=(1, 2)),
]}
