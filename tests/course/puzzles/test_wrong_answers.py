"""The common wrong answers are refused, each with the sentence that says why: one table for puzzles and for graders."""

import pytest

from tests.course.puzzles.answers import changed, graded, refusal, written
from zerosim.course import puzzles

NAIVE_BROADCAST = """
def broadcast(rank, x):
    for other in range(1, rank.size):
        if rank.index == 0:
            rank.send(x, other)
        elif rank.index == other:
            rank.recv(x, 0)
    return x
"""
CHAIN = """
def broadcast(rank, x):
    if rank.index > 0:
        rank.recv(x, rank.index - 1)
    if rank.index < rank.size - 1:
        rank.send(x, rank.index + 1)
    return x
"""
IN_RANK_ORDER = """
def ring(rank, x):
    n, N, k = len(x), rank.size, -(-len(x) // rank.size)
    chunk = lambda c: slice(min(n, c % N * k), min(n, (c % N + 1) * k))
    own = chunk(rank.index)
    parts = {rank.index: x[own]}
    for step in range(1, N):
        source = (rank.index - step) % N
        parts[source] = rank.memory.alloc(len(x[own]), x.dtype, "workspace")
        rank.exchange(x[chunk(rank.index + step)], (rank.index + step) % N, parts[source], source)
    total = rank.memory.alloc(len(x[own]), x.dtype, "workspace")
    total[...] = parts[0]
    for source in range(1, N):
        total += parts[source]
    return total
"""
# The right chunks, but every rank sends its whole vector round.
WASTEFUL = """
def ring(rank, x):
    n, N, k = len(x), rank.size, -(-len(x) // rank.size)
    own = slice(min(n, rank.index * k), min(n, (rank.index + 1) * k))
    others = [rank.memory.alloc(n, x.dtype, "workspace") for _ in range(N)]
    others[rank.index][...] = x
    for step in range(1, N):
        rank.exchange(x, (rank.index + step) % N, others[rank.index - step], (rank.index - step) % N)
    total = others[(rank.index + 1) % N][own].copy()
    for step in range(2, N + 1):
        total += others[(rank.index + step) % N][own]
    return total
"""
THE_OTHER_WAY = [("partial = x[chunk(rank.index - 1)]", "partial = x[chunk(rank.index + 1)]"),
                 ("rank.index - 2 - step", "rank.index + 2 + step"),
                 ("(rank.index + 1) % N, landing, (rank.index - 1) % N",
                  "(rank.index - 1) % N, landing, (rank.index + 1) % N")]
ONE_FURTHER = [("x[chunk(rank.index - 1)]", "x[chunk(rank.index)]"), ("rank.index - 2 - step", "rank.index - 1 - step")]
EVERYONE = """
def all_reduce(rank, x):
    N, parts = rank.size, {rank.index: x}
    for step in range(1, N):
        source = (rank.index - step) % N
        parts[source] = rank.memory.alloc(len(x), x.dtype, "workspace")
        rank.exchange(x, (rank.index + step) % N, parts[source], source)
    total = rank.memory.alloc(len(x), x.dtype, "workspace")
    total[...] = parts[0]
    for source in range(1, N):
        total += parts[source]
    return total
"""
SEND_FIRST = ("rank.exchange(partial, (rank.index + 1) % N, landing, (rank.index - 1) % N)",
              "rank.send(partial, (rank.index + 1) % N); rank.recv(landing, (rank.index - 1) % N)")

EACH_MICRO_BATCH = [("        total += gradient\n    rank.all_reduce(total, out=total)",
                     "        total += rank.all_reduce(gradient)"),
                    ("total[...] = gradients[0]", "total[...] = rank.all_reduce(gradients[0])")]
