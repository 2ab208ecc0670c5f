"""The common wrong answers to the puzzles about messages are refused, each with the sentence that says why."""

import pytest

from tests.course.puzzles.answers import changed, refusal, written

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
    ("mean", [("all_reduce(x)", "all_reduce(x, out=x)")],
     "On N=2 (n=1) rank 0 changed its argument x, which is read-only"),
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
    ("broadcast", [("return x", "return x.copy()")],
     "its ledger does not know: take arrays from rank.memory.alloc("),
    ("broadcast", [("    return x", "")], "rank 0 returned what is wrong: the result is None"),
    ("broadcast", "def broadcast(rank, x):\n    return rank.broadcast(x)",
     "it calls broadcast, but this puzzle is to be solved with exchange."),
    ("ring", [("landing += own", "pass")], "On N=2 (n=1) rank 0 left out its own copy: element 0 is "),
    ("ring", THE_OTHER_WAY, "On N=4 (n=3) rank 1 let the chunks go round the ring the other way: element 0 is "),
    ("ring", IN_RANK_ORDER, "On N=3 (n=2) rank 0 added in the order of the ranks, and not in that of the ring: "),
    ("ring", ONE_FURTHER,
     "On N=2 (n=1) rank 0 returned the chunk that the next rank owns: the result has shape (0,) where"),
    ("ring", [("return partial", "return partial / N")], "On N=2 (n=1) rank 0 returned the mean, and not the sum"),
    ("ring", [("landing += own", "own += landing; landing[...] = own")],
     "On N=2 (n=1) rank 0 changed its argument x"),
    ("ring", [SEND_FIRST], "On N=2 (n=1) no rank can go on: rank 0: in send("),
    ("ring", [("k = -(-n // N)", "k = n // N")], "On N=2 (n=1) "),
    ("ring", [("range(N - 1)", "range(N - 2)")], "On N=2 (n=1) rank 0 "),
    ("ring", [("    return partial", "")], "the result is None where an array of shape (5,) is expected"),
    ("ring", WASTEFUL, "On N=2 (n=6) a rank sends 24 bytes where 12 are enough: each chunk leaves a rank once"),
    ("ring", "def ring(rank, x):\n    return rank.reduce_scatter(x)",
     "On N=1 (n=5) it calls reduce_scatter, but this"),
    ("ring", [("rank.memory.alloc(k, x.dtype, \"workspace\")", "np.empty(k, x.dtype)")],
     "On N=4 (n=262144) rank 0 holds about"),
    ("gather", [("return whole", "return np.concatenate([whole[chunk(rank.index + s)] for s in range(N)])")],
     "On N=2 (n=6) rank 1 put the chunks in the order of their arrival, its own first: element 0 is "),
    ("gather", [("    for step in range(N - 1):",
         "    whole = np.zeros_like(whole); whole[chunk(rank.index)] = shard\n    for step in range(0):")],
     "has its own chunk alone; nothing arrived: "),
    ("gather", [("whole[chunk(rank.index)] = shard", "whole[chunk(rank.index)] = shard; shard[...] = 0")],
     "On N=1 (n=5) rank 0 changed its argument shard"),
    ("gather", [("return whole", "return whole[:k]")],
     "On N=2 (n=6) rank 0 returned what is wrong: the result has shape"),
    ("gather", [("    return whole", "")], "the result is None"),
    ("gather", [("rank.memory.alloc(n, shard.dtype, \"gathered_parameter\")", "np.empty(n, shard.dtype)")],
     "bytes that its ledger does not know"),
    ("gather", [("whole[chunk(rank.index - step)], (rank.index + 1)",
         "whole[chunk(rank.index + step)], (rank.index + 1)")], "On N=3 "),
    ("gather", "def gather(rank, shard, n):\n    return rank.all_gather(shard, length=n)",
     "it calls all_gather, but"),
    ("all_reduce", [("return whole", "return shard")],
     "On N=2 (n=1) rank 1 returned its own chunk alone; the all-gather is missing: the result has shape (0,) "
     "where (1,)"),
    ("all_reduce", [("return whole", "return whole / rank.size")],
     "On N=2 (n=1) rank 0 returned the mean, and not the sum"),
    ("all_reduce", [("    return whole", "")], "the result is None"),
    ("all_reduce", EVERYONE, "On N=3 (n=2) rank 0 added in the order of the ranks, and not in that of the ring: "),
    ("all_reduce", [(", length=len(x)", "")], "On N=2 (n=1) "),
    ("all_reduce", "def all_reduce(rank, x):\n    return rank.all_reduce(x)",
     "it calls all_reduce, but this puzzle is to be solved with exchange, all_gather, reduce_scatter"),
    ("all_reduce", [("reduce_scatter(x)", "reduce_scatter(x, async_op=True).result")], "was read before wait()"),
    ("all_reduce", "def all_reduce(rank, x):\n    return x",
     "On N=2 (n=1) rank 0 returned its own vector, to which nothing"),
]


@pytest.mark.parametrize(("name", "change", "said"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_a_common_wrong_answer_is_refused_with_the_sentence_that_says_why(name, change, said):
    answer = written(change) if isinstance(change, str) else changed(name, *change)
    sentence = refusal(name, answer)
    assert said in sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert "N=" in sentence
