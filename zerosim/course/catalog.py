"""Lists of what can be named: models, devices and links, each with the numbers by which one chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zerosim.display.views import RIGHT, TextLine, View, marked_table, plain, plain_record
from zerosim.models import gpt, llama
from zerosim.planning import hardware, shapes
from zerosim.shown import Answer

SIZES = ("parameters", "blocks", "channels", "heads", "tokens")


@dataclass(frozen=True, slots=True)
class Catalog(Answer):
    """All that can be named, by its name with its numbers; the columns and rows that a table shows; and remarks."""

    what: str
    by_name: dict[str, dict[str, Any]]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    remarks: tuple[str, ...]

    def view(self) -> View:
        """The table, and the remarks under it."""
        return View(self.what, f": {len(self.by_name)}", (
            marked_table(*self.columns, rows=self.rows, indent=0), *(TextLine(remark, 0) for remark in self.remarks)))

    def as_json(self) -> dict[str, Any]:
        """Everything by name."""
        return plain_record({self.what: self.by_name})


def models() -> Catalog:
    """The presets, from the smallest on: those that zerosim trains, and those that it plans."""
    found: dict[str, dict[str, Any]] = {}
    for decoder in (gpt.GPT, llama.Llama):
        for name, config in decoder.presets.items():
            sizes = (decoder(config).parameter_count, config.layers, config.channels, config.heads, config.context)
            found[name] = dict(zip(SIZES, sizes, strict=True)) | {"for": ["train"]}
    for name, shape in shapes.PRESETS.items():
        sizes = (shapes.model_shape(name).parameters, shape.blocks, shape.channels, shape.heads, shape.tokens)
        uses = found.get(name, {"for": []})["for"]
        found[name] = dict(zip(SIZES, sizes, strict=True)) | {"for": [*uses, "plan"]}
    found = dict(sorted(found.items(), key=lambda item: item[1]["parameters"]))
    rows = tuple((name, *(f"{row[size]:,}" for size in SIZES), " ".join(row["for"])) for name, row in found.items())
    return Catalog("models", found, ("model", *(RIGHT + size for size in SIZES), "for"), rows, (
        "train: zerosim train and compare, where those of 17 words get 256, for bytes. plan: zerosim plan and tune. "
        "All take a Hugging Face folder or config.json too; plan also takes --params 7B.",))


def devices(file: str | None = None) -> Catalog:
    """The devices that come along, and those of a TOML ``file``; raises ValueError as `hardware.read` does."""
    def cells(one: hardware.Device) -> tuple[str, ...]:
        flops = one.flops_per_second.get("bf16")
        return (f"{one.capacity_nbytes / 1e9:g}", f"{one.memory_bytes_per_second / 1e9:,.0f}",
                "none" if flops is None else f"{flops / 1e12:,.0f}", one.link or "", one.host_link or "")

    columns = (*(RIGHT + name for name in ("GB", "GB/s", "bf16 TFLOP/s")), "in a node", "to host")
    return _of_hardware("device", hardware.read(file).devices, columns, cells)


def links(file: str | None = None) -> Catalog:
    """The links that come along, and those of a TOML ``file``; raises ValueError as `hardware.read` does."""
    columns = (RIGHT + "GB/s, one way", RIGHT + "latency, µs")
    return _of_hardware("link", hardware.read(file).links, columns, lambda one: (
        f"{one.bytes_per_second / 1e9:g}", f"{one.latency_seconds * 1e6:g}"))


def _of_hardware(kind: str, known: Mapping[str, Any], columns: tuple[str, ...],
                 cells: Callable[[Any], tuple[str, ...]]) -> Catalog:
    """The rows of hardware's file: a name, the short names that mean it, the cells of these columns, and a date."""
    also = {name: [short for short, meant in hardware.SHORT_NAMES.items() if meant == name] for name in known}
    return Catalog(
        f"{kind}s", {name: plain(one) | {"also": also[name]} for name, one in known.items()},
        (kind, "also", *columns, "date"),
        tuple((name, " ".join(also[name]), *cells(one), one.date) for name, one in known.items()),
        ("Each number has a source: --json prints it. Your own, as "
         f"\\[{kind}.NAME] in a TOML file: --hardware FILE, here and in zerosim plan.",))
