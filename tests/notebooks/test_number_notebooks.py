"""The notebooks on numbers and on mixed precision: what their prose says is so."""

import re

import numpy as np
import pytest

import zerosim as zs
from tests.architecture.source import ROOT
from tests.notebooks.cells import changed, committed, executed, printed_in

NUMBERS = ROOT / "notebooks/02_numbers_and_lost_updates.py"
SCALING = ROOT / "notebooks/03_mixed_precision_and_loss_scaling.py"


def printed(path) -> str:
    """Everything that the cells of the committed copy printed, which is what they print now, as another test says."""
    return "".join(printed_in(outputs) for _, outputs in committed(path.with_suffix(".ipynb")))


def test_the_numbers_that_the_prose_speaks_of_are_printed_and_those_of_numpy():
    numbers, scaling = printed(NUMBERS), printed(SCALING)
    assert f"2.1 becomes {float(np.float16(2.1)):.10g} in fp16" in numbers
    for value in ("2049", "2051", "70000", "4e-08", "2e-08"):
        with np.errstate(over="ignore"):
            assert f"{value} becomes {float(np.float16(value)):.10g} in fp16" in numbers
    for words in ("fp16    5 bits   10 bits        65504      6.104e-05     5.96e-08        2^-10",
                  "bf16    8 bits    7 bits", "1. fp32: 1 and a thousand times 0.0001 make 1.100017",
                  "1. fp16: 1 and a thousand times 0.0001 make 1\n", "1. bf16: 1 and a thousand times 0.0001 make 1\n",
                  "2. fp16: 1 + 0.0003 = 1, 1 - 0.0003 = 0.999512"):
        assert words in numbers
    for g, fp16 in ((1e-3, 0.001000404358), (1e-6, 1.013278961e-06), (5e-8, 5.960464478e-08), (2e-8, 0)):
        assert float(np.float16(g)) == pytest.approx(fp16, rel=1e-9)
        assert re.search(rf"{g:.0e} +{fp16:.10g} ", scaling)
        assert float(np.float32(np.float16(1024 * g)) / 1024) == pytest.approx(g, rel=1.3e-3)
    # It is rank 2 alone in step 5, and the sum alone in step 6.
    for words in (r"step +5: S = 2\^16, own gradients overflow on ranks \[2\] +all skip",
                  r"step +6: S = 2\^15, own gradients overflow on ranks \[\] +all skip",
                  r"step +7: S = 2\^14, .* all update, from here on\nstep 23: S = 2\^15",
                  r"fp16, S = 2\^-16: largest input 5.67e\+04, largest outputs of the layers 5.24e\+04 inf inf",
                  "Adam: 100% of the weights are the same"):
        assert re.search(words, scaling), words
    assert scaling.count("gradients not finite") == 2


def test_fp32_keeps_the_popular_update_below_a_quarter_alone():
    weights = np.float32([0.2, 0.24999, 0.25, 0.26, 0.4999, 0.5, 1])
    kept = [list(weights + np.float32(update) != weights) for update in (1e-8, -1e-8)]
    assert kept == [[True, True, False, False, False, False, False], [True, True, True, False, False, False, False]]


def test_without_a_master_the_weights_stand_still_in_bf16_sooner_than_in_fp16():
    rows = re.findall(r"(fp16|bf16), (with|no  ) master: loss [\d.]+ at first, ([\d.e-]+) at the end; the last step "
                      r"moved +(\d+)%", NUMBERS.with_suffix(".ipynb").read_text(encoding="utf-8"))
    losses = {(name, master.strip()): float(loss) for name, master, loss, _ in rows}
    moved = {(name, master.strip()): int(share) for name, master, _, share in rows}
    assert len(rows) == 4
    for name in ("fp16", "bf16"):
        assert moved[name, "no"] < 50 < 100 == moved[name, "with"]
        assert losses[name, "no"] > 10 * losses[name, "with"]
    assert losses["bf16", "no"] > 10 * losses["fp16", "no"]
    assert moved["bf16", "no"] < moved["fp16", "no"]


def test_scaling_lifts_gradients_out_of_underflow_until_they_overflow():
    fates = {int(e): tuple(map(int, rest)) for e, *rest in re.findall(
        r"S = 2\^(\d+) *: of 1344 gradients +(\d+) are lost, +(\d+) have fewer bits, +(\d+) are inf", printed(SCALING))}
    assert sum(fates[0]) > 1344 * 0.9
    assert fates[24] == (0, 0, 0)
    assert fates[32][2] > 1000


def test_with_a_low_first_scale_no_step_is_skipped():
    text = changed(SCALING,
                   ("FIRST_SCALE, WINDOW, STEPS = 2.0**20, 16, 24", "FIRST_SCALE, WINDOW, STEPS = 2.0**10, 4, 24"),
                   ("before = None\n", "assert any(skip for _, skip, _ in ranks[0]), 'nobody'\nbefore = None\n"))
    with pytest.raises(AssertionError, match="nobody"):
        list(executed(re.sub(r"^figures\..*$", "None", text, flags=re.M)))


def test_who_forgets_to_divide_by_the_scale_has_huge_moments_and_almost_the_same_weights():
    text = SCALING.read_text(encoding="utf-8")
    start, end = text.index("MODEL = "), text.index("cluster = zs.Cluster(3)")
    code = "\n".join(line for line in text[:end].split("\n") if not line.startswith(("#", "figures.")))
    assert start < end
    found = []
    for source in (code, code.replace("np.float32(scale * rank.size)", "np.float32(rank.size)")):
        namespace = {}
        exec(source, namespace)
        found.append(zs.Cluster(3).run(namespace["train_by_hand"])[0][1])
    right, wrong = found
    assert np.abs(wrong["m"]).max() > 10_000 * np.abs(right["m"]).max()
    assert np.abs(wrong["master"] - right["master"]).max() < 0.001 < 1 < np.abs(right["master"]).max()
    assert wrong["master"].tobytes() != right["master"].tobytes()
