"""Each number of a plan with its formula, the values filled in.

Legend: N ranks, k micro-batches, B sequences of L tokens, d channels, H heads, n blocks, V vocabulary, P parameters.
"""

from collections.abc import Iterator

from zerosim.numerics.places import DEVICE, DIRECTIONS, DISK, HOST
from zerosim.numerics.units import counted
from zerosim.planning import activations
from zerosim.planning.activations import Block, logits_nbytes
from zerosim.planning.closed_forms import STAGES, crossing_nbytes, vectors_sent
from zerosim.planning.configuration import STATE_KINDS, UTILIZATION, PlanConfig
from zerosim.planning.conventions import convention_of, formula, is_cut_anywhere, per_parameter_nbytes
from zerosim.planning.hardware import OVERHEADS_OF, overheads_nbytes
from zerosim.planning.plan_row import PlanRow
from zerosim.planning.runtimes import times_held

OFF_DEVICE = {DEVICE: "", HOST: " on the host, nothing on the device", DISK: " on disk, nothing on the device"}
Explanation = tuple[str, str, str]  # what, the formula with its values, the value


def explained(config: PlanConfig, row: PlanRow) -> list[Explanation]:
    """(what, formula, value) for every number of a row, in the order of its columns."""
    if config.is_engine:
        return [*_states(config, row), *_beside_states(config, row), *_total(config, row), *_seconds(config, row)]
    held = [(f"{one.kind}{'' if one.place == DEVICE else f' on the {one.place}'}: {one.what}", one.source,
             f"{one.nbytes:,}") for one in row.held]
    most = sum(times * OVERHEADS_OF[config.device.platform][name].most_nbytes
               for name, times in times_held(config.job(row.stage, row.recompute)).items())
    said = ("overhead, at most", "what sources give at most; the least is taken, and what more there is comes off the "
            "margin", f"{most:,}")
    return [*held, *[said] * (most > 0), *_total(config, row), *_seconds(config, row)]


def _states(config: PlanConfig, row: PlanRow) -> Iterator[Explanation]:
    job, states, convention = config.job(row.stage, row.recompute), STAGES[row.stage], convention_of(config.accounting)
    padded, ranks = sum(job.padded_lengths), job.shards
    yield ("parameters of the model, with padding", f"{config.model.parameters:,} -> {padded:,}", f"{padded:,}")
    own, each, what = 0, "its own state", "of whole tensors, beside the optimizer's own state"
    if is_cut_anywhere(config.optimizer):
        own = per_parameter_nbytes(config.optimizer, convention.state_itemsize)
        each, what = str(own), f"{own} of them the optimizer's own state"
    yield (f"model states ({convention.name})", f"({formula(states, convention, own)}) bytes, N = {ranks}, {what}",
           f"{row.states_nbytes + row.host_nbytes + row.disk_nbytes:,}")
    places = config.options.offload
    for kind, nbytes, place in (("parameter", row.nbytes_of("parameters"), places.parameters),
                                ("gradient", row.nbytes_of("gradients"), places.gradients)):
        share = f"/{ranks}" if states.cuts(kind) else ""
        yield (kind + "s", f"{convention.kinds(states)[kind]} · {padded:,}{share}{OFF_DEVICE[place]}", f"{nbytes:,}")
    share = f"/{ranks}" if states.optimizer_sharded else ""
    copies = sum(nbytes for kind, nbytes in convention.kinds(states).items() if kind in STATE_KINDS["optimizer"])
    yield ("optimizer", f"({copies} + {each}) · {padded:,}{share}{OFF_DEVICE[places.optimizer]}",
           f"{row.nbytes_of('optimizer'):,}")


def _beside_states(config: PlanConfig, row: PlanRow) -> Iterator[Explanation]:
    decoder = config.decoder
    if decoder is not None:
        block = Block.of(decoder, config.batch, config.sequence, config.policy.compute_dtype.itemsize)
        peak = activations.peak_nbytes(block, decoder.blocks, row.recompute)
        logits = logits_nbytes(block, decoder.vocabulary)
        yield ("activations", f"{row.recompute} of n = {decoder.blocks} blocks, BLd = {block.stream:,}, BHL² = "
               f"{block.square:,}, keeps {peak.nbytes:,}; logits BLV and the loss are {logits:,}; at the fullest "
               "moment of activations both, with the gradients that flow back",
               f"{config.activations_nbytes(row.recompute):,}")
    yield from _transient(config, row)
    given = overheads_nbytes(config.overheads, config.device.platform)
    parts = ", ".join(f"{name} {nbytes:,}" for name, nbytes in given.items())
    yield ("overhead of the runtime", f"estimates: {parts}", f"{row.overhead_nbytes:,}")