EACH_TENSOR = """
def ddp(rank, gradients):
    means = [rank.all_reduce(g) for g in gradients]
    for mean in means:
        mean /= rank.size
    return means
"""
ALL_REDUCED = [("mean = rank.reduce_scatter(gradient)", "mean = rank.all_reduce(gradient)[own]")]
KEPT = """
def zero2(rank, lengths, gradient_of):
    gradients = {layer: gradient_of(layer) for layer in reversed(range(len(lengths)))}
    shards = [None] * len(lengths)
    for layer in reversed(range(len(lengths))):
        shards[layer] = rank.reduce_scatter(gradients.pop(layer))
        shards[layer] /= rank.size
    return shards
"""
KEEPS = ("        x = layer.forward(w, x)\n        del w",
         "        x = layer.forward(w, x)\n        inputs[-1] = (w, inputs[-1])")
LEAK = [KEEPS, ("inputs.pop()", "inputs.pop()[1]")]
NOT_AGAIN = [KEEPS, ("w = rank.all_gather(shards[number], length=n)", "w, kept = inputs.pop()"),
             ("inputs.pop(), dy", "kept, dy")]
ALONE = """
def zero2(rank, lengths, gradient_of):
    shards = [None] * len(lengths)
    for layer in reversed(range(len(lengths))):
        n, k = lengths[layer], -(-lengths[layer] // rank.size)
        shards[layer] = gradient_of(layer)[rank.index * k:][:k] / rank.size
    return shards
"""
WAITS_AT_ONCE = """
def overlap(rank, lengths, gradient_of):
    shards = [None] * len(lengths)
    for layer in reversed(range(len(lengths))):
        gradient = gradient_of(layer)
        shards[layer] = rank.reduce_scatter(gradient, async_op=True).wait()
        shards[layer] /= rank.size
        del gradient
    return shards
"""
WAITS_AT_THE_END = """
def overlap(rank, lengths, gradient_of):
    works = [rank.reduce_scatter(gradient_of(layer), async_op=True) for layer in reversed(range(len(lengths)))]
    shards = [work.wait() for work in works[::-1]]
    for shard in shards:
        shard /= rank.size
    return shards
"""
GATHERS_ALL = """
def lamb(rank, weights, direction, valid, bias, bias_direction, lr):
    def squares(x):
        wide = x.astype(np.float64)
        return np.dot(wide, wide)
    every = [rank.all_gather(x) for x in (weights, direction)]
    real = rank.all_reduce(np.array([valid], np.int64))[0]
    ratio = np.sqrt((squares(every[0][:real]) + squares(bias)) / (squares(every[1][:real]) + squares(bias_direction)))
    weights[:valid] -= lr * np.float32(ratio) * direction[:valid]
    bias -= lr * np.float32(ratio) * bias_direction
    return weights, bias
"""
LATE_BIAS = [("    total[0] += squares(bias)\n    total[1] += squares(bias_direction)\n", "")]
EARLY_BIAS = [*LATE_BIAS, ("squares(weights[:valid])", "squares(weights[:valid]) + squares(bias)"),
              ("squares(direction[:valid])", "squares(direction[:valid]) + squares(bias_direction)")]
PADDED = [("partial[0] = squares(weights[:valid])", "partial[0] = squares(weights)"),
          ("partial[1] = squares(direction[:valid])", "partial[1] = squares(direction)")]
ONLY_IF_BAD = [("    flags = rank.all_gather(flag)\n    if flags.any():",
                "    if flag.any():\n        rank.all_gather(flag)")]
NOT_LEAKING = ("    weights = [rank.all_gather(shard, length=n) for shard in shards]\n    for w in weights:\n",
               "    for shard in shards:\n        w = rank.all_gather(shard, length=n)\n")
AVERAGED = ("    return x, partial", "    mean = rank.memory.alloc(len(partial), np.float32, 'gradient')\n"
            "    mean[...] = partial\n    mean /= N\n    return x, mean")

KEEPS_ALL = ("state = {name: new_state(rank, optimizer, own.stop - own.start) "
             "for name, own in self.own.items()}",
             "state = {name: new_state(rank, optimizer, len(w)) for name, w in self.parameters.items()}")
