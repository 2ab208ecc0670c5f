"""The ring beside JAX's: the same hops by `jax.lax.ppermute` on CPU devices, which share no line with ours."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest

import zerosim as zs

RANKS, LENGTHS, FORMATS = 4, (4, 64, 4096), ("fp32", "bf16", "fp16")

# Each device's shard of x is one rank's vector of N chunks: chunk c starts on rank c+1 and goes once round.
JAX_RING = '''
import json, os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P

ranks, asked = 4, json.load(sys.stdin)
mesh = Mesh(np.array(jax.devices()[:ranks]), ("rank",))
onwards = [(rank, (rank + 1) % ranks) for rank in range(ranks)]

def ring(x):
    index, chunks = jax.lax.axis_index("rank"), x.reshape(ranks, -1)
    chunk = lambda c: jax.lax.dynamic_index_in_dim(chunks, c % ranks, keepdims=False)
    partial = chunk(index - 1)
    for step in range(ranks - 1):
        partial = jax.lax.ppermute(partial, "rank", onwards) + chunk(index - 2 - step)
    whole, moving = [partial], partial
    for step in range(ranks - 1):
        moving = jax.lax.ppermute(moving, "rank", onwards)
        whole.append(moving)
    places = (index - jnp.arange(ranks)) % ranks
    return jnp.zeros_like(chunks).at[places].set(jnp.stack(whole)).reshape(x.shape)

run = jax.jit(jax.shard_map(ring, mesh=mesh, in_specs=P("rank"), out_specs=P("rank")))
for name, words in asked:
    dtype = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}[name]
    x = np.array(words, {4: np.uint32, 2: np.uint16}[jnp.dtype(dtype).itemsize]).view(dtype)
    print(json.dumps(np.asarray(run(x)).view(f"u{x.dtype.itemsize}").tolist()))
'''


@pytest.mark.peer
@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed; pip install jax")
def test_an_all_reduce_has_the_bits_of_a_ring_of_jaxs_own_permutes() -> None:
    asked, expected = [], []
    for name in FORMATS:
        for length in LENGTHS:
            dtype = zs.FORMATS[name].dtype
            vectors = np.random.default_rng(length).standard_normal((RANKS, length)).astype(np.float32).astype(dtype)
            asked.append((name, vectors.reshape(-1).view(f"u{dtype.itemsize}").tolist()))
            sums = zs.Cluster(RANKS).run(lambda rank, vectors=vectors: rank.all_reduce(vectors[rank.index]))
            expected.append(np.concatenate(list(sums)).view(f"u{dtype.itemsize}").tolist())
    done = subprocess.run([sys.executable, "-c", JAX_RING], input=json.dumps(asked), text=True, capture_output=True,
                          check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [json.loads(line) for line in done.stdout.splitlines()] == expected
