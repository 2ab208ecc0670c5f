"""What planning refuses: who asks for what cannot be reads what was asked, what was found, and what to do.

Tables of calls with what stands in the text of their ValueError; "..." is left out, ^ is the beginning.
"""

from dataclasses import replace
from functools import partial

import numpy as np

import zerosim as zs
from tests.planning.configurations import GPT2, LLAMA2, OWN_DEVICE, OWN_LINK, T5
from tests.planning.recorded_runs import EVEN, FAST, MACHINE, device, program_of, recorded, step, traces, traces_of
from tests.support import assert_refused, literally
from zerosim.course.published import published
from zerosim.models import model_types
from zerosim.options import StepOptions
from zerosim.planning import (
    STAGES,
    Block,
    Experts,
    Job,
    LatentAttention,
    Link,
    Machine,
    Network,
    ShardedStates,
    Slow,
    Transformer,
    activations,
    ceil_cut,
    conventions,
    cost,
    cuts,
    estimate_nbytes,
    flops,
    frozen,
    hardware,
    lora,
    model_of_parameters,
    model_shape,
    recording,
    replay,
    sent,
    shapes,
    states_nbytes,
    step_activations,
)
from zerosim.planning import step_events as steps
from zerosim.ranks import Transfer, TransferWait

ONE_KIND = Network(FAST)
PCIE, ETHERNET = hardware.link("pcie4"), hardware.link("ethernet-10g")
PLAIN = Block(1, 2, 6, 3)
LLAMA = shapes.PRESETS["llama-2-7b"]
BERT = {"model_type": "bert", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 30,
        "num_attention_heads": 2, "max_position_embeddings": 16}
LLAMA4 = {"model_type": "llama4_text", "hidden_size": 8, "intermediate_size": 16, "intermediate_size_mlp": 16,
          "num_hidden_layers": 1, "vocab_size": 30, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
          "num_local_experts": 2, "num_experts_per_tok": 1}
# Calls that are made later: ``plan(ranks=0)`` is ``partial(zs.plan, ranks=0)``.
plan = partial(partial, zs.plan)
gpt2 = partial(partial, zs.plan, "gpt2")
machine = partial(partial, lambda **options: Machine(
    **{"device": device(), "network": ONE_KIND, "format": "fp16"} | options))


def refuses(table):
    """Each call of the table is refused with its text."""
    for call, text in table:
        assert_refused(call, literally(text))


def events_of(walk, states, layout):
    return list(walk(Job((4, 6), 2, states, layout)))


def config(fields):
    return partial(shapes.model_of_config, fields, name="c")


def test_a_layout_a_collective_or_a_network_that_cannot_be_is_refused():
    refuses([
        (partial(cuts.padded_unit_lengths, (4, -3), 2), "unit_lengths[1] must be at least 0, got -3"),
        (partial(cuts.padded_unit_lengths, (), 2), "unit_lengths is empty; ... at least one unit, e.g. unit_lengths=("),
        (partial(cuts.unit_cuts, (4,), 2, "per-unit"), "no layout is called 'per-unit'; ...; did you mean 'per_unit'?"),
        (partial(Job, (7.5e9,), 2, STAGES[1]), "[0] must be a whole number, got 7500000000.0; write unit_lengths[0]="),
        *((partial(Job, (4,), 2, STAGES[stage], policy=zs.Policy("fp16", wire=wire), options=StepOptions(
            reduction="micro_batch")), "reduction='micro_batch' is of sharded gradients, which travel as they are")
          for stage, wire in ((1, None), (2, "fp32"))),
        (partial(Job, (4,), 6, STAGES[2], options=StepOptions.of(4, mesh="2x2")), "has 4 ranks, and there are 6; take"),
        (partial(StepOptions.of, 4, mesh="2x2", reduction="micro_batch"), "on a mesh each node's are added first; "),
        (partial(StepOptions.of, 4, zeropp="hpz"), "zeropp='hpz' saves what crosses nodes, and there is no mesh; name "
         "one, as 4x1"),
        (partial(StepOptions, offload="host"), "offload='host' must be an Offload, as zs.Offload('host') is"),
        *((partial(events_of, walk, states, layout), "a step's events are of ZeRO's stages and of the layout per_unit")
          for walk in (steps.step_events, steps.micro_batch, steps.after_backward)
          for states, layout in ((STAGES[2], "contiguous"), (ShardedStates(False, True, False), "per_unit"))),
        (lambda: list(steps.step_events(Job((4, 6), 4, STAGES[1], options=StepOptions.of(
            4, mesh="2x2", zeropp="qgz")))), "gradients are of those that rest sharded; take stage 2 or 3"),
        (partial(sent, "all_reduce", "quantum", (0, 4), 2), "no algorithm 'quantum' for 'all_reduce'; there are "),
        (partial(sent, "reduce_scatter", "halving", (0, 1, 2, 3), 2),
         "reduce_scatter by halving needs a power of two of ranks, ...; this group has 3. Use ring, pairwise"),
        *((partial(sent, "all_gather", "ring", cut, 2), f"cut must hold N+1 rising boundaries from 0 on, got {cut}; ")
          for cut in ((0, 3, 2), ())),
        (partial(sent, "broadcast", "tree", (0, 3, 4), 2, root=2), "root=2 is no rank; the ranks are 0 to 1"),
        (partial(cost.cost, "all_gather", "ring", (0, 1 << 62), 2, ONE_KIND), "fewer than 2^62 bytes"),
        (partial(Network, PCIE, ETHERNET), "between='ethernet-10g' and ranks_per_node=None; give both, or neither"),
        (partial(hardware.presets().network, 8, "pcie4", 3), "8 ranks cannot be spread evenly over 3 nodes"),
        (partial(hardware.presets().network, 8, "pcie4", 1, "ethernet-10g"), "one node has no link between nodes,"),
    ])