WITH_ALL = ("self.state[name], self.steps)\n            self.rank.all_gather(w[own]",
            "{k: v[own] for k, v in self.state[name].items()}, self.steps)\n"
            "            self.rank.all_gather(w[own]")
IN_A_BUCKET = ("        for gradient in gradients.values():\n"
               "            self.rank.all_reduce(gradient, out=gradient)\n",
               "        flat = np.concatenate([g.reshape(-1) for g in gradients.values()])\n"
               "        self.rank.all_reduce(flat, out=flat)\n        start = 0\n"
               "        for gradient in gradients.values():\n"
               "            gradient.reshape(-1)[...] = flat[start:start + gradient.size]\n"
               "            start += gradient.size\n")

# Of each: the puzzle, what is changed in its solution (or a whole answer), and words of the refusal. What any puzzle
# refuses, `test_wrong_everywhere` asks of all.
WRONG = [
    ("mean", [("total /= rank.size", "pass")],
     "On N=2 (n=1) rank 0 returned the sum, and not the mean: element 0 is "),
    ("mean", [("total /= rank.size", "total /= rank.size ** 2")], "On N=2 (n=1) rank 0 divided twice: "),
    ("mean", [("total: Array = rank.all_reduce(x)", "total = x.copy()")],
     "divided its own number, and knows nothing"),
    ("mean", [("rank.all_reduce(x)", "x"), ("total /= rank.size", "")],
     "On N=2 (n=1) rank 0 returned its own number: "),
    ("mean", [("return total", "pass")],
     "On N=1 (n=1) rank 0 returned what is wrong: the result is None where an array of shape (1,) is expected."),
    ("mean", [("return total", "return float(total[0])")], "the result is a float where an array of shape (1,)"),
    ("mean", [("return total", "return total.reshape(1, 1)")], "the result has shape (1, 1) where (1,) is expected"),
    ("mean", [("all_reduce(x)", "all_reduce(x.astype(np.float64))")],
     "the result is float64 where float32 is expected"),
    ("mean", [("rank.all_reduce(x)", "rank.all_reduce(x) if rank.index else x.copy()")],
     "On N=2 (n=1) no rank can go on: rank 0: finished; rank 1: in all_reduce(call 0, (1,), float32) at "
     "answer.py:3 in "),
    ("mean", [("rank.all_reduce(x)", "rank.all_gather(x).sum(keepdims=True)")],
     "it calls all_gather, but this puzzle is to be solved with exchange, all_reduce"),
    ("broadcast", NAIVE_BROADCAST,
     "On N=4 (n=3) there are 3 steps in sequence where 2 are enough: ranks that have x"),
    ("broadcast", CHAIN, "On N=4 (n=3) there are 3 steps in sequence where 2 are enough"),
    ("broadcast", [("if rank.index + distance < rank.size:", "if True:")],
     "On N=3 (n=2) rank 1 raised ValueError in line "),
    ("broadcast", [("rank.recv(x,", "rank.recv(x.copy(),")], "On N=2 (n=1) rank 1 kept its own x: element 0 is "),
    ("broadcast", [("rank.recv(x, rank", "rank.send(x, rank")],
     "On N=2 (n=1) no rank can go on: rank 0: in send((1,), "),
    ("broadcast", [("distance *= 2", "break")], "rank 2 returned what is wrong: element 0 is "),
    ("broadcast", "def broadcast(rank, x):\n    return rank.broadcast(x)",
     "it calls broadcast, but this puzzle is to be solved with exchange."),
    ("ring", [("landing += own", "pass")], "On N=2 (n=1) rank 0 left out its own copy: element 0 is "),
    ("ring", THE_OTHER_WAY, "On N=4 (n=3) rank 1 let the chunks go round the ring the other way: element 0 is "),
    ("ring", IN_RANK_ORDER, "On N=3 (n=2) rank 0 added in the order of the ranks, and not in that of the ring: "),
    ("ring", ONE_FURTHER,
     "On N=2 (n=1) rank 0 returned the chunk that the next rank owns: the result has shape (0,) where"),
    ("ring", [("return partial", "return partial / N")], "On N=2 (n=1) rank 0 returned the mean, and not the sum"),
    ("ring", [SEND_FIRST], "On N=2 (n=1) no rank can go on: rank 0: in send("),
    ("ring", [("k = -(-n // N)", "k = n // N")], "On N=2 (n=1) "),
    ("ring", [("range(N - 1)", "range(N - 2)")], "On N=2 (n=1) rank 0 "),
    ("ring", WASTEFUL, "On N=2 (n=6) a rank sends 24 bytes where 12 are enough: each chunk leaves a rank once"),
    ("ring", "def ring(rank, x):\n    return rank.reduce_scatter(x)",
     "On N=1 (n=5) it calls reduce_scatter, but this"),
    ("gather", [("return whole", "return np.concatenate([whole[chunk(rank.index + s)] for s in range(N)])")],
     "On N=2 (n=6) rank 1 put the chunks in the order of their arrival, its own first: element 0 is "),
    ("gather", [("    for step in range(N - 1):",
         "    whole = np.zeros_like(whole); whole[chunk(rank.index)] = shard\n    for step in range(0):")],
     "has its own chunk alone; nothing arrived: "),
    ("gather", [("return whole", "return whole[:k]")],
     "On N=2 (n=6) rank 0 returned what is wrong: the result has shape"),
    ("gather", [("whole[chunk(rank.index - step)], (rank.index + 1)",
         "whole[chunk(rank.index + step)], (rank.index + 1)")], "On N=3 "),
    ("gather", "def gather(rank, shard, n):\n    return rank.all_gather(shard, length=n)",
     "it calls all_gather, but"),
    ("all_reduce", [("return whole", "return shard")],
     "On N=2 (n=1) rank 1 returned its own chunk alone; the all-gather is missing: the result has shape (0,) "
     "where (1,)"),
    ("all_reduce", [("return whole", "return whole / rank.size")],
     "On N=2 (n=1) rank 0 returned the mean, and not the sum"),
    ("all_reduce", EVERYONE, "On N=3 (n=2) rank 0 added in the order of the ranks, and not in that of the ring: "),
    ("all_reduce", [(", length=len(x)", "")], "On N=2 (n=1) "),
    ("all_reduce", "def all_reduce(rank, x):\n    return rank.all_reduce(x)",
     "it calls all_reduce, but this puzzle is to be solved with exchange, all_gather, reduce_scatter"),
    ("all_reduce", [("reduce_scatter(x)", "reduce_scatter(x, async_op=True).result")], "was read before wait()"),
    ("all_reduce", "def all_reduce(rank, x):\n    return x",
     "On N=2 (n=1) rank 0 returned its own vector, to which nothing"),
    ("average", [("scale * rank.size * m", "scale * m")],
     "On N=2 (n=1, m=1) rank 0 did not divide by N, the number of ranks"),
    ("average", [("scale * rank.size * m", "scale * rank.size")],
     "did not divide by m, the number of micro-batches: "),
    ("average", [("scale * rank.size * m", "rank.size * m")],
     "On N=1 (n=5, m=1) rank 0 did not divide by S, the loss scale: "),
    ("average", [("total /= scale * rank.size * m", "pass")],
     "On N=1 (n=5, m=1) rank 0 did not divide by S, the loss scale: "),
    ("average", [("scale * rank.size * m", "scale * rank.size * rank.size * m")], "divided by N twice: "),
    ("average", [("    rank.all_reduce(total, out=total)\n    total /= scale * rank.size * m",
         "    total /= scale * rank.size * m\n    rank.all_reduce(total, out=total)")],
     "divided before the sum over ranks, and so rounded every addend: "),
    ("average", [("total /= scale * rank.size * m", "total /= scale; total /= rank.size; total /= m")],
     "divided more than once, and rounded each time: "),
    ("average", [("rank.all_reduce(total, out=total)", "pass"), ("scale * rank.size", "scale")],
     "averaged its own gradients alone: "),
    ("average", EACH_MICRO_BATCH, "which is the same sum added or rounded in another order"),
    ("ddp", [("bucket /= rank.size", "pass")],
     "On N=2 (n=1, T=6) rank 0 returned the sums, and not the means: element 0 of item"),
    ("ddp", EACH_TENSOR,
     "On N=2 (n=1, T=6) there are 6 steps in sequence where 2 are enough: one bucket takes 2(N-1) hops"),
    ("ddp", [("    rank.all_reduce(bucket, out=bucket)\n    bucket /= rank.size",
         "    bucket /= rank.size\n    rank.all_reduce(bucket, out=bucket)")],
     "divided before the sum, and so rounded"),
    ("ddp", [("rank.all_reduce(bucket, out=bucket)", "pass")], "divided its own gradients; nothing was added: "),
    ("ddp", "def ddp(rank, gradients):\n    return gradients",
     "On N=2 (n=1, T=6) rank 0 returned its own gradients: "),
    ("ddp", [(".reshape(g.shape) for", " for")],
     "On N=1 (n=5, T=18) rank 0 returned what is wrong: item 1 has shape (10,) where"),
    ("ddp", [("return [bucket[place]", "return bucket; [bucket[place]")],
     "the result is an array of shape (18,) where 3 things"),
    ("zero1", [("mean /= rank.size", "pass")], "On N=2 (n=1) rank 0 updated with the sum, and not with the mean: "),
    ("zero1", [("rank.all_gather(weights[own], out=weights, length=n)", "pass")],
     "On N=2 (n=1) rank 1 updated its own shard, and does not have the others': element 0 of weights is "),
    ("zero1", ALL_REDUCED,
     "On N=2 (n=6) a rank sends 36 bytes where 24 are enough: a rank needs the sum of its own shard only, and an "
     "all"),
    ("zero1", [("rank.reduce_scatter(gradient)", "gradient[own].copy()"), ("mean /= rank.size", "pass")],
     "updated each shard with its owner's gradient alone; nothing was added: "),
    ("zero1", [("    rank.all_gather(weights[own]", "    if len(momentum): rank.all_gather(weights[own]")],
     "no rank can go on"),
    ("zero1", [("momentum *= 0.9", "momentum *= 0.99")],
     "On N=1 (n=5) rank 0 returned what is wrong: element 0 of weights is "),
    ("zero1", [("return weights, momentum", "return weights")],
     "the result is an array of shape (5,) where 2 things are expected"),
    ("zero1", "def zero1(rank, weights, gradient, momentum, lr):\n    return weights, momentum",
     "returned what it was given: "),
    ("zero2", KEPT,
     "are enough: full gradients are kept; reduce each layer's as soon as it is there, and let it go."),
    ("zero2", [("shards[layer] /= rank.size", "pass")],
     "rank 0 returned shards of the sums, and not of the means: "),
    ("zero2", ALONE, "On N=2 (n=1, 3, 1, 2) rank 0 divided its own gradients; nothing was added: "),
    ("zero2", [("return shards", "return shards[::-1]")],
     "returned the layers in the order of backward, the last one first: "),
    ("zero2", [("in reversed(range(len(lengths)))", "in range(len(lengths))")],
     "On N=1 (n=5, 7, 5, 6) rank 0 raised ValueError in line 5 of zero2: backward was asked for layer 0 where "
     "layer 3 is next"),
    ("zero2", [("rank.reduce_scatter(gradient)", "rank.all_reduce(gradient)")],
     "returned whole gradients, and not its shards"),
    ("zero3", LEAK,
     "are enough: gathered weights stay; free each layer's as soon as it is used, and gather it again in"),
    ("zero3", NOT_AGAIN,
     "On N=1 (n=5, L=4) a rank holds 300 bytes at its fullest where 280 are enough: gathered weights"),
    ("zero3", [("grads[number] /= rank.size", "pass")], "returned shards of the sums, and not of the means: "),
    ("zero3", [("return grads", "return grads[::-1]")], "returned the layers in the order of backward"),
    ("zero3", [("rank.reduce_scatter(dw)", "dw[:len(shards[number])].copy()"), ("grads[number] /= rank.size", "pass")],
     "On N=2"),
    ("zero3", [("rank.reduce_scatter(dw)", "rank.all_reduce(dw)")], "it calls all_reduce, but"),
    ("overlap", WAITS_AT_ONCE,
     "On N=1 (n=5, 7, 5, 6) reduction 0 of 4 is waited for before anything is computed: issue it, "),
    ("overlap", [("rank.reduce_scatter(gradient, async_op=True)", "rank.reduce_scatter(gradient)"),
      ("shards[layer + 1] = work.wait()", "shards[layer + 1] = work"),
      ("shards[0] = work.wait()", "shards[0] = work")],
     "reduction 0 of 4 stands and waits: it was called without async_op=True"),
    ("overlap", WAITS_AT_THE_END,
     "more than two whole gradients are alive; wait for one before the next is sent on its way"),
    ("overlap", [("    if work is not None:\n        shards[0] = work.wait()\n        shards[0] /= rank.size\n",
         "    shards[0] = shards[1]\n")],
     "On N=1 (n=5, 7, 5, 6) rank 0 ended its program with 1 asynchronous collective(s) that were never waited "
     "for: "),
    ("overlap", [("shards[layer + 1] = work.wait()", "shards[layer + 1] = work.result")], "was read before wait()"),
    ("overlap", [("        del gradient", "        gradient *= 2")], "was changed before wait()"),
    ("overlap", [("shards[layer + 1] /= rank.size", "pass")],
     "On N=2 (n=1, 3, 1, 2) rank 0 returned what is wrong: element 0 of"),
    ("overlap", [("shards[layer + 1] /= rank.size", "pass"), ("shards[0] /= rank.size", "pass")],
     "returned shards of the sums"),
    ("lamb", EARLY_BIAS,
     "On N=2 (n=1, b=3) rank 0 counted the bias, which every rank has, once for each rank: element 0 of "),
    ("lamb", LATE_BIAS, "On N=1 (n=5, b=3) rank 0 left the bias out of the norms: "),
    ("lamb", PADDED, "On N=2 (n=1, b=3) rank 0 counted the padding: "),
    ("lamb", [("rank.all_gather(partial).reshape(rank.size, 2).sum(axis=0)", "partial")],
     "On N=2 (n=1, b=3) rank 1 took the norms of its own shard, and not of the layer: "),
    ("lamb", [("np.float32(np.sqrt(total[0] / total[1]))", "np.float32(total[0] / total[1])")],
     "forgot the square root: "),
    ("lamb", [("total[0] / total[1]", "total[1] / total[0]")], "took the ratio upside down: "),
    ("lamb", GATHERS_ALL,
     "On N=3 (n=7, b=3) a rank sends 64 bytes where 32 are enough: two numbers from each rank are all that has to "
     "travel"),
    ("lamb", [("weights[:valid] -= lr * ratio * direction[:valid]", "weights -= lr * ratio * direction")],
     "On N=2 (n=1, b=3) rank 1 returned what is wrong: element 0 of weights is "),
    ("lamb", [("return weights, bias", "return bias, weights")], "weights has shape (3,) where (5,) is expected"),
    ("lamb", "def lamb(rank, weights, direction, valid, bias, bias_direction, lr):\n    return weights, bias",
     "what it was given"),
    ("overflow", [("rank.all_gather(flag)", "flag")],
     "On N=2 (n=1, inf on one rank) rank 1 decided by its own shard, and so not like the other ranks: "),
    ("overflow", [("not np.isfinite(gradient).all()", "np.isinf(gradient).any()")],
     "On N=3 (n=7, NaN on one rank) rank 0 did not skip, although one rank has inf or NaN: element "),
    ("overflow", ONLY_IF_BAD, "On N=2 (n=1, inf on one rank) no rank can go on: rank 0: in all_gather("),
    ("overflow", [("if flags.any():", "if False:")],
     "On N=1 (n=5, inf on one rank) rank 0 did not skip, although one rank has"),
    ("overflow", [("if flags.any():", "if True:")],
     "On N=1 (n=6, all finite) rank 0 skipped, although nothing overflowed: "),
    ("overflow", [("return weights, scale / 2, True", "return weights, scale, True")],
     "skipped, but left the scale as it was: "),
    ("overflow", [("gradient / scale", "gradient")],
     "On N=1 (n=6, all finite) rank 0 returned what is wrong: element 0 of weights"),
    ("overflow", [("return weights, scale, False", "return weights, scale")], "where 3 things are expected"),
    ("repair", [("        del w\n", "        kept = [*locals().get('kept', []), w]\n")],
     "are enough: gathered weights stay; gather"),
    ("repair", [("mean /= rank.size", "pass")],
     "On N=2 (n=1, L=4) rank 0 returned the sum of the gradients, and not their mean: "),
    ("repair", [("return x, mean", "return mean, x")],
     "On N=1 (n=5, L=4) rank 0 returned what is wrong: element 0 of y is "),
    ("repair", [("rank.reduce_scatter(gradient)", "rank.reduce_scatter(gradient, algorithm='ring', splits=None)"),
      ("return x, mean", "return x, mean[::-1]")], "element 0 of mean is "),
    ("get_ddp", [("            gradient /= self.rank.size\n", "")],
     "On N=2 in step 0 rank 0 has the sum over ranks, and not the mean: element [0, 0] of layer"),
    ("get_ddp", [
      ("self.rank.all_reduce(gradient, out=gradient)", "pass"),
      ("gradient /= self.rank.size", "pass")], "On N=2 in step 0 rank 0 has its own gradients; nothing was added: "),
    ("get_ddp", [("self.rank.all_reduce(gradient, out=gradient)", "pass")],
     "divided its own gradients; nothing was added: "),
    ("get_ddp", [("rank.broadcast(parameter, out=parameter)", "pass")],
     "On N=2 after get_ddp rank 1 did not take rank 0's first values: element [0, 0] of layer0.weight is "),
    ("get_ddp", [IN_A_BUCKET],
     "has the mean, added or rounded in another order; reduce each parameter by a ring of its own"),
    ("get_ddp", [
      ("            self.rank.all_reduce(gradient, out=gradient)\n            gradient /= self.rank.size",
       "            gradient /= self.rank.size\n            self.rank.all_reduce(gradient, out=gradient)")],
     "On N=3 in step 0 rank 0 has the mean, added or rounded in another order"),
    ("get_ddp", [("        return loss, gradients\n", "")],
     "forward_backward must return (loss, gradients), found NoneType"),
    ("get_ddp", [("        return loss, gradients\n", "        return loss * 2, gradients\n")], "has another loss: "),
    ("get_ddp", [("        return loss, gradients\n", "        return loss, list(gradients.values())\n")],
     "the mean gradients must be a dict of arrays by name, found list"),
    ("get_ddp", [("        return loss, gradients\n", "        return loss, {'w': 1}\n")],
     "must be by the names layer0.weight, "),
    ("get_ddp", [("return DataParallel(rank, module)", "DataParallel(rank, module)")],
     "On N=1 get_ddp returned NoneType, which has no method forward_backward."),
    ("get_ddp", [
      ("            self.rank.all_reduce(gradient, out=gradient)\n",
       "            if self.rank.index: self.rank.all_reduce(gradient, out=gradient)\n")],
     "On N=2 no rank can go on: "),
    ("get_sharded_optimizer", [KEEPS_ALL, WITH_ALL],
     "On N=2 rank 0 holds 1,712 bytes of optimizer state where 1,240 are enough: it keeps the state of what others "
     "update."),
    ("get_sharded_optimizer", [
      ("rank.memory.alloc(slot.shape, np.float32, \"optimizer_state\", name)",
       "np.empty(slot.shape, np.float32)")],
     "On N=1 the ledgers know of 0 bytes of optimizer state where the ranks together"),
    ("get_sharded_optimizer", [("            self.rank.all_gather(w[own], out=w, length=len(w))\n", "")],
     "parameters as they were before; what other ranks updated did not arrive: element ["),
    ("get_sharded_optimizer", [
      ("        \"\"\"One step, with mean gradients.\"\"\"\n        self.steps += 1",
       "        self.steps = 1")], "On N=1 after step 1 rank 0 has other parameters: "),
    ("get_sharded_optimizer", [("return ShardedOptimizer(rank, parameters, optimizer)", "return optimizer")],
     "get_sharded_optimizer returned Adam, which has no method step."),
    ("get_fsdp", [("            means[name] /= self.rank.size\n", "")],
     "rank 0 has parameters that are right but for their rounding; is the mean missing, which Adam hides, or do "
     "the additions"),
    ("get_fsdp", [
      ("            kept.append(keep)",
       "            kept.append(keep); leak.append(self.gathered(name))"),
      ("kept: list[Any] = []", "kept: list[Any] = []; leak = self.leak = []")],
     "On N=1 rank 0 holds 3,424 bytes after a step where 2,760 are enough: between steps only shards of weights "
     "and state may stay."),
    ("get_fsdp", [
      ("            kept.append(keep)",
       "            kept.append(keep); leak.append(self.gathered(name))"),
      ("kept: list[Any] = []", "kept: list[Any] = []; leak = []")],
     "On N=1 a rank holds 4,618 bytes at its fullest where 4,570 are enough: free each layer's weights and "
     "gradient as soon as they are used."),
    ("get_fsdp", [
      ("self.rank.reduce_scatter(gradient.reshape(-1))",
       "gradient.reshape(-1)[own_part(self.rank, gradient.size)].copy()")],
     "On N=2 after step 0 rank 0 has other parameters: "),
    ("get_fsdp", [("        return loss\n", "")], "in step 0 rank 0 has another loss: None where "),
    ("get_fsdp", [("self.shards[name][...] = whole[own]", "self.shards[name][...] = 0")],
     "On N=1 in step 0 rank 0 has another loss"),
    ("get_fsdp", [("length=shape[0] * shape[1])", "length=shape[0] * shape[1] + 1)")],
     "On N=1 rank 0 raised ValueError in line "),
]


