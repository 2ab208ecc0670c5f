"""Sharded checkpoints: training that goes on from one, on as many ranks or others, and what may happen to its files.

Where a file was harmed, the error names it, and the tensor where it is one's; and what is there stays as it was.
"""

import errno
import hashlib
import json
import math
import os
import re
import shutil
import stat
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate, cycle, permutations, product
from pathlib import Path

import numpy as np
import pytest

import zerosim as zs
from tests.cases import THOROUGH, chosen, covering
from tests.support import assert_refused, fresh
from tests.zero.drawn import ON_DISK, drawn, made
from tests.zero.training import ADAM, BF16, HUGE, MODELS, ODD, SGD, Kept, alone, batches, bits, finish, flat_state
from zerosim.numerics import loss_scale
from zerosim.zero import CheckpointError

KFAC = zs.optim.KFAC(lr=0.01)
SCALERS = [loss_scale.Dynamic("torch", initial=2.0**8, window=2),
           loss_scale.Dynamic("deepspeed", initial=2.0**8, window=2, hysteresis=2),
           loss_scale.Dynamic("deepspeed-legacy", initial=2.0**8, window=3, hysteresis=3)]


def go_on(engine, data, start, stop, micro_batches):
    """Takes the micro-batches from ``start`` up to ``stop``, counted over all steps; what each of them came to."""
    said = []
    for position in range(start, stop):
        step, j = divmod(position, micro_batches)
        tape = engine.forward(*data[step][engine.rank.index][j])
        said.append(tape.loss)
        engine.backward(tape)
        if j == micro_batches - 1:
            said.append(str(finish(engine)))
    return said


def everything(engine):
    """All that this rank holds between steps, as bits, and its counts."""
    held = {f"{kind} {index}": getattr(group, kind) for index, group in enumerate(engine.param_groups)
            for kind in ("parameter", "master")}
    held |= {str(key): slot for group in engine.param_groups for key, slot in group.own_slots.items()}
    own = {name: bits(engine.store.saved(array)) for name, array in held.items()}
    return own | {"taken": engine.steps_taken, "scale": engine.loss_scale.state()}


def interrupted(path, model, data, micro_batches, cut, place, **options):
    """The ends of a run, and of the same saved at a position and gone on with by new ranks, whose state rests in
    another place; the reports of loads."""
    last, ranks = len(data) * micro_batches, len(data[0])

    def whole(rank):
        engine = zs.Engine(rank, model, **options)
        before = go_on(engine, data, 0, cut, micro_batches)
        engine.save(path, {"position": len(before)})
        return go_on(engine, data, cut, last, micro_batches), everything(engine)

    def rest(rank):
        engine = zs.Engine(rank, model, **options | {"offload": place})
        engine.backward(engine.forward(*data[0][rank.index][0]))
        engine.reduce()
        engine.update()  # which is forgotten, before the all-gather
        report = engine.load(path)
        return (go_on(engine, data, cut, last, micro_batches), everything(engine)), report

    saved = list(zs.Cluster(ranks).run(whole))
    found = list(zs.Cluster(ranks).run(rest))
    return saved, [one for one, _ in found], [report for _, report in found]


DRAWN = 7 if THOROUGH else 5


