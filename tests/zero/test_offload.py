"""State on the host or on disk: the device loses its bytes, and they gain them; files that fail change nothing.

That no bit changes, whatever is drawn, is tested in `test_stages_agree.py`; that no checkpoint depends on the place, in
`test_checkpoints.py`; that a run without data holds and moves the same, in `test_null_runs.py`; that the device's peak
is what flows and no more, in `tests/course/test_measured.py`.
"""

import errno
import os
import re
import threading
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

import zerosim as zs
from tests.cases import chosen, covering
from tests.support import DISK, assert_refused
from tests.zero.drawn import ON_DISK
from tests.zero.training import (
    ADAM,
    BF16,
    MODELS,
    ODD,
    Kept,
    alone,
    batches,
    bits,
    ctrl_c_before,
    flat_state,
    held_anywhere,
    job_of,
    masters,
    outcome,
)
from zerosim.models import MLP
from zerosim.numerics import kernels
from zerosim.planning import Machine, Network, hardware, moved_nbytes, record, replay
from zerosim.ranks import Compute, Transfer, TransferWait
from zerosim.zero import OffloadError, ScratchFile, export_weights

KINDS_OF = {"optimizer": ("master", "optimizer_state"), "gradients": ("gradient",), "parameters": ("parameter",)}
ASKED = ("host", ON_DISK, zs.Offload("host"), zs.Offload("disk", "host", directory=DISK), zs.Offload(gradients="host"),
         zs.Offload("disk", "disk", "host", DISK))
MODEL = MODELS["deep"]()


def held_by_place(cluster, **options):
    """By rank and place, the bytes at rest of an engine after a step; and of all places together, when it has gone."""
    data = batches(MODEL, len(cluster.ranks), 2, 1)[0]

    def program(rank):
        engine, memory = zs.Engine(rank, MODEL, ADAM, policy=BF16, **options), rank.memory
        begun = memory.disk.now_nbytes_by_kind
        engine.step(data[rank.index])
        assert memory.disk.now_nbytes_by_kind == begun, "a file for each, from its first values on"
        return {"device": memory.now_nbytes_by_kind, "host": memory.host.now_nbytes_by_kind,
                "disk": memory.disk.now_nbytes_by_kind}

    found = list(cluster.run(program))
    return found, [held_anywhere(rank) for rank in cluster.ranks]


@pytest.mark.parametrize(("stage", "asked"), covering(zs.STAGES, ASKED, count=8), ids=str)
def test_the_device_holds_less_by_what_the_host_or_the_disk_holds_more_to_the_byte(stage, asked):
    whole, _ = held_by_place(zs.Cluster(3), stage=stage)
    found, afterwards = held_by_place(zs.Cluster(3), stage=stage, offload=asked)
    places = zs.Offload(*["host"] * 3) if asked == "host" else asked
    for here, before in zip(found, whole, strict=True):
        for name, kinds in KINDS_OF.items():
            for place in here:
                expected = {kind: before["device"][kind] for kind in kinds} if place == getattr(places, name) else {}
                assert {kind: n for kind, n in here[place].items() if kind in kinds} == expected
    assert afterwards == [{}, {}, {}], "and all of it goes with the engine"


def test_what_is_longer_than_a_stretch_is_moved_in_several_and_no_bit_depends_on_it():
    """LAMB adds squares over a tensor, and reads and writes its moments twice in one update."""
    model = MLP((600, 600), seed=1)
    for optimizer in (ADAM, zs.optim.LAMB()):
        plain = outcome(model, batches(model, 1, 1, 2), stage=0, optimizer=optimizer)
        for asked in ("host", ON_DISK):
            cluster = zs.Cluster(1)
            assert outcome(model, batches(model, 1, 1, 2), cluster, stage=0, optimizer=optimizer,
                           offload=asked) == plain
        written = {row.nbytes for row in cluster.trace[0].rows
                   if isinstance(row, Transfer) and (row.kind, row.direction) == ("optimizer_state", "to disk")}
        assert max(written) == 4 * kernels.NumpyKernels.STRETCH < 4 * model.parameter_count


# -- bytes that are moved ---------------------------------------------------------------------------------------------


def moved(asked, stage=0, ranks=1, micro_batches=1, policy=BF16, model=MODEL, optimizer=ADAM, **options):
    """Bytes of one step by direction, and the parameters of a rank's shard, padding included."""
    cluster = zs.Cluster(ranks)
    data = batches(model, ranks, micro_batches, 1)[0]

    def program(rank):
        engine = zs.Engine(rank, model, optimizer, stage=stage, policy=policy, offload=asked, **options)
        before = {way: rank.trace.moved_nbytes[way] for way in ("to host", "to device", "to disk", "from disk")}
        engine.step(data[rank.index])
        return {way: rank.trace.moved_nbytes[way] - n for way, n in before.items()}, engine.layout.shard_length(0)

    return cluster.run(program)[0]


