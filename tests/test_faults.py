"""Each fault that a plan injects is found and named, survived, or makes exactly the difference that it must.

Legend: N ranks, n elements; hop s of a ring's all-reduce, 0 to N-2 adding and N-1 to 2N-3 copying.
"""

import random
import re
import shutil
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zerosim as zs
from tests.cases import covering
from tests.ranks.asking import bits, works
from tests.ranks.programs import every_collective, groups, messages
from tests.support import ask, assert_command_refuses, assert_refused, literally
from tests.zero.training import ADAM, ODD, batches, flat_state
from zerosim.course import training
from zerosim.models import text as texts
from zerosim.numerics import loss_scale
from zerosim.planning import Machine, Network, hardware, record, replay
from zerosim.ranks import trace
from zerosim.zero import CheckpointError

Plan, KINDS, ChecksumError = zs.faults.Plan, zs.faults.KINDS, zs.faults.ChecksumError
ON_THE_WAY = ("bitflip", "repeated", "reordered")
STEPS, RANKS = 4, 3
SKIPS = zs.Policy("bf16", loss_scale=loss_scale.Static(1.0, skips=None))


def arriving(kind: str, sent: np.ndarray, before: np.ndarray | None, bit: int) -> np.ndarray | None:
    """What a message becomes, by its bytes; None where the fault has nothing to change."""
    size, made = sent.dtype.itemsize, bytearray(sent.tobytes())
    if kind == "repeated":
        made = made if before is None or before.nbytes != len(made) else bytearray(before.tobytes())
    elif kind == "reordered":
        half = (len(sent) - len(sent) // 2) * size
        made = made[half:] + made[:half]
    elif kind == "bitflip" and made:
        made[bit // 8] ^= 1 << bit % 8
    elif made and kind != "lost":
        made[:size] = sent.dtype.type(kind).tobytes()
    return None if bytes(made) == sent.tobytes() else np.frombuffer(bytes(made), sent.dtype)


def ring(vectors: list[np.ndarray], kind: str, rank: int, hop: int, bit: int) -> tuple[list[np.ndarray], int | None]:
    """The all-reduce of N vectors (n,) on a ring with a fault in one message, and that message's chunk, if there is a
    byte to change."""
    ranks = len(vectors)
    each = -(-len(vectors[0]) // ranks)
    own = [[x[each * c:each * (c + 1)] for c in range(ranks)] for x in vectors]
    held, before, struck = [list(chunks) for chunks in own], None, None
    for step in range(2 * ranks - 2):
        adds = step < ranks - 1
        moved = [(r, (r - 1 - step) % ranks if adds else (r - step + ranks - 1) % ranks) for r in range(ranks)]
        messages = {r: held[r][c] for r, c in moved}
        for r, c in moved:
            arrived, to = messages[r], (r + 1) % ranks
            if (r, step) == (rank, hop) and (made := arriving(kind, arrived, before, bit)) is not None:
                arrived, struck = made, c
            held[to][c] = arrived + own[to][c] if adds else arrived
        before = messages[rank]
    return [np.concatenate(chunks) for chunks in held], struck


def summed(rank: zs.Rank, vectors: list[np.ndarray]) -> np.ndarray:
    rank.barrier()
    return rank.all_reduce(vectors[rank.index])


def test_a_fault_in_a_ring_changes_what_its_message_reaches_and_nothing_else(record_property) -> None:
    """Against another ring, whose messages are bytes. With checksums the hop is named, but for what a rank computed."""
    @settings(max_examples=2 * settings().max_examples)
    @given(st.integers(2, 5), st.integers(0, 40), st.sampled_from(["float32", "bfloat16", "float64"]),
           st.sampled_from(["nan", "inf", *ON_THE_WAY, "lost"]), st.booleans(), st.data())
    def holds(ranks: int, length: int, dtype: str, kind: str, checksums: bool, data: st.DataObject) -> None:
        rank, hop = data.draw(st.integers(0, ranks - 1)), data.draw(st.integers(0, 2 * ranks - 3))
        bit = data.draw(st.integers(0, 8 * np.dtype(dtype).itemsize - 1))
        vectors = [np.random.default_rng(r).standard_normal(length).astype(dtype) for r in range(ranks)]
        with np.errstate(all="ignore"):
            wanted, chunk = ring(vectors, kind, rank, hop, bit)
        plan = Plan(f"rank={rank},collective=all_reduce,hop={hop},{kind}" + f",bit={bit}" * (kind == "bitflip"))
        cluster = zs.Cluster(ranks, faults=plan, checksums=checksums)
        if chunk is None and kind != "lost":
            assert_refused(lambda: cluster.run(summed, vectors), "the run has ended, and .* never struck",
                           zs.faults.NotStruckError)
            return
        error, said = (zs.DeadlockError, r"(?s)no rank can go on:.*in all_reduce\(") if kind == "lost" else (
            ChecksumError, f"^hop {hop} of all_reduce.* from rank {rank} to rank {(rank + 1) % ranks}, "
                           rf"chunks \[{chunk}\]")
        if found := kind == "lost" or (checksums and kind in ON_THE_WAY):
            with pytest.raises(error, match=said) as raised:
                cluster.run(summed, vectors)
        else:
            assert list(map(bits, cluster.run(summed, vectors))) == list(map(bits, wanted))
        (row,) = (row for row in cluster.trace[rank].rows if isinstance(row, trace.InjectedFault))
        assert [row] == plan.struck
        assert (row.rank, row.hop.step, row.hop.destination) == (rank, hop, (rank + 1) % ranks)
        assert not found or f"injected: {row}" in raised.value.__notes__
        assert works(cluster)
        healthy = [bits(x) for x in zs.Cluster(ranks).run(summed, vectors)]
        assert [bits(x) for x in cluster.run(summed, vectors)] == healthy
        if checksums and kind != "lost":  # that run is whole, and each of its messages was 4 bytes longer
            plain = zs.Cluster(ranks)
            plain.run(summed, vectors)
            assert cluster.trace.sent_nbytes() == [
                mine.sent_nbytes() + 4 * sum(hop.source == r for row in mine.collectives() for hop in row.hops())
                for r, mine in enumerate(plain.trace)]
        record_property(f"faults injected: {kind}", 1)

    holds()


def trained(rank: zs.Rank, stage: int, overlap: bool, data: list, folder=None) -> list[tuple[bool, dict[str, bytes]]]:
    """After each step: whether it was skipped, and all state; the third and fourth are saved."""
    engine = zs.Engine(rank, ODD, ADAM, stage=stage, policy=SKIPS, overlap=overlap)
    seen = []
    for step in range(STEPS):
        result = engine.step(data[step][rank.index])
        if folder and step >= 2:
            try:
                engine.save(folder)
            except CheckpointError as error:
                seen.append((str(error), {}))
        seen.append((result.skipped, {name: bits(array) for name, array in flat_state(engine).items()}))
    return seen


DATA = batches(ODD, RANKS, 1, STEPS)
IN_TRAINING = [kind for kind in KINDS if "nbytes" not in KINDS[kind]]


@pytest.mark.filterwarnings("ignore:a step was skipped on every rank")
def test_a_training_finds_or_survives_every_fault_and_is_whole_again_without_it(record_property) -> None:
    without = [list(zs.Cluster(RANKS).run(trained, stage, False, DATA)) for stage in range(4)]
    for kind, stage, overlap, checksums, rank, step in covering(
            IN_TRAINING, range(4), [False, True], [False, True], range(RANKS), range(1, STEPS + 1), count=12):
        overlap, healthy = overlap and stage > 0, without[stage]
        plan = Plan(f"rank={rank},{kind}" + f",step={step},purpose=gradients" * (kind != "slow"))
        cluster = zs.Cluster(RANKS, faults=plan, checksums=checksums)
        error = {"lost": zs.DeadlockError, "dies": zs.faults.RankDied, **dict.fromkeys(
            ON_THE_WAY if checksums else (), ChecksumError)}.get(kind)
        if error:
            with pytest.raises(error):
                cluster.run(trained, stage, overlap, DATA)
        else:
            found = cluster.run(trained, stage, overlap, DATA)
            ((*skipped,),) = {tuple(skipped for skipped, _ in of_rank) for of_rank in found}  # the same on all ranks
            if kind in ("nan", "inf"):
                assert skipped == [at == step for at in range(1, STEPS + 1)]
                assert all(step == 1 or states[step - 1][1] == states[step - 2][1] for states in found)
            if kind == "slow":
                assert list(found) == healthy
        assert [(row.rank, row.step) for row in plan.struck] == [(rank, 1 if kind == "slow" else step)]
        assert list(cluster.run(trained, stage, overlap, DATA)) == healthy
        record_property(f"faults injected: {kind}", 1)


@pytest.mark.slow
@given(st.sampled_from(IN_TRAINING), st.integers(1, 5), st.sampled_from([None, "message", *map(str, range(40))]),
       st.integers(0, 3), st.booleans(), st.integers(0, 2), st.data())
def test_no_fault_in_any_collective_makes_a_run_hang_or_fail_in_another_way(
        kind: str, ranks: int, collective: str | None, hop: int, checksums: bool, seed: int, data: st.DataObject
) -> None:
    words = [f"rank={data.draw(st.integers(0, ranks - 1))}", kind]
    words += [f"collective={collective}"] * (collective is not None and "collective" in KINDS[kind])
    words += [f"hop={hop}"] * (hop < 3 and "hop" in KINDS[kind])
    cluster = zs.Cluster(ranks, faults=",".join(words), checksums=checksums, seed=seed)
    with np.errstate(all="ignore"), suppress(zs.faults.NotStruckError):
        try:
            cluster.run(lambda rank: (every_collective(rank, "bf16", (0, 1, 24)), messages(rank), groups(rank)))
            assert kind not in ("lost", "dies", *(ON_THE_WAY if checksums else ()))
        except zs.faults.RankDied:
            assert kind == "dies"
        except ChecksumError:
            assert checksums
            assert kind in ON_THE_WAY
        except (zs.DeadlockError, zs.MismatchError) as error:  # who heard another color or key is in another group
            said = "\n".join(error.__notes__)
            assert kind == "lost" or (kind in ON_THE_WAY and not checksums and re.search(r"injected: .*int64\)", said))


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("kind", ["disk_full", "partial_write"])
def test_a_disk_that_fails_is_found_when_it_is_written_or_read_and_a_full_one_leaves_the_old_checkpoint(
        tmp_path, kind: str, rank: int, record_property) -> None:
    healthy = zs.Cluster(RANKS).run(trained, 1, False, DATA, tmp_path / "healthy")
    (shard,) = (tmp_path / "healthy").glob(f"shard-*-rank-{rank:05}-of-*")
    plan, folder = Plan(f"rank={rank},step=4,{kind},nbytes={shard.stat().st_size - 6}"), tmp_path / "failing"
    found = zs.Cluster(RANKS, faults=plan).run(trained, 1, False, DATA, folder)
    assert [of_rank[-1] for of_rank in found] == [of_rank[-1] for of_rank in healthy], "training goes on"

    def loading(of: zs.Rank) -> object:
        engine = zs.Engine(of, ODD, ADAM, stage=1, policy=SKIPS)
        try:
            engine.load(folder)
        except CheckpointError as error:
            return str(error), engine.steps_taken
        return {name: bits(array) for name, array in flat_state(engine).items()}

    loaded = list(zs.Cluster(RANKS).run(loading))
    if kind == "disk_full":
        assert all("No space left on device" in of_rank[3][0] and f"rank {rank}: " in of_rank[3][0]
                   for of_rank in found)
        assert loaded == [of_rank[2][1] for of_rank in healthy]
    else:
        assert all(len(of_rank) == STEPS for of_rank in found), "nobody notices while it is written"
        assert all(f"-rank-{rank:05}-of-" in said and taken == 0 for said, taken in loaded), loaded
    record_property(f"faults injected: {kind}", 1)


@pytest.mark.parametrize(("stage", "more"), [
    (3, {}), (1, {"compute": "fp16", "micro_batches": 2}), pytest.param(0, {}, marks=pytest.mark.slow),
    pytest.param(2, {"offload": "host"}, marks=pytest.mark.slow)])
def test_ranks_go_on_without_those_that_died_with_the_bits_of_a_checkpoint_resharded_by_hand(
        stage: int, more: dict[str, Any], tmp_path) -> None:
    """Two die, one after the other, each in a step or while it saves; what is left goes on as if started by hand."""
    draw, text = random.Random(stage), texts.shipped()
    options = training.Options(model="gpt-nano", ranks=4, steps=6, stage=stage, batch=1, sample_tokens=0, **more)
    deaths = [(draw.randrange(4), draw.randint(3, 4)), (draw.randrange(3), draw.randint(5, 6))]
    plan = Plan(*(f"rank={rank},step={step},dies" for rank, step in deaths))
    elastic = training.train(options, text, checkpoints=training.Checkpoints(str(tmp_path / "a"), 2), faults=plan,
                             max_restarts=2)
    by_hand, resumed = training.Checkpoints(str(tmp_path / "b"), 2), [2 * ((step - 1) // 2) for _, step in deaths]
    for ranks, (first, last) in zip((4, 3, 2), pairwise((0, *resumed, 6)), strict=True):
        if first < last:
            found = training.train(replace(options, ranks=ranks, steps=last), text,
                                   checkpoints=replace(by_hand, resume=first > 0))
    assert (elastic.digest, elastic.losses, elastic.resumed_from) == (found.digest, found.losses, resumed[1])
    assert elastic.happened[:2] == tuple(
        f"rank {rank} of {ranks} died in step {step}; {ranks - 1} go on from the last checkpoint"
        for ranks, (rank, step) in zip((4, 3), deaths, strict=True))
    assert [row.fault for row in plan.struck] == [fault.text for fault in plan.faults]
    assert elastic.happened[2].startswith(f"injected: {plan.faults[0].text}: in step {deaths[0][1]}, ")


def test_what_fewer_ranks_cannot_have_is_refused_with_who_died(tmp_path) -> None:
    options = training.Options(model="gpt-nano", ranks=4, steps=3, stage=3, batch=1, sample_tokens=0)
    saves = training.Checkpoints(str(tmp_path / "a"), 1)
    for said, mesh, *faults in (
            ("a mesh of 2 nodes with 2 ranks each has 4 ranks", "2x2"),
            ("names rank 3, and the ranks are 0 to 2", "none", "rank=3,step=3,dies"),
            ("shard-000001-rank-00000", "none", "rank=0,step=1,partial_write,nbytes=20000")):
        with pytest.raises(ValueError, match=f"^rank 1 of 4 died in step 2; 3 go on from the last .*, but: .*{said}"):
            training.train(replace(options, mesh=mesh), texts.shipped(), checkpoints=saves,
                           faults=Plan(*faults, "rank=1,step=2,dies"), max_restarts=1)
        shutil.rmtree(tmp_path / "a")


def test_a_plan_is_of_one_cluster() -> None:
    plan = Plan("rank=0,bitflip")
    cluster = zs.Cluster(2, faults=plan)
    for _ in range(2):  # a second run goes on with the faults that wait: with none
        cluster.run(lambda rank: rank.all_reduce(np.ones(4)))
    with pytest.raises(ValueError, match="after 1 had struck in another, and each strikes once; make a Plan for each"):
        zs.Cluster(2, faults=plan)


def test_the_command_injects_goes_on_and_says_what_was_found() -> None:
    train = ("train", "--model", "gpt-nano", "--batch", "1", "--steps", "2", "--sample", "0", "--stage", "0", "--fault")
    goes_on = ask(*train, "rank=1,step=2,dies", "--max-restarts", "1", columns=200)
    assert "rank 1 of 4 died in step 2; 3 begin anew, since there is no checkpoint" in goes_on.stdout
    other = ask(*train, "rank=2,step=2,hop=5,purpose=gradients,bitflip,bit=3", columns=200)
    assert "master weights, which differ on ranks [3]" in other.stdout, other.stdout
    assert_command_refuses("without a --fault: ranks of one process die only where", *train[:-1], "--max-restarts", "1")
    found = ask(*train, "rank=0,step=2,bitflip", "--checksums")
    assert (found.exit_code, "what arrived has" in found.stderr, "injected: rank=0" in found.stderr) == (3, True, True)


def test_a_slow_rank_and_link_are_priced_by_the_plan_that_named_them() -> None:
    plan, data = Plan("rank=1,slow,factor=3", "rank=0,to=1,slow,factor=2"), batches(ODD, 2, 1, STEPS)
    cluster = zs.Cluster(2, faults=plan)
    cluster.run(trained, 1, False, data)
    machine = Machine(hardware.device("h100-80"), Network(hardware.link("nvlink4")))
    assert {(slow.rank, slow.to, slow.factor) for slow in machine.slowed_by(plan).slow} == {(1, None, 3), (0, 1, 2)}
    recording = record(cluster.trace)
    assert replay(recording, machine.slowed_by(plan)).step_seconds > replay(recording, machine).step_seconds


@pytest.mark.parametrize(("text", "words"), [
    ("rank=1,bitflop", "no fault is called 'bitflop'; choose one of nan, ...; did you mean 'bitflip'?$"),
    ("rank=1,hp=2,nan", "says 'hp', which nan does not take, or twice; choose one of rank, ...; did you mean 'hop'?$"),
    ("rank=1,rank=2,nan", "says 'rank', which nan does not take, or twice"),
    ("bitflip", "must name one kind of nan, ... and a rank; write it as 'rank=2,step=40,bitflip'$"),
    ("rank=1,nan,hop=-1", "^the fault 'rank=1,nan,hop=-1': hop='-1' must be a whole number, 0 or more$"),
    ("rank=1,collective=all_gathr,nan", "no collective is called 'all_gathr'; ...did you mean 'all_gather'?$"),
    ("rank=1,purpose=gradient,nan", "no purpose 'gradient'; ...did you mean 'gradients'?$"),
    ("rank=4,nan", "^the fault 'rank=4,nan' names rank 4, and the ranks are 0 to 1$"),
    ("rank=1,bit=77,bitflip", "^asked to flip bit 77 of float64, whose bits are 0 to 63; take one of these$")])
def test_what_no_fault_can_be_is_refused(text: str, words: str) -> None:
    assert_refused(lambda: zs.Cluster(2, faults=text).run(lambda rank: rank.all_reduce(np.ones(2))), literally(words))


def test_a_list_of_faults_is_refused() -> None:
    assert_refused(lambda: zs.Cluster(2, faults=["rank=1,nan"]),  # type: ignore[arg-type]
                   r"^asked for the fault \['rank=1,nan'\], which is no text; .*faults\.Plan\(text, text\)$", TypeError)