def cases():
    """Drawn from all that an engine can be given, each saved at some micro-batch; then what is rare by chance."""
    for index, case in enumerate(drawn(DRAWN)):
        model, data, options = made(case)
        stage, run = options["runs"][index % len(options["runs"])]
        yield model, data, len(data[0][0]), {key: options[key] for key in (
            "optimizer", "layout", "clip_norm", "seed", "groups", "policy", "gather", "mesh")} | run | {"stage": stage}
    for stage, scaler in enumerate(SCALERS):
        model = ODD
        data = batches(model, 3, 2, 6)
        data[1][stage][1] = HUGE
        yield model, data, 2, {"optimizer": ADAM, "stage": stage, "policy": zs.Policy("fp16", loss_scale=scaler)}
    for stage, layout in chosen([(3, "whole_matrices"), (2, "per_unit")],
                                product(zs.STAGES, ["whole_matrices", "per_unit"])):
        model = MODELS["untied"]()
        yield model, batches(model, 2, 2, 2), 2, {
            "optimizer": KFAC, "stage": stage, "layout": layout, "gather": layout == "per_unit", "schedule":
            zs.optim.Warmup(5), "groups": [zs.Group("*ln*", "*bias", "w?e", optimizer=ADAM)]}
    model = MODELS["dropout"]()
    yield model, batches(model, 2, 3, 2), 3, {"optimizer": ADAM, "stage": 3, "policy": BF16, "overlap": True}
    model = MODELS["tied"]()
    yield model, batches(model, 4, 2, 4), 2, {
        "optimizer": ADAM, "stage": 3, "policy": BF16, "mesh": (2, 2), "zeropp": "hpz+qwz+qgz", "offload": ON_DISK}


CASES = list(cases())