def test_zero_offload_moves_2_bytes_of_gradient_and_2_of_parameter_for_each_parameter_of_a_shard():
    """Ren et al. 2021, section 4.1: gradients in 16 bits to the host, parameters in 16 bits back."""
    for stage, ranks in ((0, 1), (1, 1), (2, 1), (2, 4), (3, 4)):
        found, shard = moved(zs.Offload("host", "host"), stage, ranks)
        own = MODEL.parameter_count if ranks == 1 else None
        assert (found["to host"], found["to disk"], found["from disk"]) == (2 * shard, 0, 0)
        assert found["to device"] == 2 * (own or sum(
            piece.count for piece in zs.layout_of(MODEL, ranks).valid(0)))


def test_the_factors_of_a_layer_come_to_the_host_that_updates_its_weights():
    """K-FAC's A (I, I) and G (O, O), in fp32, which the device has made."""
    factors = 4 * sum(n * n for shape in MODEL.shapes.values() if len(shape) == 2 for n in shape)
    found, shard = moved(zs.Offload("host", "host"), optimizer=zs.optim.KFAC(), layout="whole_matrices",
                         groups=[zs.Group("*.bias", optimizer=ADAM)])
    assert found["to host"] == 2 * shard + factors


def test_the_disk_is_read_and_written_once_for_each_byte_of_state():
    """Adam's 12 bytes a parameter come and go: Rajbhandari et al. 2021, section 4; and nothing else."""
    found, shard = moved(zs.Offload("disk", directory=DISK), 2, 1)
    assert found["from disk"] == found["to disk"] == 12 * shard
    assert found["to host"] == found["to device"] == 2 * shard


@pytest.mark.parametrize(("options", "name", "ranks", "micro_batches", "asked", "layout", "keep"), [*covering(
    [{"stage": 2, "reduction": "micro_batch"}, {"stage": 3, "reduction": "micro_batch"}, {"stage": 1, "mesh": (3, 2)},
     {"stage": 3, "mesh": (2, 3)}, {"stage": 3, "mesh": (3, 2), "zeropp": zs.ZeroPlusPlus.parse("hpz+qwz+qgz")}],
    ("tied", "wide"), (6,), (1, 2, 3), (ON_DISK, "host", zs.Offload("disk", "disk", "host", DISK),
                                        zs.Offload(gradients="host")), ("contiguous", "per_unit"), (None, "all"),
    count=5), ({"stage": 1, "mesh": (3, 2)}, "fewer_than_ranks", 6, 1, ON_DISK, "per_unit", None)], ids=str)
def test_the_first_rank_moves_the_bytes_of_the_closed_form(options, name, ranks, micro_batches, asked, layout, keep):
    """Where addends arrive one by one, and where a unit lies on few ranks or has padding on the first, too."""
    options = options | {"layout": layout, "keep_gathered": keep}
    job = job_of(MODELS[name](), ranks, micro_batches=micro_batches, policy=BF16, offload=asked, **options)
    found, _ = moved(asked, ranks=ranks, micro_batches=micro_batches, model=MODELS[name](), **options)
    assert found == moved_nbytes(job)


@pytest.mark.parametrize("kind", ["parameter", "optimizer_state"])
def test_what_comes_from_disk_is_asked_for_before_it_is_needed_and_what_goes_there_is_waited_for_later(kind):
    """A read of parameters goes on while the unit before computes; of state while a tensor or a stretch before it goes
    back."""
    model, cluster = MLP((600, 600, 600), seed=1), zs.NullCluster(2, representative=0)

    def program(rank):
        engine = zs.Engine(rank, model, ADAM, stage=3, policy=BF16, offload=ON_DISK)
        with rank.trace.span("step"):
            engine.step([(rank.xp.zeros((4, 600)), rank.xp.zeros((4, 600)))])

    cluster.run(program)
    rows = cluster.trace[0].rows
    begun = {row: place for place, row in enumerate(rows) if isinstance(row, Transfer) and row.kind == kind}
    beside = {"from disk": Compute if kind == "parameter" else Transfer, "to disk": Transfer}
    for way, other in beside.items():
        waited = [(begun[row.transfer], place) for place, row in enumerate(rows)
                  if isinstance(row, TransferWait) and row.transfer in begun and row.transfer.direction == way]
        assert any(isinstance(one, other) for low, high in waited for one in rows[low + 1:high]), way
    recording = record(cluster.trace).inside("step").on_ranks(2)
    machine = Machine(hardware.device("h100-80"), Network(hardware.link("nvlink4")), "bf16",
                      host_link=hardware.link("pcie5"), disk_link=hardware.link("nvme-pcie4"))
    timed = replay(recording, machine).usage[0]
    assert 0 < timed.exposed_offload_seconds < timed.offload_seconds