@pytest.mark.parametrize("name", dict.fromkeys(name for name, *_ in WRONG))
def test_a_common_wrong_answer_is_refused_with_the_sentence_that_says_why(name):
    for change, said in (case for of, *case in WRONG if of == name):
        if name in puzzles.adapters.GRADERS:
            sentence = graded(name, change)
        else:
            sentence = refusal(name, written(change) if isinstance(change, str) else changed(name, *change))
        assert said in sentence, change
        assert sentence.endswith("."), change
        assert "\n" not in sentence, change
        assert "N=" in sentence, change


def test_the_broken_program_is_refused_for_one_mistake_after_the_other_and_then_passes():
    text = str(puzzles.stub("repair"))
    right = (("gradient[chunk(rank.index + 1)]", "gradient[chunk(rank.index - 1)]"),
             ("rank.index + 2 + step", "rank.index - 2 - step"),
             ("(rank.index - 1) % N, landing, (rank.index + 1) % N",
              "(rank.index + 1) % N, landing, (rank.index - 1) % N"))
    said = ["On N=1 (n=5, L=4) a rank holds 260 bytes at its fullest where 220 are enough: gathered weights stay; ",
            "On N=2 (n=1, L=4) rank 0 returned the sum of the gradients, and not their mean: ",
            "On N=4 (n=8, L=4) rank 0 let the gradients go round the ring the other way: element 1 of mean is "]
    for sentence, changes in zip(said, [(NOT_LEAKING,), (AVERAGED,), right], strict=True):
        assert sentence in refusal("repair", written(text))
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
    score = puzzles.check("repair", written(text))
    assert score.passed, score