def _total(config: PlanConfig, row: PlanRow) -> Iterator[Explanation]:
    """All that is held, beside the capacity, and what is sent."""
    job = config.job(row.stage, row.recompute)
    padded = sum(job.padded_lengths)
    yield ("total", " + ".join(f"{nbytes:,} {kind}" for kind, nbytes in row.parts.items() if nbytes),
           f"{row.total_nbytes:,}")
    yield ("capacity", f"what programs can take of {config.device.name}", f"{row.capacity_nbytes:,}")
    vectors = {purpose: f"{float(times):.4g} Ψ of {purpose}" for purpose, times in vectors_sent(job).items() if times}
    if job.options.zeropp:
        across = sum(map(sum, crossing_nbytes(job).values())) // job.options.nodes
        yield ("sent per step",
               f"unit by unit, with {job.options.zeropp}; {across:,} go from a node's ranks to other nodes",
               f"{row.sent_nbytes_per_step:,}")
        return
    if config.model.has_frozen:
        yield ("sent per step", f"unit by unit, N = {job.shards}: gradients of {config.model.trainable_parameters:,} "
               "trained elements, sharded parameters as they rest, frozen ones too, and control",
               f"{row.sent_nbytes_per_step:,}")
        return
    nodes = f", and across M = {job.options.nodes} nodes 2(M-1)/M · Ψ/N of gradients" * (job.options.replicas > 1)
    yield ("sent per step", f"(N-1)/N · ({' + '.join(vectors.values()) or '0'}), N = {job.shards}, Ψ = "
           f"{job.policy.compute_dtype.itemsize} · {padded:,}{nodes}, and control", f"{row.sent_nbytes_per_step:,}")


def _transient(config: PlanConfig, row: PlanRow) -> Iterator[Explanation]:
    """Transient memory: what is gathered and on its way, and all that comes and goes."""
    if not config.has_units:
        yield ("gathered units, gradients in flight", "not known without a largest layer", "0")
        return
    job, found = config.job(row.stage, row.recompute), config.transient_memory(row.stage, row.recompute)
    itemsize, largest = job.policy.compute_dtype.itemsize, max(job.padded_lengths)
    if found.gathered_nbytes:
        yield ("gathered units", f"{itemsize} · {found.gathered_nbytes // itemsize:,} elements at once: a unit, its "
               f"tied weights, and {job.options.prefetch} ahead; the largest has {largest:,}",
               f"{found.gathered_nbytes:,}")
    if found.secondary_nbytes:
        whole = itemsize * sum(job.padded_lengths)
        yield ("secondary shards (hpZ)", f"{whole:,} · {job.options.nodes}/{job.ranks}, until the update",
               f"{found.secondary_nbytes:,}")
    two = ", or one that goes back while another is reduced" * (job.options.overlap and job.states.gradients_sharded)
    yield ("gradients in flight", f"{itemsize} · {found.gradients_nbytes // itemsize:,} elements at once: a unit and "
           f"what the users of its weights wrote{two}, or what has been reduced", f"{found.gradients_nbytes:,}")
    hops = (f"{min(2, job.shards - 1)} chunks of hops, each 1/{job.shards} of a unit, and a unit's sum or its cast "
            "where it needs one")
    if job.options.by_micro_batch:
        hops = "all ranks' addends to a rank's own chunk, as many elements as the unit has, and its cast where needed"
    yield ("buffers of collectives", hops, f"{found.buffers_nbytes:,}")
    yield ("buckets", "these two at the moment at which they are most together", f"{found.in_flight_nbytes:,}")
    most = found.fullest(config.batch)
    phase, unit = most.place
    secondary = f"{most.secondary_nbytes:,} of secondary shards + " if most.secondary_nbytes else ""
    yield ("all that comes and goes", f"{most.gathered_nbytes:,} gathered + {secondary}{most.gradients_nbytes:,} of "
           f"gradients + {most.buffers_nbytes:,} of buffers + {config.batch} · {most.sequence_nbytes:,} of activations "
           f"and tokens, at the fullest moment: {phase}, {config.model.units[unit].name}", f"{row.transient_nbytes:,}")


def _transfers(config: PlanConfig, row: PlanRow) -> Iterator[Explanation]:
    """The bytes of offload both ways, and their seconds."""
    moved, host, disk = config.transfers(config.job(row.stage, row.recompute))
    for place, ways, link, seconds in (("host", DIRECTIONS[:2], config.host_link, host),
                                       ("disk", DIRECTIONS[2:], config.disk_link, disk)):
        if link is not None:
            there, back = (moved[way] for way in ways)
            yield (f"to the {place} and back", f"{there:,} there + {back:,} back", f"{there + back:,}")
            ways_used = bool(there) + bool(back)
            yield ("of that the seconds", f"{ways_used} · {link.latency_seconds:g} + {there + back:,} / "
                   f"{link.bytes_per_second:g} over {link.name}, beside nothing", f"{seconds:.4g} s")


