"""ZeRO in one file, line by line: one step of `zerosim.tiny` on four weights and two ranks, recorded while it runs.

A tracer notes each line of the file that a rank comes to, with the values that its function sees there, and what the
ranks keep and have in their inboxes whenever that changes. Nothing is drawn by hand: the file runs as it is.
"""

import inspect
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any

import ml_dtypes
import numpy as np

from zerosim import tiny

STAGES = (tiny.DDP, tiny.ZeRO1, tiny.ZeRO2, tiny.ZeRO3)
MODEL = (((0.75, -0.5),), ((1.25,), (0.375,)))  # (1, 2) and (2, 1): four weights
DATA = ((((1.0,),), ((2.0,),)), (((-0.5,),), ((0.25,),)))  # x and target (1, 1) of each rank
LEARNING_RATE = 0.125
KEPT = ("weights", "gradients", "master", "m", "v")
MOST_SHOWN = 8  # numbers of an array


def text_of(value: Any) -> str:
    """A value as a reader is shown it; '' for what is no number, array or list of them."""
    if isinstance(value, tiny.Tensor):
        return text_of(getattr(value, "data", None))  # one that is being made has none yet
    if isinstance(value, np.ndarray):
        numbers = ", ".join(f"{float(x):.6g}" for x in value.reshape(-1)[:MOST_SHOWN])
        return f"[{numbers}{', …' if value.size > MOST_SHOWN else ''}] {value.dtype.name} {value.shape}"
    if isinstance(value, bool | int | float | np.number):
        return f"{value:.6g}" if isinstance(value, float | np.floating) else str(value)
    return ""


@dataclass
class LineRecording:
    """One step of a stage, as it ran. ``lines`` has a row for each line that a rank came to: rank, number of the line,
    depth of calls, the function's name, and its values by name; ``states`` has, by the row before which it was so, what
    every rank keeps, what lies in its inbox and what it has sent so far."""

    lines: list[list[Any]] = field(default_factory=list)
    states: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        """The tracer: of the file's functions that a step calls it sees every line, of others nothing."""
        if frame.f_code.co_filename != tiny.__file__ or not (calls := calls_of(frame)):
            return None
        if event == "line" and not frame.f_code.co_name.startswith("<"):
            step = calls[-1]
            values = {name: text for name, value in frame.f_locals.items() if (text := text_of(value))}
            self.note(step.f_back.f_locals["trainers"] if step.f_back else [])
            self.lines.append([step.f_locals["self"].rank.index, frame.f_lineno, len(calls) - 1,
                               frame.f_code.co_name, values])
        return self.trace

    def note(self, trainers: Sequence[tiny.DDP]) -> None:
        """Keeps the state of all ranks, where it is another than the last one."""
        state = [{"kept": [{kind: text_of(getattr(p, kind)) for kind in KEPT} for p in one.parameters],
                  "inbox": [text_of(chunk) for chunk in one.rank.inboxes[one.rank.index]],
                  "sent": one.rank.sent_nbytes} for one in trainers]
        if not self.states or state != next(reversed(self.states.values())):
            self.states[len(self.lines)] = state


def calls_of(frame: FrameType | None) -> list[FrameType]:
    """The calls from this one up to a rank's step; none where no step has called it."""
    calls = []
    while frame is not None:
        calls.append(frame)
        if frame.f_code is tiny.DDP.step.__code__:
            return calls
        frame = frame.f_back
    return []


def recorded(stage: type[tiny.DDP]) -> tuple[LineRecording, list[tiny.DDP]]:
    """One step of two ranks under a stage, and their trainers at its end."""
    recording = LineRecording()
    model = [np.array(matrix, np.float32) for matrix in MODEL]
    data = [[[(np.array(x), np.array(target))] for x, target in DATA]]
    before = sys.gettrace()
    sys.settrace(recording.trace)
    try:
        trainers = tiny.train(stage, model, data, ml_dtypes.bfloat16, LEARNING_RATE)
    finally:
        sys.settrace(before)
    recording.note(trainers)
    return recording, trainers


def page_data() -> dict[str, Any]:
    """The file's lines, and the recording of every stage."""
    return {"source": inspect.getsource(tiny).splitlines(),
            "runs": {stage.__name__: asdict(recorded(stage)[0]) for stage in STAGES}}
