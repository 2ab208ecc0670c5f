"""The activations of a decoder at every moment of a micro-batch, to the byte: kept, just being made, and flowing back.

`activations.peak_nbytes` says what is kept. Beside it there is at any moment what is just being made: a LayerNorm's
output, the gradients that flow back. Tensors come and go in the order in which the layers of a part (attention, or the
feed-forward network) run, and each goes when its last reader has run. Scratch of the kernels is not in it, nor are
gradients of weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from zerosim.models.units import Recompute
from zerosim.numerics.checks import checked_count
from zerosim.planning.activations import FP32_NBYTES, Block, total

Place = tuple[str, int]  # a phase and a unit
ACTIVATION, CHECKPOINT, GRADIENT = "activation", "checkpointed_input", "activation_gradient"
# The step of a moment in which no layer computes: what rests after a unit, or while its gradient is accumulated.
BETWEEN = "between"


@dataclass(frozen=True, slots=True)
class ActivationSnapshot:
    """Bytes held by kind while a unit makes a step: forward, again or backward."""

    phase: str
    unit: int
    step: str
    nbytes: dict[str, int]

    @property
    def total_nbytes(self) -> int:
        """Bytes of all kinds."""
        return sum(self.nbytes.values())


@dataclass(frozen=True, slots=True)
class HalfBlock:
    """Half a block in bytes: its input, what its first linear layer makes, what its last one takes, the statistics.

    `square` are the probabilities, `log_sums` attention's log-sum-exps; `normed` the copy of the opening in which heads
    are normed, `head_statistics` what is kept of it. Of parts `beside` each other the second keeps no input of its own;
    what a norm behind the part reads is among the `statistics`.
    """

    name: str
    stream: int
    opening: int
    closing: int
    statistics: int
    square: int = 0
    log_sums: int = 0
    normed: int = 0
    head_statistics: int = 0
    beside: bool = False

    def middle(self, inside: str) -> int:
        """Bytes that the middle makes beside its output, and keeps: probabilities, log-sum-exps, heads' statistics."""
        return {"all": self.square, "tiled": self.log_sums}.get(inside, 0) + self.head_statistics

    def kept(self, inside: str) -> int:
        """Bytes that the part keeps, its input included."""
        made = self.statistics + self.opening + self.closing + self.middle(inside)
        return self.stream * (not self.beside) + (0 if inside == "sub_block" else made)

    def run(self, inside: str) -> Iterator[tuple[str, int]]:
        """Step by step what has been made and is held, up to the input of the last linear layer."""
        yield "LayerNorm", self.stream + self.statistics
        yield "opening", self.stream + self.statistics + self.opening
        yield "middle", self.statistics + self.opening + self.closing + self.middle(inside) + self.normed

    def forward(self, inside: str, *, dropout: bool) -> Iterator[tuple[str, int]]:
        """Step by step what has been made and is held, beside the part's input."""
        yield from self.run(inside)
        made = self.statistics + self.opening + self.closing + self.middle(inside)
        yield "closing", made + self.stream
        if dropout:
            yield "dropout", made + 2 * self.stream

    def backward(self, inside: str, *, dropout: bool) -> Iterator[tuple[str, int, int]]:
        """Step by step what is held of the part's activations, its input included, and of gradients."""
        d = self.stream
        if inside == "sub_block":
            yield from ((step, d + made, d) for step, made in self.run("all"))
            inside = "all"
        kept = self.kept(inside)
        dropped = d if dropout else 0
        if dropout:
            yield "dropout", kept, d + dropped
        yield "closing", kept, d + dropped + self.closing
        if inside != "tiled" or not self.log_sums:  # tiled attention reads its own output, the closing's input, again
            kept -= self.closing
        again = self.square if inside == "selective" else 0
        yield "middle", kept + again + self.normed, d + self.closing + self.opening
        rest = d + self.statistics
        yield "LayerNorm output", rest + d, d + self.opening
        yield "opening", rest + d, d + self.opening + d
        yield "LayerNorm", rest, 3 * d


