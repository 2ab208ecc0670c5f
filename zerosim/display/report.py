"""The report of a run: from the file of a recording to the file of its page, all of it or nothing."""

from pathlib import Path

from zerosim.display.report_data import report_data
from zerosim.display.report_page import page
from zerosim.numerics.files import write_whole
from zerosim.planning.hardware import Device, Link, Network, network_of, presets, read
from zerosim.planning.recording import load
from zerosim.planning.timeline import Machine

# A machine on which a small model's arithmetic and its communication take about as long as each other, as a large
# model's do on a large machine. Made up for the picture, as its source says.
MACHINE = Machine(
    Device("made up for a picture", 10**9, 10**9, 100e9, {"fp16": 1e12}, "made up for a picture", "2025-01-01"),
    Network(Link("made up for a picture", 5e9, 1e-6, "made up for a picture", "2025-01-01")), "fp16", efficiency=0.5)


def machine_of(ranks: int, device: str | None, link: str | None, *, compute: str = "bf16", efficiency: float = 1.0,
               nodes: int = 1, between: str | None = None, hardware: str | None = None) -> Machine:
    """N devices by name, on links by name; without both, the made-up machine of the timeline's figure, on which a small
    model's arithmetic and its communication can both be seen. ValueError for a name that is not known.
    """
    known = presets() if hardware is None else read(hardware)
    if device is None and link is None:
        if nodes != 1 or between is not None or hardware is not None or compute != "bf16" or efficiency != 1.0:
            raise ValueError("nodes, a link between them, hardware of one's own, --compute and --efficiency go with "
                             "--device and --link; name both")
        return MACHINE
    if device is None or link is None:
        raise ValueError(f"a machine is a device and a link, and only {device or link} was named; name both, as in "
                         "--device h100-80 --link nvlink4")
    outside = None if nodes == 1 and between is None else known.link(between or "infiniband-ndr")
    return Machine(known.device(device), network_of(ranks, nodes, known.link(link), outside), compute, efficiency)


def save_report(recorded: str | Path, out: str | Path | None = None, *, device: str | None = None,
                link: str | None = None, span: str | None = None, compute: str = "bf16", efficiency: float = 1.0,
                nodes: int = 1, between: str | None = None, hardware: str | None = None) -> Path:
    """Reads a recording, replays it and writes the page; without ``out``, beside the recording as .html.

    ``span`` takes the rows inside one span alone. Raises ValueError for a file that is no recording, for a machine that
    is not known, for a recording too long for a page, and for a path that cannot be written; then nothing is written.
    """
    recorded, recording = Path(recorded), load(recorded)
    out = recorded.with_suffix(".html") if out is None else Path(out)
    if out.resolve() == recorded.resolve():
        raise ValueError(f"the page was to be written over the recording {str(recorded)!r}; name another file by --out")
    if span is not None:
        recording = recording.inside(span)
    machine = machine_of(recording.ranks, device, link, compute=compute, efficiency=efficiency, nodes=nodes,
                         between=between, hardware=hardware)
    title = recorded.stem + (f", {span}" if span else "")
    return _written(page(report_data(recording, machine, title)), out)


def _written(text: str, path: Path) -> Path:
    try:
        return write_whole(path, text.encode())
    except OSError as error:
        raise ValueError(f"asked to write the page {str(path)!r}, but: {error.strerror}; name a file that can be "
                         "written") from None