def _seconds(config: PlanConfig, row: PlanRow) -> Iterator[Explanation]:
    flops = config.flops(row.recompute)
    rate = config.device.flops_per_second_in(config.policy.compute)
    yield ("FLOPs per step", f"forward {flops.forward:.4g} + backward {flops.backward:.4g} + again "
           f"{flops.recomputed:.4g}", f"{row.flops_per_step:,}")
    yield _compute(config, row, rate)
    between = f" and {config.network.between.name}" if config.network.between else ""
    to_owners = config.options.by_micro_batch or config.options.parts.gradients
    collectives = "rings and all-to-alls" if to_owners else "rings"
    how = (f"{collectives} unit by unit, α + n/β" if config.is_engine else
           f"NCCL's time unit by unit (nccl), at {config.reached.network:g} of the network" if config.reached else "")
    yield ("communication", f"{how} over {config.network.inside.name}{between}", f"{row.communication_seconds:.4g} s")
    job = config.job(row.stage, row.recompute)
    yield ("of it exposed", f"what the program stands still for, with {options_text(config)}",
           f"{row.exposed_communication_seconds:.4g} s")
    scanned, updated = config.update_nbytes(config.of_trained(job), row.held)
    host = "" if config.options.offload.optimizer == DEVICE else "; the host's own " + (
        f"at {config.reached.host_update:.3g} parameters a second" if config.reached else "arithmetic is not in it")
    products = f" + {seconds:.4g} s of products" if (seconds := config.product_seconds(job)) else ""
    yield ("update", f"({scanned:,} scanned for overflow and norm + {updated:,} read and written) / "
           f"{config.device.memory_bytes_per_second:.4g} per second{products}{host}", f"{row.update_seconds:.4g} s")
    yield from _transfers(config, row)
    extra = " + host" * (not config.options.offload.is_none) + " + disk" * config.options.offload.uses_disk
    yield ("step", "compute + exposed + update" + extra, f"{row.step_seconds:.4g} s")
    yield ("model FLOPs utilization", f"{row.model_flops_per_step:.4g} / (step · {rate:.4g})",
           f"{row.model_flops_utilization:.3f}")


def _compute(config: PlanConfig, row: PlanRow, rate: float) -> Explanation:
    """The seconds of arithmetic, by the rates that are taken to be reached."""
    if (reached := config.reached) is not None:
        errors = (f"Published steps of this device are off by {reached.error:.0%}" if reached.published else
                  f"No published step of {config.device.name} is among those that were fitted; of devices left out of "
                  f"the fit they are off by up to {reached.error:.0%}")
        return ("compute", f"products at {reached.products:.4g} operations per second, {reached.products / rate:.2f} "
                f"of the peak ({reached.source}); fused attention at {reached.attention[0]:.4g} and, back, "
                f"{reached.attention[1]:.4g}; what is elementwise at {reached.memory:.4g} bytes per second; and "
                f"{reached.contention:g} of what is sent. {errors}",
                f"{row.compute_seconds:.4g} s")
    made = config.arithmetic(row.recompute)
    bounds = {pieces: pieces.bounds(config.machine) for pieces in {*made.values()}}
    computed, moved = (config.micro_batches * sum(bounds[pieces][way] for pieces in made.values()) for way in (0, 1))
    return ("compute", f"of products, norms and all between: {computed:.4g} operations / ("
            f"{config.utilization or UTILIZATION:g} · {rate:.4g} per second) of those that these bound, + {moved:.4g} "
            f"bytes / {config.device.memory_bytes_per_second:.4g} per second of those that memory bounds",
            f"{row.compute_seconds:.4g} s")


def options_text(config: PlanConfig) -> str:
    """``overlap and 1 unit ahead``, or what of it there is; where no unit is known nothing goes beside another."""
    if not config.has_units:
        return "nothing overlapped"
    overlap, prefetch = config.options.overlap, config.options.prefetch
    parts = ["overlap"] * overlap + [f"{counted(prefetch, 'unit')} ahead"] * bool(prefetch)
    return (" and ".join(parts) or "nothing overlapped") + order_text(config)


def order_text(config: PlanConfig) -> str:
    """``, gradients added by micro-batch``; empty for the usual order."""
    return ", gradients added by micro-batch" * config.options.by_micro_batch