def parts_of(block: Block) -> tuple[HalfBlock, HalfBlock]:
    """Attention and the feed-forward network of a block, in bytes; the opening of a gated one makes both factors."""
    def nbytes(*names: str) -> int:
        return total(block, names).nbytes

    stream = nbytes("LayerNorm 1 input")
    return (HalfBlock("attention", stream, nbytes("QKV"), nbytes("attention output"),
                      nbytes("LayerNorm 1 statistics", "normed attention"), nbytes("probabilities"),
                      nbytes("log-sum-exp"), nbytes("QKV") * block.head_norms, nbytes("head norm statistics")),
            HalfBlock("ffn", stream, nbytes("pre-GELU"), nbytes("post-GELU"),
                      nbytes("LayerNorm 2 statistics", "normed network"), beside=block.sizes.parallel))


def fullest_nbytes(block: Block, blocks: int, vocabulary: int, policy: str = "none") -> int:
    """The most bytes of activations and of their gradients at one moment of a micro-batch.

    >>> fullest_nbytes(Block(1, 64, 32, 4), 3, 256), fullest_nbytes(Block(2, 64, 32, 4), 3, 256)
    (343808, 687616)

    Raises ValueError as `snapshots` does.
    """
    return max(moment.total_nbytes for moment in snapshots(block, blocks, vocabulary, policy))


def snapshots(block: Block, blocks: int, vocabulary: int, policy: str = "none", *, dropout: bool = False,
              output_itemsize: int | None = None, parts_per_unit: int = 2,
              between: bool = False) -> list[ActivationSnapshot]:
    """Every moment of one micro-batch of a decoder: the units forward, the loss, the units backward.

    `parts_per_unit` is 2 where a unit is a block, 1 where it is half a block, 2k where k blocks are joined;
    `output_itemsize` that of the logits, where it is not the block's. Segments are of units, the embedding the first.
    `between` are the moments after each unit too, in which gradients are accumulated and weights gathered and freed.

    >>> largest = max(snapshots(Block(1, 64, 32, 4), 3, 256), key=lambda moment: moment.total_nbytes)
    >>> largest.phase, largest.unit, largest.step, largest.nbytes
    ('backward', 4, 'loss', {'activation': 311040, 'activation_gradient': 32768})

    Raises ValueError for counts below one and for a text that names no policy.
    """
    parts = parts_of(block) * checked_count("blocks", blocks, 1)
    step = checked_count("parts_per_unit", parts_per_unit, 1)
    units = [(), *(parts[start:start + step] for start in range(0, len(parts), step)), ()]
    logits = block.positions * checked_count("vocabulary", vocabulary, 1)
    recompute = Recompute.parse(policy)
    walk = Walk(units, block.stream * block.itemsize, logits * (output_itemsize or block.itemsize),
                0 if output_itemsize in (None, block.itemsize) else logits * block.itemsize,
                block.positions * FP32_NBYTES, block.norm_statistics * FP32_NBYTES, recompute.inside, dropout)
    return [one for one in walk.micro_batch(recompute.units_per_segment) if between or one.step != BETWEEN]


def passes(count: int, per_segment: int | None) -> tuple[list[Place], list[Place]]:
    """The units forward and the units back, each with its phase, in the order of a micro-batch.

    >>> passes(3, 2)[1]
    [('again', 2), ('backward', 2), ('again', 0), ('again', 1), ('backward', 1), ('backward', 0)]
    """
    back = list[Place]()
    for run in reversed(Recompute(per_segment).segments(count) or [range(count)]):
        back += [("again", unit) for unit in run if per_segment]
        back += [("backward", unit) for unit in reversed(run)]
    return [("forward", unit) for unit in range(count)], back