@pytest.mark.parametrize("number", range(len(CASES)))
def test_training_goes_on_from_any_micro_batch_in_any_place_as_if_it_had_never_been_interrupted(tmp_path, number):
    model, data, micro_batches, options = CASES[number]
    last = len(data) * micro_batches
    cut = 1 + number % (last - 1) if number < DRAWN else last // 2 + 1
    place = (None, ON_DISK, "host")[number % 3]
    saved, found, reports = interrupted(tmp_path, model, data, micro_batches, cut, place, **options)
    assert_is_whole(tmp_path, len(data[0]))
    assert found == saved
    assert all(report.differences == () for report in reports)
    assert all(report.progress["position"] == cut + cut // micro_batches for report in reports)


WORLDS = (1, 2, 3, 4, 5, 8)


def test_from_any_number_of_ranks_to_any_other_and_back_no_bit_changes(tmp_path):
    """In any stage, layout and compute format on the way. Each number once here and once there; thorough: all pairs."""
    axes = ((0, 1, 2, 3), (0, 1, 2, 3), ("per_unit", "contiguous", "whole_matrices"),
            ("fp32", "fp16", "bf16"), (ADAM, zs.optim.SOAP(), zs.optim.Adafactor(), SGD))
    pairs = chosen(zip(WORLDS, (*WORLDS[2:], *WORLDS[:2]), strict=True), permutations(WORLDS, 2))
    model, ways = MODELS["wide"](), covering(*axes, count=len(pairs))
    for (there, back), (stage, other, layout, compute, optimizer) in zip(pairs, ways, strict=False):
        options = {"optimizer": optimizer, "layout": layout, "gather": True}

        def first(rank, options=options, stage=stage, there=there):
            engine = zs.Engine(rank, model, stage=stage, policy=BF16, **options)
            engine.step(batches(model, there, 1, 1)[0][rank.index])
            engine.save(tmp_path / "a")
            return flat_state(engine) | engine.state_dict()

        def between(rank, options=options, other=other, compute=compute):
            engine = zs.Engine(rank, model, stage=other, policy=zs.Policy(compute), **options | {"layout": "per_unit"})
            report = engine.load(tmp_path / "a")
            engine.save(tmp_path / "b")
            return report

        def last(rank, options=options, stage=stage):
            engine = zs.Engine(rank, model, stage=stage, policy=BF16, **options)
            engine.load(tmp_path / "b")
            return flat_state(engine) | engine.state_dict()

        before, way, after = (list(zs.Cluster(ranks).run(program)) for ranks, program in (
            (there, first), (back, between), (there, last)))
        assert_is_whole(tmp_path / "a", there)
        assert_is_whole(tmp_path / "b", back)
        for one, same in zip(before, after, strict=True):
            differ = [key for key in {**one, **same} if bits(one[key]) != bits(same[key])]
            assert differ == [], (there, back, stage, other, layout, compute, optimizer)
        assert any(line.startswith("ranks: saved with") for line in way[0].differences)


def assert_is_whole(folder, ranks):
    """A file for each rank and the index are there, nothing else, and all elements of each tensor lie in some file."""
    assert len(os.listdir(folder)) == ranks + 1
    for tensor in json.loads((folder / "index.json").read_text())["checkpoint"]["tensors"].values():
        places = sorted((piece["start"], piece["count"]) for piece in tensor["pieces"])
        assert [start for start, _ in places] == [0, *accumulate(count for _, count in places[:-1])]
        assert sum(count for _, count in places) == math.prod(tensor["shape"])


def test_no_rank_holds_or_sends_more_than_a_block_and_names_for_a_checkpoint(tmp_path):
    """Of a model of 3 MB, on four ranks; three take of four ranks' files what they need."""
    model = zs.models.MLP((512, 512, 512, 512), seed=1)

    def program(rank):
        engine = zs.Engine(rank, model, ADAM, stage=3)
        at_rest = rank.memory.now_nbytes
        rank.memory.reset_peak()
        engine.save(tmp_path)
        engine.load(tmp_path)
        return at_rest, rank.memory.peak_nbytes, engine

    cluster = zs.Cluster(4)
    found = cluster.run(program)
    for at_rest, peak, _ in found:
        assert at_rest < peak <= at_rest + 2**18 + 2**12
    assert all(sum(cluster.trace.sent_nbytes(purpose)) == 0 for purpose in ("parameters", "gradients", "state"))
    counts, checksum, number = 6 * 8, 64, 8  # said to each of the others; the files' number is handed on twice at most
    assert max(cluster.trace.sent_nbytes("control")) <= 3 * (counts + checksum) + 2 * number

    def other(rank):
        engine = zs.Engine(rank, model, ADAM, stage=3)
        return engine.load(tmp_path).nbytes_read, 12 * engine.layout.shard_length(rank.index)

    for read, needed in zs.Cluster(3).run(other):
        assert read == needed


def test_state_dict_is_what_this_rank_owns_as_views():
    def program(rank):
        engine = zs.Engine(rank, ODD, ADAM, stage=1)
        return {name: array.size for name, array in engine.state_dict().items()}

    found = zs.Cluster(3).run(program)
    for name, shape in ODD.shapes.items():
        for kind in ("master", "optimizer.m", "optimizer.v"):
            assert sum(of_rank.get(f"{kind}/{name}", 0) for of_rank in found) == math.prod(shape)

    def changed(rank):
        engine = zs.Engine(rank, ODD, ADAM)
        engine.state_dict()["master/layer0.weight"][...] = 5
        return engine.state("layer0.weight")["parameter"]

    assert (alone(changed) == 5).all()


# -- harm -------------------------------------------------------------------------------------------------------------


def program(rank, action, arguments=(), steps=1, **options):
    """An engine after some steps, what an action on it raised, its state before and after, and a step from there."""
    engine = zs.Engine(rank, ODD, options.pop("optimizer", ADAM), **{"stage": 3, "policy": BF16} | options)
    data = batches(ODD, rank.size, 2, 3, seed=5)
    for step in range(steps):
        engine.step(data[step][rank.index])
    before, text = everything(engine), None
    try:
        action(engine, *arguments)
    except CheckpointError as error:
        text = str(error)
    return text, before, everything(engine), engine.step(data[2][rank.index])


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A checkpoint of ODD on two ranks after two steps, to be copied and harmed."""
    folder = tmp_path_factory.mktemp("good")
    zs.Cluster(2).run(partial(program, action=zs.Engine.save, arguments=[folder], steps=2))
    return folder


def loaded(folder, ranks=2, **options):
    return list(zs.Cluster(ranks).run(partial(program, action=zs.Engine.load, arguments=[folder], **options)))


def assert_refused_by_all(results, words):
    """Every rank has raised an error with these words, and has kept its state, with which it trains on."""
    for index, (text, before, after, step) in enumerate(results):
        assert text is not None, f"nothing was raised where this was expected: {words}"
        assert re.search(words, text), text
        assert after == before
        assert str(step) == undisturbed(len(results))[index]


@cache
def undisturbed(ranks):
    """What each rank's step comes to where nothing was tried before."""
    return [str(step) for *_, step in zs.Cluster(ranks).run(program, lambda engine: None)]


def files_of(folder):
    return sorted(file for file in folder.iterdir() if file.suffix == ".safetensors")


def test_files_that_are_cut_off_missing_foreign_or_newer_are_refused_by_name(tmp_path, good):
    """And the checkpoint beside them loads after that, into the same engines."""
    index, (_, shard) = json.loads((good / "index.json").read_text()), files_of(good)
    content = shard.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    newer = {**index, "checkpoint": {**index["checkpoint"], "version": 2}}
    elsewhere = {**index, "checkpoint": {**index["checkpoint"], "format": "another format"}}
    other, lost = ({**index["checkpoint"], **change} for change in ({"number": 2}, {"tensors": {
        **index["checkpoint"]["tensors"], "master/layer0.bias": {"shape": [5], "dtype": "F32", "pieces": []}}}))
    signed = {"checkpoint": lost, "sha256": hashlib.sha256(json.dumps(lost, sort_keys=True).encode()).hexdigest()}
    harms = [(shard.name, content[:length], rf"{shard.name}.* was cut off") for length in (0, 7, 8, header - 1)]
    harms += [(shard.name, content[:header + 3], rf"{shard.name} was cut off .*inside the tensor master/layer0.weight"),
              (shard.name, content[:-1], rf"{shard.name} was cut off .*inside the tensor optimizer.v/layer1.bias"),
              (shard.name, content + b"x", rf"{shard.name} has .* bytes, and its tensors end at"),
              (shard.name, None, rf"{shard.name} is missing, which .*index.json names"),
              (shard.name, b"PK\3\4" + content[4:], rf"{shard.name} is no safetensors file"),
              (shard.name, files_of(good)[0].read_bytes(), rf"{shard.name} is not the file that .* names"),
              ("index.json", None, "holds no checkpoint"),
              ("index.json", b"", "index.json is of no zerosim checkpoint"),
              ("index.json", b'{"weight_map": {}}', "index.json is of no zerosim checkpoint"),
              ("index.json", (good / "index.json").read_bytes()[:-9], "index.json is damaged"),
              ("index.json", b"[" * 100_000, "index.json is of no zerosim checkpoint"),
              ("index.json", json.dumps({"checkpoint": index["checkpoint"]}).encode(), "damaged .KeyError: 'sha256'"),
              ("index.json", json.dumps(elsewhere).encode(), "format 'another format'"),
              ("index.json", json.dumps({**index, "checkpoint": other}).encode(), "its content has not the checksum"),
              ("index.json", json.dumps(signed).encode(), "names no file for .* of the tensor master/layer0.bias"),
              ("index.json", json.dumps(newer).encode(), "version 2, and this zerosim reads versions up to 1")]
    for ranks, (name, harmed, words) in zip(cycle((2, 3)), harms, strict=False):
        folder = tmp_path / "c"
        shutil.copytree(good, folder, dirs_exist_ok=True)
        (folder / name).unlink() if harmed is None else (folder / name).write_bytes(harmed)
        assert_refused_by_all(loaded(folder, ranks), words)
    text, before, after, _ = loaded(good, 3)[0]
    assert text is None
    assert after != before


def test_a_checkpoint_of_other_parameters_or_optimizer_state_is_refused_by_their_names(good):
    def other(model, optimizer=ADAM, **options):
        return alone(lambda rank: zs.Engine(rank, model, optimizer, **options).load(good))

    assert_refused(lambda: other(ODD, SGD), r"layer0.weight has the slots \['m', 'v'\] there \(Adam.*\[\] here \(SGD")
    assert_refused(lambda: other(ODD, groups=[zs.Group("*.bias", frozen=True)]), "layer0.bias has the slots")
    assert_refused(lambda: other(zs.models.MLP((3, 5, 3))), r"layer1.weight has the shape \[5, 2\]", CheckpointError)
    assert_refused(lambda: other(zs.models.MLP((3, 5, 2, 1))), "the checkpoint has no parameter layer2.weight")
    assert_refused(lambda: other(zs.models.MLP((3, 5))), "this model has no parameter layer1.weight")


def test_what_is_different_where_a_checkpoint_is_loaded_is_said(tmp_path, good):
    def report(rank, **options):
        options = {"model": ODD, "optimizer": ADAM, "stage": 3, "policy": BF16} | options
        return zs.Engine(rank, **options).load(good).differences

    for ranks, options, words in [
        (2, {}, []), (3, {}, ["ranks: saved with 2, here 3"]), (2, {"stage": 1}, ["stage: "]),
        (2, {"recompute": "selective"}, []),
        (2, {"recompute": "tiled"}, ["attention: saved with by whole rows, here tiled"]),
        (2, {"layout": "contiguous"}, ["layout: saved with per_unit"]),
        (2, {"policy": zs.Policy("bf16", reduce="fp32")}, ["formats: "]), (2, {"seed": 3}, ["seed: "]),
        (2, {"policy": zs.Policy("bf16", master_from="compute")}, []),
        (2, {"clip_norm": 1.0}, ["clip_norm: saved with None, here 1.0"]),
        (2, {"schedule": zs.optim.Warmup(10)}, [
            "schedule: saved with None, here Warmup(steps=10), of which the next is 0.3"]),
        (2, {"schedule": {1: 1.0}.__getitem__}, ["schedule: saved with None, here KeyError"]),
        (2, {"model": zs.models.MLP((3, 5, 2), activation="gelu", seed=7)}, []),
        (2, {"model": zs.models.MLP((3, 5, 2), activation="relu")}, ["model: saved with MLP"]),
        (2, {"optimizer": replace(ADAM, lr=0.5)}, ["optimizer of 4 parameters, as layer0.weight: saved"]),
        (2, {"groups": [zs.Group("layer0.bias", lr=0.5)]}, ["optimizer of 1 parameters, as layer0.bias: saved"]),
        (2, {"policy": zs.Policy("bf16", loss_scale=2.0)}, ["formats: ", "loss scale: saved with 1.0, and begins"]),
    ]:
        for found in zs.Cluster(ranks).run(partial(report, **options)):
            assert len(found) == len(words), found
            assert all(line.startswith(word) for line, word in zip(found, words, strict=True)), found
    llamas = [zs.models.Llama(replace(zs.models.llama.PRESETS["llama-nano"], base=base)) for base in (1e4, 100.0)]
    alone(lambda rank: zs.Engine(rank, llamas[0], ADAM).save(tmp_path))
    found = alone(lambda rank: zs.Engine(rank, llamas[1], ADAM).load(tmp_path).differences)
    assert "base=10000.0" in found[0]
    assert "base=100.0" in found[0]


@pytest.mark.parametrize(("harm", "words", "number"), [
    ("no folder reaches the disk", r"rank 0: .*shard-000002-rank-00000-of-00002.safetensors: .*error", 1),
    ("rank 1's file vanishes", "rank 0 does not find .*-rank-00001-of-00002.safetensors, which rank 1 has written", 1),
    ("the index is in its place, and does not reach the disk", "rank 0: .*index.json: .*error", 2),
    ("a folder lies where the index is written", "rank 0: .*index.json: Is a directory", 1),
    ("the disk is full", "^rank 1: /.*shard-000002-rank-00001-of-00002.safetensors: File too large, in the tensor "
                         "optimizer.v/layer0.bias$", 1)])
def test_a_save_that_fails_at_the_disk_is_said_by_every_rank_and_leaves_the_files_of_one_whole_checkpoint(
        tmp_path, good, monkeypatch, harm, words, number):
    """A disk that is full shows as a limit on files' sizes does: the write fails after some bytes."""
    folder, real = tmp_path / "c", os.fsync
    shutil.copytree(good, folder)
    before, names = (folder / "index.json").stat(), sorted(os.listdir(folder))
    (folder / "shard-000007-rank-00000-of-00002.safetensors").touch()  # of a save whose index could not be written
    (folder / ".shard-000008-rank-00000-of-00002.safetensors.123.unfinished").touch()  # of a run that was killed
    (folder / ".index.json.123.unfinished").touch()

    def fsync(handle):
        real(handle)
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            if "vanishes" in harm:
                (folder / "shard-000002-rank-00001-of-00002.safetensors").unlink(missing_ok=True)
            elif "no folder" in harm or ("index is in" in harm and not os.path.samestat(
                    before, (folder / "index.json").stat())):
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    def save(engine):
        if "full" not in harm:
            return engine.save(folder)
        resource = pytest.importorskip("resource", reason="this system has no limits")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        size = files_of(good)[1].stat().st_size - 58 if engine.rank.index == 1 else soft
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            engine.save(folder)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    in_the_way = folder / f".index.json.{os.getpid()}.unfinished"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        if "a folder lies" in harm:
            in_the_way.mkdir()
        found = zs.Cluster(2).run(program, save)
        assert_refused_by_all(found, words)
        assert len({text for text, *_ in found}) == 1
        in_the_way.rmdir() if in_the_way.exists() else None
    assert json.loads((folder / "index.json").read_text())["checkpoint"]["number"] == number
    assert sorted(os.listdir(folder)) == names or number == 2
    assert {file.name.split("-")[1] for file in files_of(folder)} <= {"000001", f"{number:06}"}
    assert loaded(folder)[0][0] is None


def test_a_save_into_what_is_no_folder_of_a_checkpoint_is_refused_by_every_rank(tmp_path):
    (tmp_path / "file").write_text("a file")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "index.json").write_text("{}")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    onto = "rank 0: .*/file is a file, and a checkpoint is a folder of files; name another folder, or move the file"
    for place, words in [(tmp_path / "file", onto), (tmp_path / "file" / "x", onto),
                         (tmp_path / "foreign", "foreign/index.json is of no zerosim checkpoint")] + [
                             (closed, "Permission denied")] * (os.geteuid() != 0):
        assert_refused_by_all(zs.Cluster(2).run(program, zs.Engine.save, [place]), words)


