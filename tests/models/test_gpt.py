"""GPT: its shapes, first values, gradients, and units of any granularity."""

from dataclasses import replace

import numpy as np
import pytest

from tests.models.contexts import bits_of
from tests.models.runs import batch_of, run_of
from zerosim.models import GPT, PRESETS, GPTConfig, Llama, LlamaConfig

NANO = PRESETS["gpt-nano"]
# Published: Radford et al. 2019 (their 117M and 345M have been corrected since); the checkpoints have exactly these.
PUBLISHED = {"gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200}
GRANULARITIES = ["block", "sub_block", 1, 2, 3, 9]


def same_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all((bits_of(a[name]) == bits_of(b[name])).all() for name in a)


# -- shapes and first values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_the_parameters_are_tables_12_squares_and_13_rows_a_block_and_two_last_rows(preset: str) -> None:
    config = PRESETS[preset]
    v, t, c, layers = config.vocabulary, config.context, config.channels, config.layers
    tied = v * c + t * c + layers * (12 * c * c + 13 * c) + 2 * c
    assert GPT(preset).parameter_count == tied == PUBLISHED.get(preset, tied)
    assert GPT(preset, tied=False).parameter_count == tied + v * c


def test_the_units_are_the_embedding_the_blocks_and_the_head() -> None:
    assert [unit.name for unit in GPT("gpt-nano").units] == ["embed", "block0", "block1", "head"]
    five = GPT(replace(NANO, layers=5), units=2)
    assert [unit.name for unit in five.units] == ["embed", "block0-1", "block2-3", "block4", "head"]


def test_first_values_are_gpt2s_and_a_llama_has_the_same() -> None:
    """0.02 everywhere, on residual projections 0.02/√(2·layers); norms 1, and 0 where they add; biases 0."""
    of = {"layers": 8, "channels": 96, "heads": 2, "context": 64, "vocabulary": 64}
    qwen = LlamaConfig(**of, feed_forward=96, biases=("qkv", "projection", "feed_forward"), head_norms=True)
    for name, value in (*run_of(GPT(GPTConfig(**of))).w.items(), *run_of(Llama(qwen)).w.items()):
        if value.ndim == 1:
            assert (value == (0 if name.endswith(".bias") else 1)).all(), name
        else:
            wanted = 0.02 / 4 if name.endswith(("projection.weight", "down.weight")) else 0.02
            # 4096 or more normal values: their deviation is within 6 of its own, 1/√(2n), of the true one.
            assert abs(value.std() / wanted - 1) < 6 / (2 * value.size)**0.5, name


# -- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("units", GRANULARITIES)
def test_the_granularity_changes_no_name_no_first_value_and_no_bit_of_loss_and_gradients(dtype: str, units: str | int):
    models = [GPT(replace(NANO, layers=3), seed=seed, units=of) for seed, of in ((5, "block"), (5, units), (6, units))]
    one, other, of_another_seed = (run_of(model, dtype, 0.2) for model in models)
    assert list(one.model.shapes.items()) == list(other.model.shapes.items())
    assert same_bits(one.w, other.w)
    assert not same_bits(one.w, of_another_seed.w)
    (loss, gradients), (other_loss, other_gradients) = (run.gradients(*batch_of(run.model)) for run in (one, other))
    assert loss == other_loss
    assert same_bits(gradients, other_gradients)


# -- dropout ----------------------------------------------------------------------------------------------------------


def test_every_place_of_dropout_draws_random_numbers_of_its_own() -> None:
    run, names = run_of(GPT(replace(NANO, dropout=0.5))), []
    draw = run.ctx.draw
    run.ctx = replace(run.ctx, draw=lambda name, *words: names.append(name) or draw(name, *words))
    run.output(batch_of(run.model)[0])
    assert names == ["embed", "block0.attention", "block0.ffn", "block1.attention", "block1.ffn"]
