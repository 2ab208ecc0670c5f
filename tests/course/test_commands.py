"""The commands that teach, train and predict, as one types them: what each prints, that every switch changes what comes
out, and that wrong input is one line."""

import json
import re
from functools import cache, partial

import pytest
from rich.console import Console

import zerosim as zs
from tests.support import ask, assert_command_refuses, broken_lines, command_line
from zerosim.course import lost_updates, plan_view, precision, training
from zerosim.display import drawing

TINY = ("--model", "gpt-nano", "--steps", "2", "--ranks", "2", "--batch", "2")
RING = ("--nbytes", "14e9", "--ranks", "8", "--link", "nvlink4")
ASKED = {  # the least that one asks of each command
    "replay": ("--stage", "3"), "lost-updates": ("--steps", "3"),
    "precision": ("--model", "gpt-nano", "--steps", "1", "--format", "bf16"),
    "train": (*TINY, "--sample", "2"), "compare": (*TINY, "--values", "0,3"), "cost": RING,
    "plan": ("--model", "gpt2", "--stage", "2,3", "--runtime", "zerosim"),
    "tune": ("--model", "gpt2", "--global-batch", "16", "--stage", "2", "--recompute", "none", "--batch", "2",
             "--offload", "none", "--runtime", "zerosim")}
# Of what was asked, the answers of the commands without a "question" or "options" say these again.
SAID_AGAIN = {"ranks", "format", "layout", "recompute", "device", "compute", "overlap", "prefetch", "collective",
              "algorithm", "nodes", "nbytes", "itemsize", "link", "between", "global_batch", "tokens"}
FIRST_WORDS = {
    "replay": "The worked example: 4 weights on 2 ranks", "lost-updates": "Lost updates: a small number",
    "precision": "Mixed precision: what goes wrong in 16 bits", "train": "gpt-nano on moby_dick: 6,960 parameters",
    "compare": "gpt-nano on moby_dick, 2 ranks, 2 steps, by stage",
    "cost": "all_reduce by ring, 14,000,000,000 bytes, 8 ranks",
    "plan": "ZeRO-3 without recomputation is the fastest that fits with a margin",
    "tune": "ZeRO-2 without recomputation in 1 micro-batch of 2 sequences: "}


