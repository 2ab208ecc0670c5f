# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python (Pyodide)
#     language: python
#     name: python
# ---

# %% [markdown]
# # ZeRO in the browser
#
# Nothing is installed on your computer: this Python runs in the page. The course's notebooks lie beside this one. They
# run ranks, which take turns on stacks of their own: that takes a browser with JavaScript Promise Integration, Chrome
# 137 or later, say. What this notebook has runs in any: ZeRO in one file, number formats, and plans.

# %%
import sys

if sys.platform == "emscripten":  # in a browser; elsewhere zerosim is installed already
    import piplite

    await piplite.install("zerosim")

# %% [markdown]
# ## DDP and ZeRO's three stages
#
# **Predict**: which stages hold less between two steps, and which one sends more than DDP? Then run it.

# %%
from zerosim import tiny

sys.argv = ["tiny", "4"]  # the number of ranks; try 8
tiny.main()

# %% [markdown]
# All four end with the same loss, since they compute the same numbers: a stage only says where they rest. A training of
# one's own, on three ranks, each with data of its own:

# %%
import ml_dtypes
import numpy as np

draw = np.random.default_rng(0).normal
model = [draw(0, 1 / 4, (16, 8)).astype(np.float32)]
data = [[[(draw(size=(4, 16)), draw(size=(4, 8)))] for rank in range(3)] for step in range(5)]
ends = {stage.__name__: tiny.train(stage, model, data, ml_dtypes.bfloat16, lr=0.01)
        for stage in (tiny.DDP, tiny.ZeRO1, tiny.ZeRO2, tiny.ZeRO3)}
for name, ranks in ends.items():
    print(f"{name:6} loss {ranks[0].losses[-1]:.6f}, rank 0 sent {ranks[0].rank.sent_nbytes:,} bytes")

# %% [markdown]
# ## What 16 bits lose
#
# Near 1 two neighbors in fp16 are 2^-10 apart, in bf16 2^-7. A smaller update is lost.

# %%
import zerosim as zs

for name in ("fp32", "fp16", "bf16"):
    print(name, zs.spacing(1.0, name), zs.round_to(np.float32([1.0001, 1.001, 1.01]), name))

# %% [markdown]
# ## Does it fit?

# %%
zs.plan("llama-2-7b", ranks=8, device="h100", batch=4, sequence=2048)

# %% [markdown]
# Change the model, the device, the number of ranks; `zs.planning.PRESETS` has the models.

# %%
assert len({tuple(ranks[0].losses) for ranks in ends.values()}) == 1  # every stage: the same losses, bit for bit
sent = {name: ranks[0].rank.sent_nbytes for name, ranks in ends.items()}
assert sent["DDP"] == sent["ZeRO1"] == sent["ZeRO2"]
assert 2 * sent["ZeRO3"] == 3 * sent["DDP"]