def test_a_machine_or_a_part_of_it_that_cannot_be_is_refused():
    refuses([
        (partial(hardware.device, "A10"), "no device is called 'A10'; there are rtx-3090, ...; did you mean "),
        (partial(hardware.device, "A100 80GB PCIe"), "is called 'A100 80GB PCIe'; ... 'h100-pcie' or 'a100-80'?"),
        (partial(hardware.Hardware({"a-40": 1, "b-40": 1}, {}).device, "40"), "'40' may be the device a-40 or b-40"),
        (partial(hardware.presets().network, 16, "pcie4", 2, device="4090"), "the device 4090 does not say by which "
         "link its nodes are connected; name one, as between=infiniband-hdr or between=ethernet-10g"),
        (partial(Network, PCIE, cards_per_rank=0), "the network: cards_per_rank must be a finite number above 0"),
        (partial(hardware.link, "mail"), f"no link is called 'mail'; there are {', '.join(hardware.presets().links)}"),
        (partial(hardware.device("t4").flops_per_second_in, "bf16"), "the device t4 has no rate in bf16; it has fp32, "
         "fp16; compute in one of these"),
        (partial(hardware.overheads_nbytes, {"cuda": 1}), "no overhead is called 'cuda'; there are runtime context"),
        (partial(hardware.overheads_nbytes, {"runtime context": -1}), "runtime context must be at least 0, got -1"),
        (machine(format="fp8"), "the device made up has no rate in fp8; it has fp16"),
        (machine(efficiency=1.5), "efficiency must be a share of the peak, above 0 and at most 1, got 1.5"),
        (machine(slow=[Slow(1, 2), Slow(1, 3)]), "the rank 1 is slow twice; give it one factor"),
        (machine(slow=[Slow(0, 2, to=1)] * 2), "the link from 0 to 1 is slow twice; give it one factor"),
        (lambda: replay(step(3), machine(slow=[Slow(3, 2)])()), "rank 3 is to be slow, but ... has 3 ranks"),
        (lambda: replay(step(3), machine(slow=[Slow(0, 2, to=4)])()), "from 0 to 4 is to be slow, but the run"),
        (lambda: replay(recorded(1, program_of(("to host", 5))), MACHINE), "has no link to one; name it, as host_link"),
    ])