# -- files that fail --------------------------------------------------------------------------------------------------


LOCK = threading.Lock()


class FailingFile(ScratchFile):
    """A file of which one call fails: the ``at``-th of all files that share ``calls``, in a given way."""

    def __init__(self, directory, nbytes, *, calls, plan):
        self.calls, self.plan = calls, plan
        self._count("open")
        super().__init__(directory, nbytes)

    def _count(self, what):
        """True where a short call is due."""
        with LOCK:  # files are read and written by several threads
            self.calls.append(what)
            way, at = self.plan.get(what, (None, 0))
            if way is None or self.calls.count(what) != at:
                return False
        if way == "short":
            return True
        raise OSError(way, os.strerror(way))

    def pread(self, into, start):
        return 0 if self._count("read") else super().pread(into[:21], start)  # in pieces, as systems may

    def pwrite(self, values, start):
        return 0 if self._count("write") else super().pwrite(values[:27], start)


class Failing(Kept):
    """Engines with state on disk, of which rank 1's files fail as ``plan`` says."""

    def __init__(self, data, optimizer=ADAM, offload=ON_DISK, **options):
        self.calls, self.plan = [], {}
        failing = replace(offload, open_file=partial(FailingFile, calls=self.calls, plan=self.plan))
        super().__init__(ODD, data, optimizer, policy=BF16, **options,
                         of_rank=lambda index: {"offload": failing if index == 1 else offload})

    def counted(self, what, do):
        """The calls that something takes."""
        before = self.calls.count(what)
        do()
        return self.calls.count(what) - before

    def fail(self, what, way, after):
        """Lets a call fail, so many after the last one."""
        self.plan[what] = (way, self.calls.count(what) + after)


def parameters(engine):
    """All parameters (n,), as this rank has them."""
    return np.concatenate([engine.state(name, "parameter")["parameter"].reshape(-1) for name in engine.model.shapes])


FAULTS = [("open", errno.ENOSPC), ("open", errno.EACCES), ("write", errno.ENOSPC), ("write", errno.EIO),
          ("write", "short"), ("read", errno.EIO), ("read", "short")]