@pytest.fixture(autouse=True, scope="module")
def nothing_takes_long():
    """What no switch changes is done in fewer steps than a reader is shown."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lost_updates, "MOMENT_STEPS", (1, 2, 3))
        patch.setattr(precision, "trials", lambda fmt, trials=precision.trials: trials(fmt, 2))
        for question in ("fewest_ranks", "largest_batch", "largest_model", "largest_sequence"):  # the same plan's once
            patch.setattr(plan_view.questions, question, cache(getattr(plan_view.questions, question)))
        yield


@cache
def data_of(command, *switches):
    """What comes out as JSON, without what was asked."""
    done = ask(command, *ASKED[command], *switches, "--json")
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    data = json.loads(done.stdout, parse_constant=lambda number: pytest.fail(f"JSON has no {number}"))
    for asked in (data, *data.get("runs", {}).values()):
        for name in ("question", "options"):
            asked.pop(name, None)
    return data


def words_of(command, *switches):
    """What is printed, with single spaces."""
    done = ask(command, *switches)
    assert done.exit_code == 0, done.output
    return " ".join(done.stdout.split())


@pytest.mark.parametrize("command", ASKED)
def test_text_is_printed_unless_json_is_asked_for_and_fits_80_columns(command):
    done = ask(command, *ASKED[command])
    assert (done.exit_code, done.stderr) == (0, "")  # no bar in a pipe either
    assert done.stdout.startswith(FIRST_WORDS[command])
    assert broken_lines(done.stdout) == []


def test_help_explains_every_switch_of_every_command():
    for name, command in command_line().commands.items():
        unexplained = [option.name for option in command.params if not option.help and not option.hidden]
        assert unexplained == [], name
        words = " ".join(ask(name, "--help", columns=200).output.split())
        assert [option.opts[0] for option in command.params if option.param_type_name == "option"
                and option.opts[0] not in words and not option.hidden] == [], name


@pytest.mark.parametrize(("command", "switches"), [
    ("replay", ["--weights 1,1,1,1", "--data 1,1:2;2,2:9", "--lr 0.01", "--ranks 3", "--compute bf16",
                "--recompute block", "--layout contiguous", "--stage 2", "--steps 3", "--optimizer sgd",
                "--published"]),
    ("lost-updates", ["--format bf16", "--weight 0.1", "--update 3e-4", "--steps 4"]),
    ("train", ["--stage 1", "--compute fp32", "--compute fp8", "--optimizer sgd", "--lr 0.1", "--micro-batches 2",
               "--batch 3", "--recompute segment(2)", "--layout contiguous", "--seed 1", "--ranks 3", "--loss-scale 8",
               "--sample 3", "--stage 2 --reduction micro_batch", "--steps 3", "--offload host", "--offload disk",
               "--offload optimizer=host+gradients=host",
               "--mesh 2x1",
               "--mesh 2x1 --zeropp qwz"]),
    ("cost", ["--nbytes 14000000008", "--ranks 4", "--link pcie5", "--collective all_gather", "--algorithm tree",
              "--nodes 2", "--nbytes 72 --itemsize 8", "--nodes 2 --algorithm hierarchical(4)",
              "--nodes 2 --between ethernet-100g"]),
    ("plan", ["--ranks 16", "--device b200", "--link pcie5", "--nodes 2", "--stage 3", "--recompute tiled",
              "--attention unfused",
              "--batch 3", "--sequence 512", "--micro-batches 4", "--compute fp32", "--optimizer lion",
              "--convention megatron-bf16", "--utilization 0.4", "--no-overlap", "--prefetch 2",
              "--offload optimizer=host", "--offload host", "--offload disk", "--offload disk --disk-link ethernet-10g",
              "--offload host --host-capacity 1GB", "--offload disk --disk-capacity 1MB", "--reduction micro_batch",
              "--mesh 2x4", "--mesh 2x4 --stage 3 --zeropp hpz", "--runtime fsdp2", "--margin 0.2", "--global-batch 64",
              "--tokens 1B", "--tokens 1B --price 2"]),
    ("tune", ["--global-batch 32", "--ranks 4", "--device b200", "--link pcie5", "--nodes 2 --between ethernet-100g",
              "--stage 3", "--recompute block", "--attention unfused", "--batch 1", "--sequence 512", "--compute fp32",
              "--optimizer lion",
              "--utilization 0.4", "--no-overlap", "--stage 3 --prefetch 2", "--runtime fsdp2", "--margin 0.2",
              "--tokens 1B", "--tokens 1B --price 2",
              "--offload host --host-link pcie3", "--offload disk --disk-link ethernet-10g",
              "--reduction micro_batch"])])
def test_every_switch_changes_what_comes_out(command, switches):
    """The last one of several, beside the others."""
    said = partial(data_of, command, *["--steps", "1"] * (command == "train"))
    for switch in switches:
        plain, changed = said(*switch.split()[:-2]), said(*switch.split())
        assert changed.keys() == plain.keys(), switch
        assert any(changed[key] != plain[key] for key in changed.keys() - SAID_AGAIN), switch


def test_every_switch_of_the_lesson_on_precision_is_what_it_is_asked(tmp_path, monkeypatch):
    text, question = tmp_path / "mine.txt", {"format": "fp8_e5m2", "model": "gpt-nano", "steps": 2}
    text.write_text("abc " * 200, encoding="utf-8")
    monkeypatch.setattr(precision, "rested", lambda policy, steps: (policy.compute, steps))
    switches = [f"--{name}={value}" for name, value in question.items()]
    data = json.loads(ask("precision", *switches, "--text", str(text), "--json").stdout)
    assert (data["question"], data["underflows"]["text"]) == (question, "mine.txt")


SAID = {  # of each command: switches, and what stands among the words
    "replay": [
        ("--stage 1 --hops", ["hop 0, 0 → 1"]), ("", ["are the same in every stage, bit for bit"]),
        ("--full", ["What happens in step 2"]),
        ("--published", ["10.125", "gradients -11, -5.5", "rank 0 has 2.099609375, -2.900390625, 1, 0.5",
                         "gradients: 8, 8 bytes", "16, 12 bytes"]),
        ("--mistakes", ["the sum is not divided by N"]),
        ("--data 1,3:5;2,1:7;0,1:2", ["4 weights on 3 ranks"])],
    "train": [
        (" ".join((*TINY, "--ranks 1 --optimizer Muon --sample 2")), [
            "ZeRO-3 on 1 rank, layout whole_matrices, bf16, muon (lr 0.05; vectors and embeddings by adamw)",
            "entropy of single bytes 3.0943 4.464", "optimizer state", "gradients", "It writes: Call me ",
            "Steps: 2, of 16 tokens each; skipped: 0; loss scale at the end: 1.",
            "SHA-256 of all master weights, the same on every rank: "]),
        (" ".join((*TINY, "--compute fp8")), ["an experiment: bf16 with matrix products of fp8"])],
    "cost": [
        ("--nbytes 25e6 --ranks 12 --nodes 3 --link nvlink4", [
            "inside each of 3 nodes over nvlink4: 450 GB/s one way",
            "between them over infiniband-ndr: 50 GB/s one way, 14 µs a message",
            "sent by a rank, at least 45,833,332 bytes sent by a rank, at most 45,833,340 bytes",
            "That wall is N·α·β of infiniband-ndr: 25 MB meet it on 35 ranks."]),
        ("--nbytes 0 --ranks 8 --link pcie3 --collective barrier", ["It carries no bytes, so all of its time is lat"]),
        ("--nbytes 5 --ranks 1 --link pcie3", ["One rank sends nothing, by any algorithm."]),
        ("--nbytes 5 --ranks 2 --link pcie3", ["rabenseifner 2 5 bytes 11.4 µs as fast"]),
        ("--nbytes 6 --ranks 6 --link pcie3 --collective reduce_scatter", [
            "halving needs a power of two of ranks, which 6 is not."])],
    "plan": [
        ("--runtime zerosim --model gpt2 --ranks 4 --stage 2,3 --recompute block --explain --measure", [
            "ZeRO-3 is the fastest that fits with a margin", "4 ranks of h100-80 (85.03 GB) over nvlink4", "2 block",
            "3 block",
            "Fewest ranks", "Largest micro-batch",
            "model states (zerosim)", "estimated", "those of zerosim's engine with overlap and 1 unit ahead;"]),
        ("--runtime zerosim --model gpt2 --stage 3 --no-overlap --prefetch 0", ["engine with nothing overlapped;"]),
        ("--model gpt2 --margin 0", ["No margin was asked for, which is for the allocator's fragments, and for peaks"]),
        ("--runtime zerosim --model gpt2 --stage 3 --prefetch 2", ["engine with overlap and 2 units ahead;"]),
        ("--runtime zerosim --model gpt2 --mesh 2x4 --zeropp hpz+qwz+qgz --recompute block --explain --measure "
         "--stage 3", [
            "ZeRO++ (hpz, qwz=int8, qgz=int4) on 2x4", "secondary shards (hpZ)", "from a node's ranks to other nodes"]),
        ("--runtime zerosim --model gpt2 --mesh 2x4 --stage 3 --recompute block --explain", [
            "sharded inside nodes (2x4)", "N = 4, Ψ ="]),
        ("--model gpt2 --tokens 1B --price 2 --compare=--batch=2", [
            "tokens per second and device", "1,000,000,000 tokens are 122,071 steps:",
            "side by side", "device-hours", "B is ZeRO-"]),
        ("--model llama-3-8b --sequence 131072 --recompute block --stage 3", [
            "No number of ranks makes it fit: what is not in shards, as activations and gathered units, does not"]),
        ("--runtime zerosim --model gpt2 --stage 3 --optimizer muon --ranks 1", [
            "What Muon works in while it updates whole tensors"])],
    "tune": [
        ("--model gpt2 --global-batch 8 --stage 3 --recompute block --prefetch 1 --offload host", [
            "gpt2: 8 ranks of h100-80 (85.03 GB) over nvlink4, 8 sequences of 1,024 tokens a step, bf16, overlapped, "
            "fsdp2",
            "3 block host 1 · 1 1", "host: pcie5, 63.02 GB a second each way, and 250.00 GB", "fully_shard("]),
        ("--model gpt2 --global-batch 64 --ranks 2 --stage 1 --recompute none --offload none --batch 1,32 --device t4 "
         "--link pcie3 --compute fp16 --runtime zerosim", ["Not in the table: 1 candidate without the margin."]),
        ("--model bloom-560m --global-batch 8 --stage 3 --batch 1 --recompute block --runtime zerosim", [
            "zerosim's layers do not make bloom-560m"])],
}


@pytest.mark.parametrize("command", SAID)
def test_what_is_asked_for_is_said_in_words(command):
    for switches, said in SAID[command]:
        words = words_of(command, *switches.split())
        assert [part for part in said if part not in words] == [], switches


def test_a_training_that_goes_on_from_its_checkpoint_ends_as_if_it_had_never_stopped(tmp_path):
    """And says what is different where it is another training."""
    run = ("--checkpoint", str(tmp_path), "--save-every", "2")
    whole, part = data_of("train", "--steps", "5"), data_of("train", *run, "--steps", "3")
    rest = data_of("train", *run, "--steps", "5", "--resume")
    assert part["steps"] + rest["steps"] == whole["steps"]
    assert (rest["digest"], rest["sample"]) == (whole["digest"], whole["sample"])
    assert (whole["resumed_from"], rest["resumed_from"], rest["differences"]) == (None, 3, [])
    done = ask("train", *TINY, "--steps", "6", "--ranks", "3", "--stage", "1", *run, "--resume")
    words = " ".join(done.stdout.split())
    assert "zerosim train: goes on from step 5, but ranks: saved with 2, here 3" in done.stderr
    assert "Went on from step 5. ranks: saved with 2, here 3 stage: saved with" in words
    assert "micro-batches of a step of the data: saved with 2, here 3" in words
    assert_command_refuses("is of step 6, and 6 steps were asked for", "train", *TINY, "--steps", "6", *run, "--resume")
    assert_command_refuses("has the checkpoint of another run", "train", *TINY, *run)
    model = training.Options(model="gpt-nano").build()
    zs.Cluster(2).run(lambda rank: zs.Engine(rank, model, zs.optim.AdamW()).save(tmp_path))
    assert_command_refuses("was saved with the progress None", "train", *TINY, *run, "--resume")


def test_by_micro_batch_a_training_goes_on_from_its_checkpoint_on_other_ranks_as_if_it_had_never_stopped(tmp_path):
    order, folder = ("--reduction", "micro_batch", "--steps"), ("--checkpoint", str(tmp_path))
    whole = data_of("train", *order, "3", "--stage", "2", "--micro-batches", "2")
    data_of("train", *order, "2", "--stage", "2", "--micro-batches", "2", *folder, "--save-every", "2")
    rest = data_of("train", *order, "3", "--ranks", "4", *folder, "--resume")
    assert (rest["digest"], rest["resumed_from"], rest["differences"]) == (whole["digest"], 2, [])


def test_a_training_begins_from_the_weights_that_another_has_exported_in_one_file_or_several(tmp_path):
    folder, begun = str(tmp_path / "c"), {}
    trained = data_of("train", "--checkpoint", folder, "--save-every", "2")
    for out, *more in (("one.safetensors",), ("folder",), ("several", "--shard-nbytes", "4000")):
        files = ask("export", folder, str(tmp_path / out), *more).stdout.replace("\n", "").split(str(tmp_path))[1:]
        assert len(files) > 2 if more else len(files) == 1
        begun[out] = data_of("train", "--weights", str(tmp_path / out), "--ranks", "3", "--stage", "1")
    assert begun["one.safetensors"] == begun["folder"] == begun["several"]
    assert begun["folder"]["steps"][0]["loss"] < trained["steps"][0]["loss"]
    assert begun["folder"]["digest"] != data_of("train", "--ranks", "3", "--stage", "1")["digest"]
    narrow = ask("export", folder, str(tmp_path / "narrow"), "--kind", "parameter")
    assert narrow.exit_code == 0
    assert (tmp_path / "narrow" / "model.safetensors").stat().st_size < (tmp_path / "one.safetensors").stat().st_size
    for args, said in (
            (("no-such", "x"), "no-such holds no checkpoint"),
            ((folder, str(tmp_path / "several")), "where there are others: model-00001-of-"),
            ((folder, "x.safetensors", "--shard-nbytes", "9"), "is one; name a folder"),
            ((folder, "x", "--kind", "moment"), "has no moment of wte"),
            ((folder, str(tmp_path / "one.safetensors" / "x")), "name a place that can be written")):
        assert_command_refuses(said, "export", *args)


def test_training_as_json_has_every_step_and_not_the_one_that_is_saved(tmp_path):
    data = data_of("train", "--save", str(tmp_path / "run.json"))
    assert data == data_of("train")
    assert json.loads((tmp_path / "run.json").read_text())
    assert [step["number"] for step in data["steps"]] == [1, 2]
    assert data["steps"][0].keys() == {"number", "loss", "norm", "scale", "skipped", "tokens", "peak_nbytes_by_kind",
                                       "sent_nbytes", "sent_across_nbytes"}
    assert data["held_out_bits_per_byte"] == pytest.approx(data["held_out_loss"] / 0.6931471805599453)


def test_a_comparison_as_json_has_each_run_by_its_value_with_all_that_was_asked():
    asked = {"model": "gpt-nano", "ranks": 3, "compute": "fp16", "optimizer": "lion", "lr": 0.1, "micro_batches": 2,
             "batch": 3, "recompute": "block", "layout": "contiguous", "steps": 1, "seed": 1, "loss_scale": "8"}
    switches = (f"--{name.replace('_', '-')}={value}" for name, value in asked.items())
    data = json.loads(ask("compare", "--values", "3,2", *switches, "--json").stdout)
    assert (data["over"], data["same_bits"], data["same_bits_by_value"]) == ("stage", True, [[3, 2]])
    for stage, run in data["runs"].items():
        assert asked | {"stage": int(stage)} == {name: run["options"][name] for name in (*asked, "stage")}


def test_a_comparison_is_drawn_dark_where_it_is_asked_to(tmp_path):
    done = ask("compare", *ASKED["compare"], "--steps", "1", "--figure", str(tmp_path / "it.svg"), "--dark")
    assert done.exit_code == 0, done.output
    assert f"fill: {drawing.DARK.background.lower()}" in (tmp_path / "it.svg").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["it.svg"]


def test_a_bar_shows_loss_speed_scale_and_memory_on_a_terminal_alone():
    said = []
    for terminal in (True, False):
        console = Console(width=120, force_terminal=terminal, record=True, color_system=None)
        with console.capture() as seen, training.progress_bar(console, 3) as bar:
            bar.begin("stage 2")
            for number in (1, 2):
                bar.on_step(training.TrainingStep(number, 2.5, 1.0, 256.0, False, 1024, {"parameter": 1_500_000}, {}))
        said.append(seen.get())
    assert re.search(r"stage 2 .*2/3 loss 2\.500  [\d,]+ tokens/s  scale 256  1\.5 MB", said[0])
    assert said[1].strip() == ""


def test_a_cost_says_what_was_asked_what_it_takes_and_where_others_are_faster():
    done = ask("cost", *RING, "--algorithm", "ring", "--collective", "all_reduce")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for line in ("over nvlink4: 450 GB/s one way, 3.4 µs a message", "steps 14",
                 "sent by each rank 24,500,000,000 bytes", "time 54.49 ms", "latency, 0.1 % 47.6 µs",
                 "transfer 54.44 ms", "algorithm bandwidth 256.9 GB/s", "bus bandwidth 449.6 GB/s",
                 "algorithm steps sent at most time faster than ring", "doubling 3 42 GB 93.34 ms below 13.46 MB",
                 "rabenseifner 6 24.5 GB 54.46 ms always", "naive 14 98 GB 435.6 ms never",
                 "Below 12.24 MB latency takes more of its time than transfer.",
                 "That wall is N·α·β of nvlink4: 14 GB meet it on 9,150 ranks."):
        assert line in lines
    assert "latency: NCCL 2.20" in " ".join(lines)
    start = next(i for i, line in enumerate(lines) if line.startswith("algorithm steps"))
    assert [line.split()[0] for line in lines[start + 1:start + 7]] == [
        "rabenseifner", "ring", "doubling", "tree", "everyone", "naive"]
    assert broken_lines(ask("cost", "--nbytes", "4e18", "--ranks", "1024", "--link", "pcie3").stdout) == []


BRACKETS = """
[link."[red]x[/]"]
bytes_per_second = 400e9
latency_seconds = 1e-6
source = "see [1] and [/bold]"
date = "2025"
"""


def test_brackets_in_a_file_of_ones_own_are_printed_as_they_are(tmp_path):
    """Else they would be taken for styles, or for the ends of some that there are not."""
    (tmp_path / "mine.toml").write_text(BRACKETS)
    own = ("--link", "[red]x[/]", "--hardware", str(tmp_path / "mine.toml"))
    words = words_of("cost", "--nbytes", "1e9", "--ranks", "4", *own)
    assert "over [red]x[/]: 400 GB/s one way" in words
    assert "[red]x[/] (2025): see [1] and [/bold]." in words
    assert "over [red]x[/]" in words_of("plan", "--params", "1e9", "--explain", "--runtime", "zerosim", *own)


def test_a_search_replays_on_a_link_of_ones_own(tmp_path):
    (tmp_path / "mine.toml").write_text(BRACKETS)
    own = data_of("tune", "--link", "[red]x[/]", "--hardware", str(tmp_path / "mine.toml"))["rows"]
    assert own[0]["step_seconds"] != data_of("tune")["rows"][0]["step_seconds"]


def test_a_plan_as_json_has_its_rows_formulas_and_measurements():
    asked = "--model gpt2 --runtime zerosim --ranks 4 --stage 2,3 --recompute block --explain --measure --json"
    data = json.loads(ask("plan", *asked.split()).stdout)
    assert [(row["stage"], row["recompute"]) for row in data["rows"]] == [(2, "block+tiled"), (3, "block+tiled")]
    assert {line["difference_nbytes"] for row in data["rows"] for line in row["measured"]} == {0}
    assert (data["overlap"], data["prefetch"]) == (True, 1)
    assert data["rows"][0]["explained"][0]["value"] == "124,439,808"


def test_what_is_spare_is_red_where_a_row_of_a_plan_does_not_fit():
    found = zs.plan("llama-2-7b", ranks=8, runtime="zerosim", batch=4)
    (table,) = (part for part in plan_view.plan_view(found, columns=200).parts if hasattr(part, "rows"))
    assert ["[red]" in "".join(row) for row in table.rows] == [not row.fits for row in found.rows]
    assert ["[yellow]" in "".join(row) for row in table.rows] == [row.fits > row.has_margin for row in found.rows]
    assert ["[green]" in "".join(row) for row in table.rows] == [row.has_margin for row in found.rows]
    assert {(row.fits, row.has_margin) for row in found.rows} == {(True, True), (True, False), (False, False)}


def test_a_plan_takes_the_settings_of_a_ds_config_says_what_of_them_is_different_and_refuses_what_says_a_thing_twice(
        tmp_path):
    file, asked = tmp_path / "ds_config.json", ("plan", "--model", "gpt2", "--device", "a100-80", "--ds-config")
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2, "steps_per_print": 10,
              "fp16": {"enabled": True, "loss_scale": 128}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
              "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}}}
    file.write_text(json.dumps(config))
    data = json.loads(ask(*asked, str(file), "--ranks", "4", "--json").stdout)
    settings = zs.from_deepspeed(config, ranks=4, model="gpt2")
    rows = json.loads(json.dumps(zs.plan("gpt2", device="a100-80", **settings.plan_arguments()).as_dict()["rows"]))
    assert [{name: line[name] for name in row} for line, row in zip(data["rows"], rows, strict=True)] == rows
    assert data["notes"] == ["Of DeepSpeed's settings these change nothing here: steps_per_print.",
                             *(f"Not the same as DeepSpeed's: {line}." for line in settings.differences)]
    assert (data["rows"][0]["stage"], data["rows"][0]["host_nbytes"] > 0, data["ranks"]) == (2, True, 4)
    assert len(data["notes"]) > 1
    words = words_of(*asked, str(file), "--ranks", "4")
    assert all(" ".join(note.split()) in words for note in data["notes"])
    counted = ask(*asked, str(file), "--runtime", "zerosim", "--convention", "megatron-fp16", "--json")
    assert (data["runtime"], json.loads(counted.stdout)["convention"]) == ("deepspeed", "megatron-fp16")
    for switch in ("--batch 3", "--micro-batches 2", "--stage 2", "--compute fp16", "--offload host"):
        assert_command_refuses(f"{switch.split()[0]} was asked for, and {file} says it too", *asked, str(file),
                               *switch.split())
    file.write_text(json.dumps(config | {"amp": {"enabled": True}}))
    assert_command_refuses("amp={'enabled': True}", *asked, str(file))


@pytest.mark.parametrize(("columns", "shown", "hidden"), [
    (80, ["states", "transient", "spare", "step"], ["optimizer", "gathered"]),
    (135, ["gathered", "MFU"], ["optimizer"]),
    (170, ["parameters", "gradients", "optimizer", "activations", "MFU"], ["states"])])
def test_a_wider_terminal_shows_more_columns_of_a_plan_and_no_line_is_broken(columns, shown, hidden):
    done = ask("plan", "--model", "llama-3.1-70b", "--ranks", "512", "--nodes", "64", "--batch", "4", columns=columns)
    table = re.split(r"\n *\n", done.stdout)[2].splitlines()
    assert set(shown) <= set(table[0].split())
    assert not set(hidden) & set(table[0].split())
    assert [line.split()[:2] for line in table[1:]] == [
        [stage, policy] for stage in "0123" for policy in ("none", "selective", "block")]


# What commands and their lessons refuse, and an error of each kind from below; what the library refuses in the same
# words, its own tests ask.
REFUSED = {
    "replay": [
        ("--stage 4", "choose one of 0, 1, 2, 3, or all"),
        ("--weights 1,2", "four weights w1, w2, w3, w4, found 2"),
        ("--weights 1,2,3,nan", "weights must be finite numbers, found"),
        ("--weights a,b,c,d", "numbers separated by commas"), ("--data 1,2", "a sample is x1,x2:t"),
        *((f"--data {text}", "write for example") for text in ("1,3", "a,b:c", "1,2,3:4", "1,3:5;")),
        ("--steps 0", "--steps 0 must be a whole number, 1 or more"),
        ("--optimizer lion", "--optimizer lion; choose one of adam, sgd"),
        ("--ranks 0", "--ranks 0 must be a"), ("--ranks 3 --data 1,2:3", "found 1 samples for 3 ranks")],
    "lost-updates": [
        ("--weight nan", "the weight must be a finite number, found nan"),
        ("--weight 1e6", "fp16 has no number as large as the weight 1e+06: its largest is 65504; take a smaller"),
        ("--update 0", "a finite number other than 0, found 0.0"), ("--update inf", "other than 0, found inf"),
        ("--steps 0", "at least once, found --steps 0")],
    "precision": [
        ("--steps 0", "--steps 0 must be a whole number, 1 or more")],
    "train": [
        ("--text no-such-file", "cannot be read: No such file or directory"),
        ("--text EMPTY", "is empty; give a file of some"),
        ("--text NOT-UTF-8", "is no UTF-8 text: byte 0 is 0xff"), ("--ranks 0", "--ranks 0 must be a whole number"),
        ("--ranks 7000", "--ranks 7000: gpt-nano has 6,960 parameters, and no layout has one for each rank; take fewer "
         "ranks, or a larger model"),
        ("--ranks 1025", "--ranks 1025: all of them train in this process; take at most 1,024"),
        ("--optimizer adamm", "did you mean 'adam'"),
        ("--sample -1", "--sample -1 must be a whole number, 0 or more"),
        ("--compute fp8_e4m3", "take 'fp8', an experiment in which"),
        ("--compute fp16 --loss-scale 1e38", "all 2 steps were skipped"),
        ("--offload-directory x", "is of offload to disk"),
        ("--offload disk --offload-directory no-such", "No such file"),
        ("--capacity -1", "--capacity -1 must be a whole number, from 0 to below 2^62"),
        ("--capacity 1kB", "left of --capacity 1000"),
        ("--loss-scale x", "--loss-scale x is neither a positive number nor 'dynamic'"),
        ("--lr 0", "--lr 0 must be a positive number"), ("--lr nan", "--lr nan must be a positive number"),
        ("--lr 1e30", "training has diverged: from step 2 on the loss is no finite number, and 1 of 2 steps"),
        ("--batch 1000000000000", "this machine has too little memory for it"),
        ("--save no/such/folder/run.json", "but: No such file or directory"),
        ("--weights no-such", "asked to begin from --weights no-such, and there is no such file or folder"),
        ("--weights x --resume --checkpoint y", "asked to begin from --weights x and to --resume"),
        ("--save-every 2", "without a folder; name one, as in --checkpoint my-run"),
        ("--checkpoint x --save-every 0", "every 0 steps; take a whole number, 1 or more"),
        ("--checkpoint x", "nothing would be written to 'x' or read from it; ask for --save-every, or for --resume"),
        ("--checkpoint no-such --resume", "no-such holds no checkpoint: there is no index.json in it")],
    "compare": [
        ("--over stages", "asked to compare over 'stages'; choose one of stage, compute, optimizer, recompute, mesh, "
         "zeropp; did you mean 'stage'"),
        ("--values 0,3,0", "--values 0,3,0: a comparison over stage takes two or more that differ, as in 0,1,2,3"),
        ("--figure x.pdf", "end its name with one of .svg"),
        ("--figure no/such/folder/x.svg", "asked to draw into 'no/such/folder/x.svg', which is in no folder"),
        ("--figure /proc/x.svg", "asked to draw into '/proc/x.svg'"), ("--dark", "asked for --dark without a figure"),
        ("--values 0,²", "ZeRO has the stages"), ("--capacity 100000 --values 3,2,1", "stage 1: rank")],
    "cost": [
        ("--ranks 8193", "8193 ranks were asked for; every step of every rank is looked at, so take 8192 at most"),
        ("--algorithm rings", "all_reduce has no algorithm 'rings'; there are ring, doubling, rabenseifner, tree, "
         "naive, everyone; did you mean 'ring'?"),
        ("--collective allreduce", "no collective is called 'allreduce'; there are reduce_scatter, all_gather"),
        ("--itemsize 3", "14000000000 bytes are no whole number of elements of 3 bytes; take 13999999998, or"),
        ("--collective barrier --algorithm dissemination", "a barrier carries no bytes, and 14000000000 were asked "
         "for; take 0")],
    "plan": [
        ("--offload optimizer=cloud", "plan: --offload optimizer=cloud must be 'host' or 'disk', which place all "),
        ("--stage 3 --reduction micro", "plan: --reduction micro is no order of additions; choose one of rank, micro_"),
        ("--mesh 2x4 --nodes 4", "--mesh 2x4 has 2 nodes, and --nodes 4 were asked for; leave --nodes out"),
        ("--price 2", "--price 2 is of a whole training, and no tokens were asked for; say how many, as --tokens 300B"),
        ("--global-batch 12", "--global-batch 12 is no multiple of 8 sequences, a micro-batch of 1 on each of 8 ranks; "
         "take 8 or 16, or other ranks or another batch"),
        ("--global-batch 8 --micro-batches 1", "--global-batch 8 says how many micro-batches there are"),
        ("--margin 1", "--margin is the share of the device that is to stay free, from 0 to below 1, got 1.0"),
        ("--runtime fsdp", "no runtime is called 'fsdp'; choose one of fsdp2, deepspeed, megatron, zerosim; did you"),
        ("--runtime fsdp2 --convention fp32", "--convention fp32 is of zerosim, and this is a plan of fsdp2; leave "
         "it out, or take --runtime zerosim"),
        ("--runtime fsdp2 --recompute segment(2)", "--recompute 'segment(2)' is no policy of fsdp2's programs; take"),
        ("--runtime fsdp2 --attention unfused", "whose attention is fused; leave it out"),
        ("--runtime fsdp2 --measure", "--measure runs zerosim's engine, and this is a plan of fsdp2"),
        *((f"--compare --{one}", f"--compare takes what differs in the other plan, found --{one}; type that outside")
          for one in ("explain", "json")),
        ("--mesh 2x4 --optimizer muon", "Muon updates whole tensors, and a plan of shards inside nodes is of "),
        ("--model bloom-560m --measure", "bloom-560m cannot be measured: zerosim's layers make models of GPT-2's")],
    "tune": [("--batch 0", "--batch must be at least 1"), ("--runtime fsdp2 --no-overlap", "no settings of fsdp2 for")]}


@pytest.mark.parametrize("command", REFUSED)
def test_wrong_input_is_one_line_and_exit_code_2_before_anything_is_written(command, tmp_path):
    files = {"EMPTY": b"", "NOT-UTF-8": b"\xff\xfe\x00"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    for switches, said in REFUSED[command]:
        words = [str(tmp_path / word) if word in files else word for word in switches.split()]
        assert_command_refuses(said, command, *ASKED[command], *words, "--json")


@pytest.mark.parametrize(("command", "short", "long"), [
    ("cost", "--nbytes 14GB --link NVLink --ranks 8", "--nbytes 14000000000 --link nvlink4 --ranks 8"),
    ("plan", "--model gpt2 --device H100 --link nvlink", "--model gpt2 --device h100-80 --link nvlink4"),
    ("plan", "--params 7B --largest-layer 0.2B --device a100 --runtime zerosim",
     "--params 7e9 --largest-layer 2e8 --device a100-80 --runtime zerosim"),
    ("plan", "--model 7B --device A100 --link nvlink", "--params 7000000000 --device a100-80 --link nvlink3"),
    ("plan", "--model gpt2 --offload host --device a100 --host-link pcie",
     "--model gpt2 --offload host --device a100-80 --host-link pcie4")])
def test_names_and_numbers_may_be_written_as_one_says_them(command, short, long):
    assert ask(command, *short.split(), "--json").stdout == ask(command, *long.split(), "--json").stdout != ""


def test_models_devices_and_links_are_listed_with_their_numbers_and_what_else_they_are_called(tmp_path):
    assert re.search(r"^llama-2-7b +6,738,415,616 +32 +4,096 +32 +4,096 +plan$", lines_of("models"), re.M)
    assert re.search(r"^gpt2 +124,439,808 .* train plan$", lines_of("models"), re.M)
    assert re.search(r"^h100-80 +h100 +80 +3,350 +989 +nvlink4 +pcie5 +2023-03$", lines_of("devices"), re.M)
    assert re.search(r"^t4 +16 +320 +none +pcie3 +pcie3 ", lines_of("devices"), re.M)
    assert re.search(r"^nvlink4 +nvlink +450 +3.4 +2022-03$", lines_of("links"), re.M)
    own = tmp_path / "own.toml"
    own.write_text('[link.h100]\nbytes_per_second = 4e9\nlatency_seconds = 2e-6\nsource = "ours"\ndate = "2025"\n')
    assert json.loads(ask("links", "--hardware", str(own), "--json").stdout)["links"]["h100"]["source"] == "ours"
    for command in ("models", "devices", "links"):
        named = set(json.loads(ask(command, "--json").stdout)[command])
        assert {line.split()[0] for line in lines_of(command).splitlines()} >= named


@cache
def lines_of(command):
    """The lines that a list prints, without spaces at their ends."""
    return re.sub(" +$", "", ask(command).stdout, flags=re.M)


def test_help_lists_every_choice():
    import zerosim.planning as planning
    from zerosim.zero.layout import LAYOUTS

    for command, option, choices in (
            ("train", "optimizer", training.OPTIMIZERS), ("plan", "optimizer", training.OPTIMIZERS),
            ("train", "layout", LAYOUTS), ("train", "stage", map(str, zs.STAGES)),
            ("plan", "convention", planning.CONVENTIONS),
            ("compare", "over", training.OVER), ("cost", "collective", {of for of, _ in planning.ALGORITHMS}),
            ("cost", "algorithm", {name for of, name in planning.ALGORITHMS if of != "barrier"}),
            ("lost-updates", "format", zs.FORMATS), ("precision", "format", zs.FORMATS)):
        said = {one.name: one.help for one in command_line().commands[command].params}[option]
        missing = [choice for choice in choices if not re.search(rf"(?<![\w-]){choice}(?![\w-])", said)]
        assert missing == [], (command, option)
