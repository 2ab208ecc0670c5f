"""The common wrong answers to the puzzles about training are refused, each with the sentence that says why."""

import pytest

from tests.course.puzzles.answers import changed, refusal, written
from zerosim.course import puzzles

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

WRONG = [
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
    ("average", [("total = rank.memory.alloc(n, np.float32, \"gradient\")", "total = gradients[0]")],
     "rank 0 changed its argument gradients, which is read-only"),
    ("average", [("rank.memory.alloc(n, np.float32, \"gradient\")", "np.empty(n, np.float32)")],
     "its ledger does not know"),
    ("average", EACH_MICRO_BATCH, "which is the same sum added or rounded in another order"),
    ("average", [("    return total", "")], "the result is None"),
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
    ("ddp", [("start += g.size", "start += g.size; g[...] = 0")],
     "On N=1 (n=5, T=18) rank 0 changed its argument gradients"),
    ("ddp", [("rank.memory.alloc(sum(g.size for g in gradients), np.float32, \"gradient\")",
         "np.empty(sum(g.size for g in gradients), np.float32)")], "bytes that its ledger does not know"),
    ("zero1", [("mean /= rank.size", "pass")], "On N=2 (n=1) rank 0 updated with the sum, and not with the mean: "),
    ("zero1", [("rank.all_gather(weights[own], out=weights, length=n)", "pass")],
     "On N=2 (n=1) rank 1 updated its own shard, and does not have the others': element 0 of weights is "),
    ("zero1", ALL_REDUCED,
     "On N=2 (n=6) a rank sends 36 bytes where 24 are enough: a rank needs the sum of its own shard only, and an "
     "all"),
    ("zero1", [("rank.reduce_scatter(gradient)", "gradient[own].copy()"), ("mean /= rank.size", "pass")],
     "updated each shard with its owner's gradient alone; nothing was added: "),
    ("zero1", [("rank.reduce_scatter(gradient)", "rank.all_reduce(gradient, out=gradient)[own]")],
     "rank 0 changed its argument gradient"),
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
    ("zero2", [("    return shards", "")], "the result is None where 4 things are expected"),
    ("zero2", [("        del gradient", "        kept = [*locals().get('kept', []), gradient.copy()]")],
     "its ledger does not know"),
    ("zero3", LEAK,
     "are enough: gathered weights stay; free each layer's as soon as it is used, and gather it again in"),
    ("zero3", NOT_AGAIN,
     "On N=1 (n=5, L=4) a rank holds 300 bytes at its fullest where 280 are enough: gathered weights"),
    ("zero3", [("grads[number] /= rank.size", "pass")], "returned shards of the sums, and not of the means: "),
    ("zero3", [("return grads", "return grads[::-1]")], "returned the layers in the order of backward"),
    ("zero3", [("rank.reduce_scatter(dw)", "dw[:len(shards[number])].copy()"), ("grads[number] /= rank.size", "pass")],
     "On N=2"),
    ("zero3", [("rank.reduce_scatter(dw)", "rank.all_reduce(dw)")], "it calls all_reduce, but"),
    ("zero3", [("    return grads", "")], "the result is None where 4 things are expected"),
    ("zero3", [("inputs.append(x)", "inputs.append(x); w *= 1; shard *= 2")], "rank 0 changed its argument shards"),
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
    ("overlap", [("    return shards", "")], "the result is None"),
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
    ("overflow", [("    weights -= lr * (gradient / scale)", "    gradient /= scale\n    weights -= lr * gradient")],
     "rank 0 changed its argument gradient"),
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
]


@pytest.mark.parametrize(("name", "change", "said"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_a_common_wrong_answer_is_refused_with_the_sentence_that_says_why(name, change, said):
    answer = written(change) if isinstance(change, str) else changed(name, *change)
    sentence = refusal(name, answer)
    assert said in sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert "N=" in sentence


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