PLACES = {"early": lambda n: -(-n // 4), "late": lambda n: -(-3 * n // 4), "last but one": lambda n: n - 1,
          "last": lambda n: n}  # among the calls of a step


@pytest.mark.parametrize(("stage", "optimizer", "mesh", "delayed", "fault", "place"), [
    *covering(zs.STAGES, [ADAM, zs.optim.LAMB()], [None, (2, 1)], [False, True], FAULTS, ["early", "late"], count=7),
    *((stage, ADAM, None, delayed, ("write", errno.EIO), place) for stage, delayed, place in covering(
        zs.STAGES, [True, False], ["last", "last but one"], count=4))])
def test_a_disk_that_fails_raises_in_the_step_it_concerns_and_the_step_may_be_taken_again(
        stage, optimizer, mesh, delayed, fault, place):
    """One rank's disk fails; the others hear of it. Where the last writes are those of an all-gather of parameters, the
    update is whole, and that is to be made again; until then each rank has the others' parameters of before."""
    data, offload = batches(ODD, 2, 1 + stage % 2, 4), replace(ON_DISK, delayed_update=delayed)
    options = {"optimizer": optimizer, "stage": stage, "mesh": mesh, "offload": offload}
    kept, (what, way) = Failing(data, **options), fault
    kept.step(0)
    calls = kept.counted(what, lambda: kept.step(1))
    before = kept.all(parameters)
    kept.fail(what, way, PLACES[place](calls))
    said = "a short " if way == "short" else os.strerror(way)
    with pytest.raises(OffloadError, match=said) as raised:
        kept.step(2)
    assert re.search("rank 1.*what rested before", str(raised.value))
    to_gather = "call all_gather_parameters() again before the next step" in str(raised.value)
    assert to_gather == (stage in (1, 2)) or place in ("early", "late")
    assert {engine.steps_taken for engine in kept.engines} == {2 + to_gather}
    if to_gather:
        found = kept.all(parameters)
        kept.all(zs.Engine.all_gather_parameters)
        for old, now, new in zip(before, found, kept.all(parameters), strict=True):
            assert ((now == old) | (now == new)).all()
    kept.step(*range(2 + to_gather, 4))
    undisturbed = options | {"offload": zs.Offload(*["host"] * 3, delayed_update=delayed)}
    assert kept.masters == masters(ODD, data, policy=BF16, **undisturbed)
    assert {engine.steps_taken for engine in kept.engines} == {4}


@pytest.mark.parametrize("asked", [ON_DISK, zs.Offload("disk", directory=DISK)], ids=str)
def test_a_load_whose_last_write_fails_raises_on_every_rank_and_may_be_made_again(asked, tmp_path):
    kept = Failing(batches(ODD, 2, 1, 3), stage=2, offload=asked)

    def load(engine):
        try:
            return engine.load(tmp_path) and ""
        except OffloadError as error:
            return str(error)

    kept.step(0)
    kept.all(lambda engine: engine.save(tmp_path))
    kept.fail("write", errno.EIO, kept.counted("write", lambda: kept.all(load)))
    assert all(re.search("rank 1: .*Input/output error", said) for said in kept.all(load))
    assert kept.all(load) == ["", ""]
    kept.step(1, 2)
    assert kept.masters == masters(ODD, kept.data, stage=2, policy=BF16, offload=asked)


@pytest.mark.parametrize("delayed", [False, True])
def test_an_update_that_fails_keeps_nothing_of_what_the_host_has_updated_and_may_be_made_again(delayed):
    calls, plan = [], {}
    asked = zs.Offload("disk", directory=DISK, delayed_update=delayed,
                       open_file=partial(FailingFile, calls=calls, plan=plan))

    def program(rank):
        engine = zs.Engine(rank, MODEL, ADAM, policy=BF16, offload=asked)
        for ((pair,),) in batches(MODEL, 1, 1, 2):
            engine.backward(engine.forward(*pair), last=True)
            engine.reduce()
            before = rank.memory.host.now_nbytes_by_kind.get("parameter", 0)
            plan["write"] = (errno.EIO, calls.count("write") + 1)
            assert_refused(engine.update, "Input/output error", OffloadError)
            assert rank.memory.host.now_nbytes_by_kind.get("parameter", 0) == before
            plan.clear()
            engine.update()
        return engine.steps_taken

    assert alone(program) == 2


def test_ctrl_c_before_any_line_of_an_update_on_disk_leaves_what_was_before_or_it_is_said_half_done():
    """Also between two vectors whose drafts take effect: the one has the new values, the other those of before. Every
    other line is struck in an update of one kind, those between them in the other; thorough: all in both."""
    model = MLP((2, 3), seed=1)
    pairs = [pair for ((pair,),) in batches(model, 1, 1, 3)]

    def update(engine, counts, at):
        engine.step(*pairs[0])
        engine.backward(engine.forward(*pairs[1]), last=True)
        engine.reduce()
        with ctrl_c_before(at, "/zerosim/zero/offload", counts):
            engine.update()

    def states(rank, delayed, at=None):
        offload, counts = zs.Offload("disk", directory=DISK, delayed_update=delayed), Counter()
        engine = zs.Engine(rank, model, ADAM, policy=BF16, offload=offload)
        if at is None:
            update(engine, counts, at)
        else:
            with pytest.raises(KeyboardInterrupt):
                update(engine, counts, at)
            engine.abandon()
            try:
                engine.step(*pairs[1])
            except ValueError as error:
                return re.search("update of step 2 was broken off|$", str(error)).group(), counts
            if engine.steps_taken == 3:  # it was over
                return "taken", counts
        return [bits(value) for value in flat_state(engine).values()], counts

    undisturbed = [alone(states, delayed) for delayed in (False, True)]
    for delayed, (expected, counts) in enumerate(undisturbed):
        every, ends = list(counts.items()), set()
        for (name, line), count in chosen([one for one in every if one[0][1] % 2 == delayed], every):
            found, _ = alone(states, bool(delayed), (name, line, 1 + count // 2))
            ends.add(found if isinstance(found, str) else "repeated" if found == expected else (name, line))
        assert ends == {"update of step 2 was broken off", "repeated", "taken"}


def test_files_have_no_names_and_a_directory_that_cannot_hold_them_is_named(tmp_path):
    asked = zs.Offload("disk", directory=tmp_path)
    engine = zs.Cluster(1).run(lambda rank: zs.Engine(rank, MODEL, ADAM, policy=BF16, offload=asked))[0]
    assert (list(tmp_path.iterdir()), engine.steps_taken) == ([], 0)
    with pytest.raises(OffloadError, match=r"No such file .*master.* what rests is what rested before"):
        zs.Cluster(1).run(lambda rank: zs.Engine(rank, MODEL, ADAM, policy=BF16,
                                                 offload=replace(asked, directory=tmp_path / "gone")))


# -- the delayed update -----------------------------------------------------------------------------------------------


def test_a_load_reads_what_a_delayed_update_has_left_one_stretch_after_the_other(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels.NumpyKernels, "STRETCH", 4)

    def program(rank):
        engine = zs.Engine(rank, MODEL, ADAM, policy=BF16, offload=replace(ON_DISK, delayed_update=True))
        engine.save(tmp_path)
        first = len(rank.trace.rows)
        engine.load(tmp_path)
        rows = [row for row in rank.trace.rows[first:] if isinstance(row, Transfer | TransferWait)]
        return [(row, after) for row, after in pairwise(rows) if getattr(row, "direction", "") == "from disk"]

    reads = alone(program)
    assert sum(row.nbytes for row, _ in reads) == 4 * MODEL.parameter_count
    assert max(row.nbytes for row, _ in reads) == 4 * 4
    assert all(isinstance(after, TransferWait) and after.transfer is row for row, after in reads)


@pytest.mark.parametrize(("stage", "mesh"), covering(zs.STAGES, [None, (2, 1)]))
def test_a_delayed_update_computes_each_step_with_the_parameters_of_the_step_before_the_last(stage, mesh, tmp_path):
    """By hand: an engine whose parameters are set, before each step, to the masters of two steps ago, rounded."""
    model, ranks = MODELS["deep"](), 2
    data, policy = batches(model, ranks, 1, 4), zs.Policy("bf16")

    def state(engine):
        return {name: bits(values) for name, values in flat_state(engine).items()}

    def by_hand(rank):
        engine = zs.Engine(rank, model, ADAM, stage=stage, policy=policy, mesh=mesh)
        (group,), casts = engine.param_groups, []
        for step in data:
            casts.append(group.parameter.copy())
            group.parameter[...] = casts[max(0, len(casts) - 2)]
            engine.step(step[rank.index])
        found = state(engine)
        group.parameter[...] = casts[-1]
        return found | {"parameter": state(engine)["parameter"]}

    both = (zs.Offload("host", "host", delayed_update=True), zs.Offload("disk", directory=DISK, delayed_update=True))
    for places in chosen(both[stage % 2:stage % 2 + 1], both):
        whole, first, then, at_once = (Kept(model, data, stage=stage, policy=policy, offload=offload, mesh=mesh)
                                       for offload in (places, places, places, zs.Offload("host", "host")))
        whole.step(*range(4))
        expected = list(zs.Cluster(ranks).run(by_hand))
        assert whole.all(state) == expected
        first.step(0, 1)
        first.all(lambda engine: engine.save(tmp_path))
        then.all(lambda engine: engine.load(tmp_path))
        then.step(2, 3)
        assert then.all(state) == expected, "a checkpoint has what is not published"
        at_once.step(*range(4))
        assert at_once.all(state) != expected


def test_weights_that_are_loaded_take_the_place_of_those_that_a_delayed_update_has_not_brought(tmp_path):
    data = batches(MODEL, 2, 1, 3)

    def program(rank):
        engine = zs.Engine(rank, MODEL, ADAM, stage=3, policy=BF16, offload=zs.Offload("host", delayed_update=True))
        engine.save(tmp_path)
        first = flat_state(engine)["parameter"]
        if rank.index == 0:
            export_weights(tmp_path, tmp_path / "weights.safetensors")
        for step in data[:2]:
            engine.step(step[rank.index])
        engine.load_weights(tmp_path / "weights.safetensors")
        engine.step(data[2][rank.index])
        return bits(flat_state(engine)["parameter"]) == bits(first)

    assert all(zs.Cluster(2).run(program))


def test_a_copy_to_the_host_is_let_arrive_once_however_many_follow_before_it_is_waited_for(monkeypatch):
    """And once more where it is waited for: not before each of the copies that follow."""
    times = []

    def copy_beside(_, source, target):
        number = len(times)
        times.append(0)

        def arrived():
            times[number] += 1

        return arrived

    monkeypatch.setattr(kernels.NullKernels, "copy_beside", copy_beside, raising=False)

    def program(rank):
        engine = zs.Engine(rank, zs.models.GPT("gpt-nano"), ADAM, stage=1, policy=BF16, offload="host")
        tokens = rank.xp.zeros((1, 8), "int64")
        engine.step([(tokens, tokens)] * 3)

    zs.NullCluster(2, representative=0).run(program)
    assert len(times) > 40
    assert set(times) <= {1, 2}