def test_a_file_that_fails_when_it_is_read_again_stops_the_engine_until_a_load_succeeds(tmp_path, good):
    folder, file = tmp_path / "c", files_of(good)[0].name
    shutil.copytree(good, folder)

    kept, undisturbed = (Kept(ODD, batches(ODD, 2, 1, 1, seed=5), stage=3, policy=BF16) for _ in range(2))

    def disturb(engine):
        def abandon():  # between the check and what follows it
            zs.Engine.abandon(engine)
            (folder / file).write_bytes((good / file).read_bytes()[:-1])

        engine.abandon = abandon
        assert_refused(lambda: engine.load(folder), f"{file} was cut off inside the tensor", CheckpointError)
        assert_refused(lambda: engine.step(kept.data[0][engine.rank.index]), "the load of .* was broken off, and some")

    kept.all(disturb)
    for engines in (kept, undisturbed):
        engines.all(lambda engine: engine.load(good))
    assert list(map(str, kept.step(0))) == list(map(str, undisturbed.step(0)))


def test_what_is_under_way_is_refused(tmp_path):
    """And a step under way that was saved goes on where it was, and nowhere else."""
    x, target = batches(ODD, 1, 1, 1)[0][0][0]

    def refused(words, *actions, **options):
        def run(rank):
            engine = zs.Engine(rank, ODD, ADAM, **{"stage": 1} | options)
            for action in actions[:-1]:
                action(engine)
            assert_refused(lambda: actions[-1](engine), words)
        alone(run)

    def back(engine, last=False):
        engine.backward(engine.forward(x, target), last=last)

    def save(engine):
        engine.save(tmp_path / "c")

    def inside(engine):
        with engine.weights(ODD.units[0]):
            engine.load(tmp_path / "c")

    refused("between reduce\\(\\) and update\\(\\)", back, zs.Engine.reduce, save)
    refused("after the step's last backward", lambda engine: back(engine, last=True), save)
    refused("shards the other ranks have not yet", back, zs.Engine.reduce, zs.Engine.update, save)
    for progress in ({"x": np.zeros(2)}, {1: 2}, float("nan")):
        refused("progress=.*come back from JSON", lambda engine, it=progress: engine.save(tmp_path / "c", it))
    refused("None is no path", lambda engine: engine.save(None))
    for path in ("c\0", ""):
        for call in (zs.Engine.save, zs.Engine.load, zs.Engine.load_weights):
            refused("is no path; name a folder or a file", lambda engine, call=call, path=path: call(engine, path))
    refused("loaded inside a block", back, save, inside)
    refused("in the middle of a step, after 1 micro-batches, whose gradients are those of stage",
            lambda engine: engine.load(tmp_path / "c"), stage=2)
    assert_refused(lambda: zs.NullCluster(2).run(lambda rank: save(zs.Engine(rank, ODD, ADAM))), "types alone")
    assert_refused(lambda: zs.Cluster(2).run(lambda rank: zs.Engine(rank, ODD, ADAM).save(tmp_path / str(rank.index))),
                   "save to .*0' .*save to .*1'", zs.MismatchError)
    assert_refused(lambda: zs.Cluster(4).run(lambda rank: zs.Engine(
        rank.split(rank.index // 2), ODD, ADAM).save(tmp_path / "c")), "another group of this one", CheckpointError)


class OwnDisk(os.PathLike):
    """A folder of the same name on the disk of each rank."""

    def __init__(self, folder):
        self.folder = folder

    def __fspath__(self):
        return str(self.folder)

    def __str__(self):
        return "/local/c"


def test_ranks_that_find_different_checkpoints_under_one_name_are_stopped(tmp_path):
    for name in "ab":
        zs.Cluster(2).run(partial(program, action=zs.Engine.save, arguments=[tmp_path / name], seed=ord(name)))
    found = zs.Cluster(2).run(lambda rank: program(rank, zs.Engine.load, [OwnDisk(tmp_path / "ab"[rank.index])]))
    assert_refused_by_all(found, "rank 1 finds another checkpoint in .* than rank 0")


# -- killed -----------------------------------------------------------------------------------------------------------

KILLED = Path(__file__).with_name("killed.py")
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@forks
def test_killed_at_random_moments_of_a_saving_run_it_goes_on_from_the_last_whole_checkpoint(tmp_path):
    assert "5 times killed" in fresh(str(KILLED), str(tmp_path), "5", "1")


@pytest.mark.slow
@forks
def test_killed_at_many_random_moments_it_goes_on_and_some_kills_leave_unfinished_files(tmp_path, record_property):
    said = fresh(str(KILLED), str(tmp_path), "200", "2")
    for what, count in zip(("saving runs killed", "unfinished files they left", "steps they took"),
                           re.findall(r"\d+", said), strict=True):
        record_property(what, int(count))
    assert "200 times killed" in said
    assert " 0 left unfinished files" not in said