@dataclass(slots=True)
class Walk:
    """A model's units on their way forward and back, and what rests between two units, in bytes.

    `units` are the parts of each, none for the embedding and the head; `stream` is what flows between them, `cast` the
    gradient of the logits in the compute format where that is another, `row` one number of fp32 for each token,
    `statistics` those of the head's norm.
    """

    units: list[tuple[HalfBlock, ...]]
    stream: int
    logits: int
    cast: int
    row: int
    statistics: int
    inside: str
    dropout: bool
    activation: int = 0
    checkpoint: int = 0
    gradient: int = 0

    def micro_batch(self, per_segment: int | None) -> Iterator[ActivationSnapshot]:
        """Forward, loss and backward, in segments of so many units, or in none."""
        count = len(self.units)
        runs = Recompute(per_segment).segments(count)
        starts, ends = ({run[place] for run in runs} for place in (0, -1))
        forward, backward = passes(count, per_segment)
        for _, unit in forward:
            if unit in starts and unit:
                self.checkpoint, self.activation = self.checkpoint + self.stream, self.activation - self.stream
            yield from self._forward("forward", unit, keep=not runs, input_held=unit in starts)
            yield self._snapshot("forward", unit, BETWEEN)
        self.activation += self.row
        yield self._snapshot("forward", count - 1, "loss")
        self.gradient = self.logits
        yield self._snapshot("backward", count - 1, "loss")
        self.activation -= self.row + self.logits
        yield self._snapshot("loss", count - 1, BETWEEN)
        for phase, unit in backward:
            coming = self.gradient
            if phase == "again":
                yield from self._forward("again", unit, keep=True, input_held=True)
                if unit in ends:
                    self.activation -= self.logits if unit == count - 1 else self.stream
            else:
                yield from self._backward(unit)
                self._drop_input(unit, checkpointed=unit in starts)
                yield self._snapshot("accumulated", unit, BETWEEN, 0, coming)
            yield self._snapshot(phase, unit, BETWEEN)

    def _snapshot(self, phase: str, unit: int, step: str, activation: int = 0, gradient: int = 0) -> ActivationSnapshot:
        """The bytes that rest, and those that are being made beside them."""
        nbytes = {ACTIVATION: self.activation + activation, CHECKPOINT: self.checkpoint,
                  GRADIENT: self.gradient + gradient}
        return ActivationSnapshot(phase, unit, step, {kind: n for kind, n in nbytes.items() if n})

    def _drop_input(self, unit: int, *, checkpointed: bool) -> None:
        """Frees the input that a unit has read; the tokens are none of these kinds."""
        if unit and checkpointed:
            self.checkpoint -= self.stream
        elif unit:
            self.activation -= self.stream

    # -- one unit forward ---------------------------------------------------------------------------------------------

    def _forward(self, phase: str, unit: int, *, keep: bool, input_held: bool) -> Iterator[ActivationSnapshot]:
        """Its output rests afterwards, and what it keeps if it is to keep it, or else not even its input."""
        before, last = self.activation, unit == len(self.units) - 1
        if unit == 0:
            yield self._snapshot(phase, unit, "embedding", (2 if self.dropout else 1) * self.stream)
        elif last:
            yield self._snapshot(phase, unit, "logits", self.stream + self.statistics + self.logits)
            self.activation += self.statistics if keep else 0
        for part in self.units[unit]:
            for step, made in part.forward(self.inside, dropout=self.dropout):
                yield self._snapshot(phase, unit, f"{part.name} {step}", made)
            self.activation += part.kept(self.inside)  # without its input, with its output, which weighs the same
        if not keep:
            self.activation = before
            if not input_held:
                self._drop_input(unit, checkpointed=False)
        if last or unit == 0 or not keep:
            self.activation += self.logits if last else self.stream

    # -- one unit backward --------------------------------------------------------------------------------------------

    def _backward(self, unit: int) -> Iterator[ActivationSnapshot]:
        """The gradient of its input rests afterwards; that of its output is held by the caller until then."""
        if unit == 0:
            yield self._snapshot("backward", unit, "embedding", 0, self.stream if self.dropout else 0)
        elif unit == len(self.units) - 1:
            yield self._snapshot("backward", unit, "LayerNorm output", self.stream, self.cast)
            yield self._snapshot("backward", unit, "logits", self.stream, self.cast + self.stream)
            yield self._snapshot("backward", unit, "LayerNorm", 0, 2 * self.stream)
            self.activation -= self.statistics
        for index, part in enumerate(reversed(self.units[unit])):
            kept, own = part.kept(self.inside), self.stream if index == 0 else 0
            for step, activation, gradient in part.backward(self.inside, dropout=self.dropout):
                yield self._snapshot("backward", unit, f"{part.name} {step}", activation - kept, gradient - own)
            self.activation -= kept - self.stream
            if index < len(self.units[unit]) - 1:
                self.activation -= self.stream  # between two parts: the input of the one, that nobody else holds
        self.gradient = self.stream if unit else 0