def test_a_block_or_a_model_that_cannot_be_or_is_not_counted_is_refused():
    refuses([
        (partial(Block, 1, 1, 4, 3), "of 4 channels was asked for 3 heads, which do not divide them; take a number of"),
        (partial(published, "stats"), "nothing published about 'stats' is kept; the subjects are states, activations"),
        (partial(flops.utilization, 1.0, 0.0, 1.0), "asked for 1 FLOPs in 0 s at 1 per second; FLOPs are 0 or more, "),
        (partial(flops.step_flops, shapes.PRESETS["t5-small"], 1, 8), "has 6 blocks of encoder beside 6 of decoder; "),
        (partial(flops.savings, Block.of(LLAMA, 1, 8)), "4096, 4096 and a gated network of 11008; take recomputed"),
        (partial(model_of_parameters, 10, 11), "a largest layer of 11 ... in a model of 10; take at most the model's"),
        (partial(model_of_parameters, 10**9, 10), "makes 100,000,000 layers ... up to 100,000, so take a larger one"),
        (partial(Transformer, 8, 1, 2, 10, biases=("norms",)), "a transformer was given biases=('norms',); name the l"),
        (partial(model_shape, "lama-2-7b"), "no model is called 'lama-2-7b', and there is no ... mean 'llama-2-7b'"),
        (config([1]), "c holds a JSON list; a model's configuration is an object, with model_type and the model's siz"),
        (partial(model_shape, "mixtral"), "no such file; ... did you mean 'mixtral-8x7b' or "),
        (partial(model_shape, "x"), f"of those that zerosim models lists {len(shapes.PRESETS)} can be planned$"),
        (config({}), f"c has no model_type; it counts {', '.join(model_types.model_types())}, gemma3, llama4"),
        (config({"model_type": "mamba"}), "c has the model_type 'mamba', which zerosim cannot count; it counts gpt2, "),
        (config({"model_type": "gemma3"}), "c has the model_type 'gemma3' and no text_config, an object with the size"),
        (config({"model_type": "gemma3", "text_config": {}}), "c (its text_config: zerosim counts no pictures) lacks"),
        (config(BERT | {"architectures": ["BertModel"]}), "c: architectures=['BertModel'] is a BERT with another head"),
        (config(BERT | {"is_decoder": True}), "c: a BERT with is_decoder, ... take an encoder whose head is tied"),
        (config(LLAMA4 | {"moe_layers": 3}), "c: moe_layers must be a list, got 3"),
        (partial(Experts, 4, 5, 8), "each token was asked to pass 5 of 4 experts; take at most all"),
        (partial(Transformer, 8, 1, 2, 10, norms="shared"), "asked for norms='shared'; take one of before, after, "),
        (partial(Transformer, 8, 1, 2, 10, latent=LatentAttention(4, 5, 4)), "of a head's 4 channels 5 were asked to"),
        (partial(lora, model_shape("gpt2"), 8, ["q"]), "gpt2 has no layer called 'q'; take of down, projection, qkv"),
        (partial(lora, model_of_parameters(9), 8), "has no layer called 'qkv'; take of a model whose layers are known"),
        (partial(lora, model_shape("gpt2"), 8, stored="nf3"), "stored as 'nf3' were asked for; take one of nf4, "),
        (partial(frozen, model_shape("gpt2"), but=["heads"]), "has no layer called 'heads'; take of block*, down, emb"),
        (config({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_positions": None}), "c lacks n_layer, n_positions"),
        (config(GPT2 | {"n_head": 7}), "c: a transformer of 768 channels was asked for 7 heads...or say head_channels"),
        (config(LLAMA2 | {"num_key_value_heads": 5}), "c: 32 heads were asked to share 5 key and value heads; "),
        (config(GPT2 | {"n_layer": 0}), "c: n_layer must be at least 1, got 0"),
        (config(GPT2 | {"n_layer": True}), "c: n_layer must be a whole number, got True"),
        (config(T5 | {"feed_forward_proj": 7}), "c: feed_forward_proj must be a text, got 7"),
        (config(LLAMA2 | {"tie_word_embeddings": "no"}), "c: tie_word_embeddings must be true or false, got 'no'"),
        (config(LLAMA2 | {"vocab_size": 10**400}), "c: vocab_size must be below 2^62, got a number of 1329 bits"),
        (config(LLAMA2 | {"vocab_size": 10**15}), "c: vocabulary must be below 2^28, got a number of 50 bits"),
        (config(LLAMA2 | {"num_hidden_layers": 10**7}), "c: a transformer of 10,000,000 blocks ... so take fewer"),
        (config(LLAMA2 | {"model_type": "mistral"}), "c lacks num_key_value_heads; a configuration of mistral has "),
        (config(GPT2 | {"hidden_size": 1024}), "c says n_embd=768 and hidden_size=1024, two names of one; say one"),
        (config(GPT2 | {"add_cross_attention": True}), "c: a GPT-2 with add_cross_attention ...; take one without"),
    ])


def test_a_plan_that_cannot_be_made_is_refused():
    refuses([
        (partial(conventions.convention_of, "zero_paper"), "no accounting convention is called 'zero_paper'; there are "
         "zero-paper, ... and zerosim, the engine's own; did you mean 'zero-paper'?"),
        (partial(conventions.per_parameter_nbytes, zs.optim.Muon()), "what Muon keeps depends on the shapes"),
        (plan(), "name one of the two, as model='gpt2-xl' or params='7.5B'"),
        (plan(5), "model=5 must be a name or the path of a file, as a text"),
        (gpt2(largest_layer=5), "largest_layer goes with a number of parameters"),
        (plan(params="7.5.9"), "params='7.5.9' is no number"),
        *((plan(params=text), "must be a whole number, from 1 to") for text in ("-3", "1.5")),
        (plan(params="7,5e9"), "params='7,5e9' is no number; write it as 7B, 7.5e9 or 7,500,000,000, with k"),
        (gpt2(ranks=10**9), "take 8,192 at most"),
        (gpt2(offload="disk"), "offload='disk' was asked for at stage 3: CPUOffloadPolicy takes parameters"),
        (gpt2(offload="host", stage=1), "at stage 1: offload is fully_shard's, and ... take stages 2 and 3"),
        (plan("t5-small"), "t5-small is no decoder of known layers; name one, or take runtime='zerosim'"),
        *((gpt2(stage=asked), f"stage={asked!r} must be all, or some of 0, 1, 2, 3") for asked in ("x", [1.7], None)),
        (gpt2(stage=4), "found 4"),
        (gpt2(stage=[]), "a plan has rows for each stage, and none was asked for; name one at least"),
        (gpt2(recompute="some", runtime="zerosim"), "recompute='some' names no policy"),
        (gpt2(recompute="full"), "recompute='full' is no policy of fsdp2's programs; take some of none, selective, "
         "and block, which is every block, full elsewhere; or runtime='zerosim'"),
        (gpt2(nodes=0), "nodes must be at least 1, got 0"),
        (gpt2(ranks=20), "20 ranks are more than the 8 of a node, as boards are sold; say over how many nodes, as "
         "nodes=3, or nodes=1 where one link joins them all"),
        *((gpt2(ranks=ranks), "ranks must be a whole number, got") for ranks in ("16", 8.5, None)),
        *((gpt2(runtime=typed), f"called '{typed}'; choose one of ... did you mean '{meant}'?") for typed, meant in (
            ("FSDP", "fsdp2"), ("DeepSpeed", "deepspeed"))),
        *((gpt2(offload=places, runtime="megatron", stage=stage), "take stage 1 and offload='optimizer=host'")
          for places, stage in (("host", 1), ("optimizer=host", 0))),
        (gpt2(offload="optimizer=host", runtime="deepspeed", stage=0), "DeepSpeed offloads from stage 1 on; take"),
        (gpt2(runtime="deepspeed", prefetch=2), "at stage 3: DeepSpeed fetches elements ahead, of which its default "
         "number is counted; take prefetch=1 or 0"),
        (gpt2(overlap=False), "reductions always run beside backward in PyTorch; leave overlap as it is"),
        (gpt2(prefetch=0), "at stage 3: FSDP2 gathers one module ahead in backward, which no argument turns off; take "
         "prefetch=1"),
        (gpt2(recompute=3), "recompute=3 must be usual, all, or some policies, as in block,tiled"),
        (gpt2(nodes=2, between=""), "no link is called ''"),
        *((gpt2(**{option: 3}, offload="host"), "no link is called 3; there are nvlink2") for option in (
            "link", "host_link", "disk_link", "between")),
        (gpt2(convention=[]), "no accounting convention is called []; there are zero-paper"),
        (gpt2(sequence=4096), "learned positions for 1024"),
        (gpt2(margin=1), "margin is the share of the device that is to stay free, from 0 to below 1, got 1"),
        (gpt2(utilization=1.5), "utilization is the share of the peak that products reach, above 0 and at most 1"),
        (gpt2(compute="fp8_e4m3"), "do not rest in 8 bits"),
        (gpt2(lora=8, train_only="head"), "train_only='head' is without adapters and quantized weights, and lor"),
        (gpt2(train_only="head", runtime="zerosim"), "a model with frozen weights is of fsdp2 and deepspeed"),
        (gpt2(compiled=True, runtime="megatron"), "compiled=True is of fsdp2 and deepspeed, and this is a plan of meg"),
        (plan("deepseek-v2-lite", lora=8), "has neither q and v nor qkv, which adapters are beside ... down, g"),
        (gpt2(optimizer=8), "take one of zs.optim's, as zs.optim.AdamW() is"),
        (gpt2(optimizer="adamw8"), "no optimizer is called 'adamw8'; choose one of adafactor, "),
        (gpt2(optimizer="adamw8bit", runtime="zerosim"), "optimizer=AdamW8bit is of fsdp2 and deepspeed, and th"),
        (plan(params=7e9, optimizer=zs.optim.Muon(), runtime="zerosim"),
         "what Muon keeps ... none is known; name a model, or"),
        (gpt2(stage="1,2", reduction="micro_batch", runtime="zerosim"), "reduction='micro_batch' is of sharded"),
        *((gpt2(stage=stage, reduction="microbatch"), "reduction='microbatch' is no order of additions; choose "
           "one of rank, micro_batch; did you mean 'micro_batch'?") for stage in (1, 3)),
        (gpt2(attention="flash"), "attention='flash' must be fused, as FlashAttention is, or unfused"),
        (gpt2(offload="optimizer=host", disk_capacity_nbytes=1), "disk_capacity_nbytes=1 is of offload to disk, an"),
        (gpt2(offload="no"), "offload='no' must be 'host' or 'disk'"),
        (gpt2(offload=True), "offload=True must be 'host' or 'disk'"),
        (gpt2(prefetch=-1), "prefetch=-1 must be a number of units, 0 or more"),
        (partial(replace, zs.planning.plan_config("gpt2"), options=StepOptions(bucket_nbytes=1)),
         "bucket_nbytes=1: a plan is of buckets of a unit, since others cut units ... leave it out"),
        (gpt2(offload=zs.Offload(gradients="host")), "a plan takes the optimizer's state off the device first"),
        (gpt2(offload="disk", optimizer=zs.optim.Muon()), "what it reads from disk is not planned"),
        (gpt2(offload="host", disk_link="nvme-pcie4"), "disk_link='nvme-pcie4' is of offload to disk"),
        (lambda: replace(zs.planning.plan_config("gpt2", offload="host"), host_link=None),
         "offload moves state over a host link; name one, as pcie4"),
        (gpt2(overlap=1), "overlap=1 must be True or False"),
        (gpt2(overheads=5, runtime="zerosim"), "overheads are bytes by name, as {'matmul workspace': 0}, got 5"),
    ])


# Calls of which each count is made wrong in turn: what else they take, and the least of each.
COUNTED = [
    (ceil_cut, {}, {"length": 0, "ranks": 1}),
    (cuts.padded_unit_lengths, {"unit_lengths": (4,)}, {"ranks": 1}),
    (Job, {"unit_lengths": (2, 2), "states": STAGES[1]},
     {"ranks": 1, "micro_batches": 1, "recompute_units": 1, "slots": 0, "normed_tensors": 0}),
    (partial(sent, "broadcast", "tree", (0, 4)), {}, {"itemsize": 1}),
    (Network, {"inside": PCIE, "between": ETHERNET}, {"ranks_per_node": 1}),
    (hardware.presets().network, {"link": "pcie4"}, {"ranks": 1, "nodes": 1}),
    (Block, {}, {"batch": 1, "tokens": 1, "channels": 1, "heads": 1, "itemsize": 1}),
    (step_activations.snapshots, {"block": PLAIN}, {"blocks": 1, "vocabulary": 1, "parts_per_unit": 1}),
    *((of, {"block": PLAIN}, {name: 1}) for of, name in (
        (activations.peak_nbytes, "blocks"), (activations.best_segment, "blocks"), (flops.recomputed, "blocks"),
        (activations.logits_nbytes, "vocabulary"))),
    (flops.utilization, {"flops": 1.0, "seconds": 1.0, "flops_per_second": 1.0}, {"devices": 1}),
    *((of, {}, {"parameters": 1, "tokens": 1}) for of in (flops.six_n, flops.eight_n)),
    (flops.six_n_and_attention, {}, {"parameters": 1, "blocks": 1, "query_channels": 1, "tokens": 1}),
    (flops.step_flops, {"model": shapes.PRESETS["gpt2"]}, {"batch": 1, "tokens": 1}),
    (Transformer, {}, {"channels": 1, "blocks": 1, "heads": 1, "vocabulary": 1, "key_value_heads": 0, "tokens": 0,
                       "head_channels": 0, "feed_forward": 0, "positions": 0, "encoder_blocks": 0}),
    (model_of_parameters, {}, {"parameters": 1, "largest_layer": 1}),
    (model_shape, {"source": "gpt2"}, {"vocabulary_multiple": 1}),
    (states_nbytes, {"model": model_of_parameters(9), "states": STAGES[1]}, {"ranks": 1}),
    (estimate_nbytes, {"states": STAGES[1]}, {"parameters": 1, "ranks": 1, "largest_layer": 0}),
    (zs.plan, {"model": "gpt2"}, {"ranks": 1, "batch": 1, "micro_batches": 1, "sequence": 1}),
    (Slow, {"factor": 2}, {"rank": 0, "to": 0}),
    (partial(recording.RecordedTransfer, "to host", "gradient", number=0), {}, {"nbytes": 0}),
]


def test_every_count_is_a_whole_number_of_at_least_its_least_and_below_2_to_the_62_or_a_transformers_28():
    for call, others, least in COUNTED:
        sound = others | dict.fromkeys(least, 1)
        call(**sound)
        most = 28 if call is Transformer else 62
        for name, fewest in least.items():
            refuses((partial(call, **sound | {name: wrong}), f"^{name} must be {said}") for wrong, said in (
                (fewest - 1, f"at least {fewest}, got {fewest - 1}"),
                (1 << 62, f"below 2^{most}, got a number of 63 bits"),
                (1.5, f"a whole number, got 1.5; write {name}=int(")))


# Calls with a number that is made wrong, how it is named, and whether it may be 0.
NUMBERS = [
    (partial(Slow, 0), "the slow rank 0: factor", False),
    (partial(Slow, 0, to=1), "the slow link from 0 to 1: factor", False),
    (lambda value: machine(efficiency=value)(), "the machine: efficiency", False),
    (lambda value: zs.plan("gpt2", utilization=value), "utilization", False),
    (device, "device 'made up': flops_per_second.fp16", False),
    (partial(device, 1e9), "device 'made up': memory_bytes_per_second", False),
    (lambda value: Link("mine", value, 0, "a test", "today"), "link 'mine': bytes_per_second", False),
    (lambda value: Link("mine", 1, value, "a test", "today"), "link 'mine': latency_seconds", True)]


def test_every_rate_share_and_factor_is_a_finite_number_that_a_machine_can_have():
    for call, name, or_zero in NUMBERS:
        finite = f"a finite number {'that is not negative' if or_zero else 'above 0'}, got"
        between = f"between {'0' if or_zero else '1e-30'} and 1e+30, got"
        for wrong, said in ((-1.5, finite), (float("inf"), finite), (float("nan"), finite), (True, finite),
                            ("1", finite), (10**400, between), (0, finite), (1e-31, between)):
            if not or_zero or wrong not in (0, 1e-31):
                refuses([(partial(call, wrong), f"{name} must be {said} {wrong!r:.30}")])


# -- a user's own files -----------------------------------------------------------------------------------------------


WRONG_FILES = [
    ("[links.x]\n", "no table 'links' is known; write [device.NAME] or [link.NAME]"),
    ("link = 3\n", "link must hold tables; write [link.NAME], and its fields under it"),
    ("[link.mine\n", "is no TOML: "),
    (OWN_LINK + "latency = 3\n", "link 'mine' has a field 'latency', which no link has; ... mean 'latency_seconds'"),
    (OWN_LINK + "name = 'x'\n", "link 'mine' has a field 'name', which no link has"),
    (OWN_LINK.replace('source = "measured"', ""), "link 'mine' lacks source"),
    ("[device.mine]\nsource = 'x'\n", "device 'mine' lacks capacity_nbytes, ... flops_per_second, date"),
    (OWN_LINK.replace("400e9", "1e-31"), "bytes_per_second must be between ..., got 1e-31; look at its unit"),
    (OWN_LINK.replace('"measured"', '" "'), "source must be a text, got ' '; a number without a source cannot be"),
    (OWN_LINK.replace("400e9", 5000 * "1"), "is no TOML: Exceeds the limit"),
    ("a = " + 5000 * "[", "is no TOML: maximum recursion depth exceeded"),
    (OWN_DEVICE.replace("96e9", "96.5"), "device 'mine': capacity_nbytes must be a whole number of bytes, got 96.5"),
    (OWN_DEVICE.replace("{ bf16 = 1e15 }", "{}"), "flops_per_second must give a dense rate for some of fp32, tf32"),
    (OWN_DEVICE.replace("bf16 =", "bfp16 ="), "flops_per_second has no format 'bfp16'; there are ...; did you mean "),
    (OWN_DEVICE + "host_link = 5\n", "device 'mine': host_link must be"),
    (OWN_DEVICE + 'platform = "gpu"\n', "device 'mine': platform must be one of cuda, hopper, rocm, tpu, got 'gpu'"),
    (OWN_DEVICE + "usable_nbytes = 96e9\n", "usable_nbytes must be at most reported_nbytes, 95,000,000,000, got 9"),
    (OWN_DEVICE + "cards_per_device = -1\n", "device 'mine': cards_per_device must be a finite number above 0, got -1"),
    (OWN_LINK.replace("mine", "nvlink4"), "the link 'nvlink4' comes along already; give yours a name of its own"),
    ("# caf\xe9\n".encode("latin-1"), "is no TOML: 'utf-8' codec can't decode byte 0xe9 in position 5"),
]


def test_what_is_wrong_with_a_file_of_hardware_is_said_with_its_name_and_place(tmp_path):
    path = tmp_path / "mine.toml"
    for text, said in WRONG_FILES:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        refuses([(partial(hardware.read, path), said), (partial(hardware.read, path), str(path))])
    refuses([(partial(hardware.read, tmp_path / "none.toml"), "none.toml' cannot be read: No such file or directory")])


def test_a_device_of_ones_own_may_leave_its_host_link_out_until_something_is_offloaded(tmp_path):
    path = tmp_path / "own.toml"
    offloaded = gpt2(device="mine", hardware=path, offload="host")
    for text, said in ((OWN_DEVICE, "the device mine does not say by which link it is connected to its host; name one"),
                       (OWN_DEVICE + 'host_link = "pcie6"\n', "no link is called 'pcie6'")):
        path.write_text(text)
        refuses([(partial(offloaded, link="pcie5"), said), (partial(zs.plan, "gpt2", device="mine", hardware=path),
                 "the device mine does not say by which link the devices of a node are connected; name one")])
        assert zs.plan("gpt2", device="mine", hardware=path, link="pcie5").rows
        assert offloaded(host_link="pcie5", link="pcie5").rows


def test_a_configuration_file_that_is_not_there_or_is_not_json_is_refused(tmp_path):
    path = tmp_path / "config.json"
    refuses([(partial(model_shape, tmp_path), "config.json was asked for, and is not there; give the path of"),
             *((partial(model_shape, blank), f"^no model is called '{blank}', and there is no such file")
               for blank in ("", " "))])
    for data, said in ((b"{gpt2", "Expecting property name ...; give the path of"), (b"\xff\xfe{}", "'utf-8' codec"),
                       (b"[" * 200_000, "it is nested more than 100 levels deep; give the path of")):
        path.write_bytes(data)
        refuses([(partial(model_shape, path), f"config.json is not JSON: {said}")])


# -- recordings -------------------------------------------------------------------------------------------------------


EXCHANGED = program_of(("shift", 1))
ISSUED_WAITED_AND_EXCHANGED = program_of((("all_gather", "ring"), 2, True), ("wait",), ("shift", 1))
WRONG_FIELDS = [
    (("format",), "other", 'this is no recording: it lacks "format": "zerosim recording"'),
    (("version",), 2, "this recording is of version 2, and version 1 can be read"),
    (("calls",), None, "this recording cannot be read: ... it was changed since"),
    *(((table,), [], f"row ... points to {one} ..., of which there are 0")
      for table, one in (("words", "kind"), ("calls", "call"), ("messages", "message"), ("paths", "path"))),
    (("shapes",), [], "this recording cannot be read: list index out of range"),
    (("paths", 0), [3], "words, paths, purposes and algorithms are texts, found 3"),
    (("program_of_rank",), [0, 5], "each with one of its 2 programs, ...; found programs [0, 5] in use"),
    (("program_of_rank",), [], "a recording needs ranks"),
    (("shapes", 0, "root"), None, "a number of a recorded all_gather must be a whole number, got None"),
    (("shapes", 0, "itemsize"), 10**400, "a number of a recorded all_gather must be below 2^62, got a number of"),
    (("shapes", 0, "algorithm"), [], "words, paths, purposes and algorithms are texts, found []"),
    (("shapes", 0, "cut"), lambda cut: [*cut, cut[-1]], "all_gather of ranks 0, 1 is cut at ... needs 3 rising bound"),
    (("shapes", 0, "cut"), lambda cut: [0, cut[-1] + 1, cut[-1]], "it needs 3 rising boundaries from 0 on"),
    (("messages", 0, 0), -1, "a number of a recorded message must be at least 0, got -1"),
    (("messages", 0, 1), "x", "a number of a recorded message must be a whole number, got 'x'"),
    (("messages", 0, 3), 7, "words, paths, purposes and algorithms are texts, found 7"),
    (("transfers",), [["sideways", "g", 5, 0]],
     "a transfer goes to host, to device, to disk, from disk, found 'sideways'"),
    (("programs", 0, "rows"), "CHX", "this recording has rows X, and the letters of rows are CHGIWMBE"),
    (("programs", 0, "rows"), "C", "a program's columns must be equally long, got 1, "),
    (("programs", 0, "first"), ["a"], "invalid literal"),
    (("programs", 0, "first"), [2**63], "this recording cannot be read"),
    (("programs", 0, "rows"), lambda rows: rows.translate(str.maketrans("IW", "WI")), "0 that is not issued before"),
    (("programs", 0, "rows"), lambda rows: rows.replace("W", "I"), "row ... issues the all_gather of call 0 a second"),
]


def test_a_changed_recording_is_refused_and_the_change_named():
    def read(path, to):
        entry = plain = recording.to_plain(recorded(2, ISSUED_WAITED_AND_EXCHANGED))
        *inner, last = path
        for key in inner:
            entry = entry[key]
        entry[last] = to(entry[last]) if callable(to) else to
        return recording.from_plain(plain)

    refuses((partial(read, path, to), text) for path, to, text in WRONG_FIELDS)
    plain = recording.to_plain(step(2))
    refuses((partial(recording.from_plain, {other: plain[other] for other in plain if other != key}),
             f"this recording lacks '{key}'; it is cut short") for key in set(plain) - {"format", "version"})


def late(rank):
    work = rank.all_reduce(np.ones(3), async_op=True)
    with rank.trace.span("late"):
        work.wait()


def in_another_order(rank):
    pairs = [rank.split(0), rank.split(0)]
    works = {pair: pair.all_reduce(np.ones(4, np.float32), async_op=True)
             for pair in (pairs if rank.index == 0 else pairs[::-1])}
    for pair in pairs:
        works[pair].wait()


MOVED = recording.RecordedTransfer("to host", "gradient", 500, 0)
GOING = Transfer("to host", "gradient", 500, 0, ())
RECORDINGS = [
    (lambda: step(2).inside("stride"), "inside the span 'stride', of which a rank has 0; it must have one. Its spans"),
    (lambda: recorded(2, late).inside("late"), "inside the span 'late' a rank waits for the all_reduce of call 0"),
    (lambda: recording.record(traces(3)[:1]).on_ranks(4), "found a call of ranks 0, 1, 2; record every rank"),
    (lambda: recorded(3, program_of(("compute", [0, 1, 2]))).on_ranks(3), "3 different programs; record every rank"),
    (lambda: recording.record(traces_of(2, EXCHANGED)[:1]).on_ranks(2), "between single ranks; record every rank"),
    (lambda: recording.record([zs.ranks.Trace([object()])]), "a row of class object, and a recording knows Compute"),
    (lambda: recording.record([]), "a recording needs ranks"),
    (lambda: recorded(1, lambda rank: rank.trace.compute(flops=2**63)), "flops or bytes past 2^63"),
    (lambda: recording.record([traces(2, 1, "plain")[0], traces(2, 3, "plain")[1]]), "two ranks disagree about call 0"),
    (lambda: replace(recording.record(traces(3, 2, "plain", widths=EVEN)), program_of_rank=(0,) * 4),
     "rank 3 takes part in a reduce_scatter of ranks 0, 1, 2, and is none of them"),
    (lambda: recording.record([zs.ranks.Trace([GOING, *[TransferWait(GOING)] * 2])]),
     "row 2 waits for the transfer of gradient to host that is not issued before it, or that was waited for already"),
    (lambda: replace(recorded(1, program_of(("compute", 1))), paths=((),)), "begins or ends at path 0, which is empty"),
    (lambda: replace(recorded(1, program_of(*[("to host", 5)] * 2)), transfers=(MOVED,)), "points to transfer 1, of "),
    (lambda: replay(recording.record(traces_of(2, EXCHANGED)[:1]), MACHINE),
     "rank 0: waits for a message to rank 1 and from rank 1"),
    (lambda: replay(recording.record(traces(3, 2, "plain")[:1]), MACHINE),
     "rank 0: waits for reduce_scatter (call 0 of ranks 0, 1, 2; there: 0)"),
    (lambda: replay(recorded(2, in_another_order), MACHINE), "without end; issue in the same order on all ranks, and "
     "record again.\nrank 0: waits for all_reduce (call 0 of ranks 0, 1; there: 0)\nrank 1: waits for all_reduce (call "
     "0 of ranks 0, 1; there: 0), behind all_reduce (call 0 of ranks 0, 1; there: 1)"),
]


def test_what_cannot_be_recorded_or_replayed_is_refused():
    refuses(RECORDINGS)


def test_files_of_recordings_and_timelines_that_cannot_be_read_or_written_are_refused(tmp_path):
    nowhere, text, data = (tmp_path / name for name in ("nothing/run.json", "text", "list"))
    text.write_text("no json")
    data.write_text("[]")
    refuses([
        (partial(recording.load, nowhere), "cannot be read: No such file or directory; name a file that --save"),
        (partial(recording.load, text), "is no JSON: Expecting value"),
        (partial(recording.load, data), "this is no recording"),
        (partial(recording.save, step(2), nowhere), "asked to save a recording as ... but: No such file or"),
        (partial(replay(step(2), MACHINE).save_chrome_trace, nowhere),
         "asked to save a timeline as ... but: No such file or directory; name a file")])
