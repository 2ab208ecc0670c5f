"""Wrong answers are refused, each with the sentence that says why: one table for puzzles and a course's functions."""

import re

import numpy as np
import pytest

from tests.cases import chosen
from tests.course.puzzles.answers import Hearsay, answer_of, by_hearsay, refusal
from tests.support import literally
from zerosim.course import puzzles
from zerosim.course.puzzles import PUZZLES, expected, grading, solutions

# -- answers that are more than a change of a solution's text --------------------------------------------------------

SEEN, SHARED = [], {}


def ring_in_rank_order(rank, x):
    N, cut = rank.size, expected.chunk_slices(len(x), rank.size)
    own = x[cut[rank.index]]
    parts = [own if source == rank.index else rank.memory.alloc(len(own), x.dtype, "workspace") for source in range(N)]
    for step in range(1, N):
        to, source = (rank.index + step) % N, (rank.index - step) % N
        rank.exchange(x[cut[to]], to, parts[source], source)
    return rank.memory.hold(expected.ordered_sum(parts), "workspace")


def one_ring_for_each_tensor(rank, gradients):
    means = [rank.all_reduce(g) for g in gradients]
    for mean in means:
        mean /= rank.size
    return means


def peeks(rank, x):
    return solutions.ring(Hearsay(rank, SHARED), x)


def peeks_except_on_three_and_four_ranks(rank, x):
    return solutions.ring(rank, x) if rank.size in (3, 4) else peeks(rank, x)


def returns_the_references_arrays(rank, x):
    """It sends all that it should, and returns what the checker will compare with."""
    solutions.ring(rank, x)
    found = PUZZLES["ring"].case(rank.size, len(x)).expected[rank.index]
    return rank.memory.hold(found.copy(), "workspace")


def reads_the_other_ranks_memory(rank, x):
    """It sends all that it should, and adds up the vectors that all ranks have left where any can see them."""
    SHARED[rank.size, len(x), rank.index] = x
    solutions.ring(rank, x)  # after which all have
    xs = [SHARED[rank.size, len(x), other] for other in range(rank.size)]
    return rank.memory.hold(expected.ring_sum(xs)[expected.chunk_slices(len(x), rank.size)[rank.index]].copy(), "input")


def depends_on_the_order_of_ranks(rank, x):
    SEEN.append(rank.index)
    result = solutions.all_reduce(rank, x)
    return result if SEEN[-rank.size:] == sorted(SEEN[-rank.size:]) else result + 1


def reads_what_was_not_written(rank, x):
    found = solutions.all_reduce(rank, x)
    fresh = rank.memory.alloc(len(x), np.float32, "workspace")
    if not rank.memory.debug:
        fresh[...] = 0  # as it often is by chance
    return found + fresh


def endless_list(rank, x):
    found = []
    found.append(found)
    return found


def mute(rank, x):
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no words")

    raise Mute


# -- changes that several rows make, or that are long ----------------------------------------------------------------

THE_OTHER_WAY = [("partial = x[chunk(rank.index - 1)]", "partial = x[chunk(rank.index + 1)]"),
                 ("rank.index - 2 - step", "rank.index + 2 + step"),
                 ("(rank.index + 1) % N, landing, (rank.index - 1) % N",
                  "(rank.index - 1) % N, landing, (rank.index + 1) % N")]
ONE_FURTHER = [("x[chunk(rank.index - 1)]", "x[chunk(rank.index)]"), ("rank.index - 2 - step", "rank.index - 1 - step")]
EACH_MICRO_BATCH = [("        total += gradient\n    rank.all_reduce(total, out=total)",
                     "        total += rank.all_reduce(gradient)"),
                    ("total[...] = gradients[0]", "total[...] = rank.all_reduce(gradients[0])")]
LEAK = [("        x = layer.forward(w, x)\n        del w",
         "        x = layer.forward(w, x)\n        inputs[-1] = (w, inputs[-1])"), ("inputs.pop()", "inputs.pop()[1]")]
LATE_BIAS = ("    total[0] += squares(bias)\n    total[1] += squares(bias_direction)\n", "")
EARLY_BIAS = [LATE_BIAS, ("squares(weights[:valid])", "squares(weights[:valid]) + squares(bias)"),
              ("squares(direction[:valid])", "squares(direction[:valid]) + squares(bias_direction)")]
PADDED = [("partial[0] = squares(weights[:valid])", "partial[0] = squares(weights)"),
          ("partial[1] = squares(direction[:valid])", "partial[1] = squares(direction)")]
NOT_LEAKING = ("    weights = [rank.all_gather(shard, length=n) for shard in shards]\n    for w in weights:\n",
               "    for shard in shards:\n        w = rank.all_gather(shard, length=n)\n")
AVERAGED = ("    return x, partial", "    mean = rank.memory.alloc(len(partial), np.float32, 'gradient')\n"
            "    mean[...] = partial\n    mean /= N\n    return x, mean")
KEEPS_ALL = [("own.stop - own.start) for name, own in self.own.items()}",
              "len(w)) for name, w in self.parameters.items()}"),
             ("self.state[name], self.steps)\n            self.rank.all_gather(w[own]",
              "{k: v[own] for k, v in self.state[name].items()}, self.steps)\n"
              "            self.rank.all_gather(w[own]")]
GATHERS_AGAIN = ("            kept.append(keep)", "            kept.append(keep); leak.append(self.gathered(name))")
UNKNOWN = ("bytes that its memory does not know: take arrays from rank.memory.alloc(shape, dtype, kind), or charge "
           "them with rank.memory.hold(array, kind), and write into them with out=.$")
UNHEARD = ("^On {} its results are right even when every message arrives as NaN, so it sees other ranks' data "
               "where no message brought them; a rank knows its arguments, and what others send it.$")
MUST_COME = "have to travel: what one rank knows of another's data must come in a message"
P = sum(grading.LENGTHS)

# Of each the words of the refusal, where ... stands for any, and the answer: what is changed in the solution, a whole
# text, or a function. What is wrong in any puzzle is asked of all below.
WRONG = {
    "mean": [
        ("^On N=4 (n=1) rank 0 returned the sum, and not the mean: element 0 is ", ("total /= rank.size", "pass")),
        ("^On N=4 (n=1) rank 0 divided twice: ", ("total /= rank.size", "total /= rank.size ** 2")),
        ("divided its own number, and knows nothing", ("total: Array = rank.all_reduce(x)", "total = x.copy()")),
        ("^On N=4 (n=1) rank 0 returned its own number: ", ("rank.all_reduce(x)", "x"), ("total /= rank.size", "")),
        ("the result is float64 where float32 is expected", ("all_reduce(x)", "all_reduce(x.astype(np.float64))")),
        ("N=4 (n=1) no rank can go on: rank 0: finished; ranks 1-3: in all_reduce(call 0, (1,), float32) at answer.py:",
         ("rank.all_reduce(x)", "rank.all_reduce(x) if rank.index else x.copy()")),
        ("^On N=4 (n=1) rank 0 raised ValueError: the program made a generator and ran", "def f(*_):\n    yield"),
        ("^On N=4 (n=1) rank 0 raised KeyError in line 2 of mean.$", "def mean(rank, x):\n    raise KeyError"),
        ("^On N=4 (n=1) rank 0 raised Mute in line ", mute),
        ("^On N=4 (n=1) rank 0 returned a list that contains itself.$", endless_list),
    ],
    "broadcast": [
        ("^On N=4 (n=4) rank 1 kept its own x: element 0 is ", ("rank.recv(x,", "rank.recv(x.copy(),")),
    ],
    "ring": [
        ("^On N=4 (n=4) rank 0 sent to its left neighbor, and received from its right one: element 0 is ",
         THE_OTHER_WAY[-1]),
        ("take for each half an array and then a rank's index, or None for both; found (1, array, 3, array).$", (
             "partial, (rank.index + 1) % N, landing, (rank.index - 1) % N",
             "(rank.index + 1) % N, partial, (rank.index - 1) % N, landing")),
        ("rank 0 changed its argument x, which is read-only; write, and receive messages, in memory of your own, ", (
            "partial, (rank.index + 1) % N, landing,", "landing, (rank.index + 1) % N, partial,")),
        ("^On N=4 (n=4) rank 0 passed the chunks on as they came, to which nothing was added: element 0 is ",
         ("landing += own", "pass")),
        ("^On N=4 (n=4) rank 0 left out its own copy: element 0 is ",
         ("landing += own", "landing += own if step < N - 2 else 0")),
        ("^On N=4 (n=4) rank 1 let the chunks go round the ring the other way: element 0 is ", *THE_OTHER_WAY),
        ("^On N=4 (n=8) rank 0 added in the order of the ranks, and not in that of the ring: ", ring_in_rank_order),
        ("^On N=4 (n=4) rank 0 returned the chunk that the next rank owns: element 0 is", *ONE_FURTHER),
        (f"^On N=4 (n=4) the ranks sent 0 bytes in all where 48 {MUST_COME}.$", peeks),
        (UNHEARD.format("N=3 (n=7)"), returns_the_references_arrays),
        (UNHEARD.format("N=3 (n=7)"), reads_the_other_ranks_memory),
        (f"^On N=2 (n=1) the ranks sent 0 bytes in all where 4 {MUST_COME}.$",
         peeks_except_on_three_and_four_ranks),
        (f"^The values are right in every case, but on N=4 (n=262144) rank ... holds about 8,... {UNKNOWN}",
         ("    return partial", "    rest = np.ones(4 * n)\n    del rest\n    return partial")),
        (f"^The values are right in every case, but on N=4 (n=262144) rank 2 holds about 1,0... {UNKNOWN}",
         ("    return partial", "    rank.kept = np.ones(n, 'f4') if rank.index == 2 else 0\n    return partial")),
        ("^On N=4 (n=4) rank 0 returned what is wrong: the result is a RankState where an array of shape",
         "def ring(rank, x):\n    return (lambda: rank._state)()"),
        ("the result has shape (100,) where (1,) is expected",
         "def ring(rank, x):\n    return np.lib.stride_tricks.as_strided(x, (100,))"),
        ("raised ModuleNotFoundError in line 2 of ring: ", "def ring(rank, x):\n    return __import__('x').gc"),
    ],
    "gather": [
        ("^On N=4 (n=4) rank 1 put the chunks in the order of their arrival, its own first: element 0 is ",
         ("return whole", "return np.concatenate([whole[chunk(rank.index + s)] for s in range(N)])")),
        ("has its own chunk alone; nothing arrived: ",
         ("    for step in range(N - 1):",
          "    whole = np.zeros_like(whole); whole[chunk(rank.index)] = shard\n    for step in ():")),
    ],
    "all_reduce": [
        ("^On N=4 (n=4) rank 0 returned its own chunk alone; the all-gather is missing: the result has shape (1,)",
         ("return whole", "return shard")),
        ("^On N=4 (n=4) rank 0 returned its own vector, to which nothing", lambda rank, x: x),
        ("^In another order of the ranks, which is as good, it fails, as if they shared something that is no message: "
         "On N=", depends_on_the_order_of_ranks),
        ("^With NaN in new and in freed memory it fails, as if it read what was not written: On N=3 ",
         reads_what_was_not_written),
    ],
    "average": [
        ("^On N=4 (n=4, m=3) rank 0 did not divide by N, the number of ranks", ("scale * rank.size * m", "scale * m")),
        ("did not divide by m, the number of micro-batches: ", ("scale * rank.size * m", "scale * rank.size")),
        ("^On N=4 (n=4, m=3) rank 0 did not divide by S, the loss scale: ", ("scale * rank.size * m", "rank.size * m")),
        ("divided by N twice: ", ("scale * rank.size * m", "scale * rank.size * rank.size * m")),
        ("divided before the sum over ranks, and so rounded every addend: ",
         ("    rank.all_reduce(total, out=total)\n    total /= scale * rank.size * m",
          "    total /= scale * rank.size * m\n    rank.all_reduce(total, out=total)")),
        ("divided more than once, and rounded each time: ",
         ("total /= scale * rank.size * m", "total /= scale; total /= rank.size; total /= m")),
        ("averaged its own gradients alone: ", ("rank.all_reduce(total, out=total)", "pass"),
         ("scale * rank.size", "scale")),
        ("which is the same sum added or rounded in another order", *EACH_MICRO_BATCH),
    ],
    "ddp": [
        ("^On N=4 (n=4, T=15) rank 0 returned the sums, and not the means: element 0 of", ("bucket /= rank.size", "")),
        ("^On N=4 (n=4, T=15) rank 0 reduced every tensor by a ring of its own, which adds in another order: ",
         one_ring_for_each_tensor),
        ("divided before the sum, and so rounded", ("rank.all_reduce(bucket, out=bucket)\n    bucket /= rank.size",
                                                    "bucket /= rank.size\n    rank.all_reduce(bucket, out=bucket)")),
        ("divided its own gradients; nothing was added: ", ("rank.all_reduce(bucket, out=bucket)", "pass")),
        ("the result is an array of shape (15,) where 3 things", ("return [bucket", "return bucket; [bucket")),
    ],
    "zero1": [
        ("^On N=4 (n=4) rank 0 updated with the sum, and not with the mean: ", ("mean /= rank.size", "pass")),
        ("^On N=4 (n=4) rank 0 updated its own shard, and does not have the others': element 1 of weights is ",
         ("rank.all_gather(weights[own], out=weights, length=n)", "pass")),
        ("updated each shard with its owner's gradient alone; nothing was added: ",
         ("rank.reduce_scatter(gradient)", "gradient[own].copy()"), ("mean /= rank.size", "pass")),
    ],
    "zero2": [
        ("rank 0 holds the whole gradients of 4 layers at one moment, where one is enough: reduce each layer's as soon",
         ("        del gradient", "        kept = [*locals().get('kept', []), gradient]")),
        ("rank 0 returned shards of the sums, and not of the means: ", ("shards[layer] /= rank.size", "pass")),
        ("^On N=4 (n=4, 6, 4, 5) rank 0 divided its own gradients; nothing was added: ",
         ("rank.reduce_scatter(gradient)", "gradient[rank.index * -(-len(gradient) // rank.size):]"
          "[:-(-len(gradient) // rank.size)].copy()")),
        ("returned the layers in the order of backward, the last one first: ", ("n shards", "n shards[::-1]")),
        ("returned whole gradients, and not its shards", ("reduce_scatter(gradient)", "all_reduce(gradient)")),
    ],
    "zero3": [
        ("rank 0 holds 5 gathered arrays of weights at one moment, where one is enough: let each layer's go", *LEAK),
    ],
    "overlap": [
        ("^On N=4 (n=4, 6, 4, 5) reduction 0 of 4 is waited for before anything is computed: issue it, ",
         ("async_op=True)", "async_op=True); work.wait()")),
        ("^On N=4 (n=4, 6, 4, 5) reduction 2 of 4 is waited for before anything is computed: issue it, ",
         ("async_op=True)", "async_op=True); layer == 1 and work.wait()")),
        ("^On N=4 (n=4, 6, 4, 5) rank 0 ended its program with 1 asynchronous collective(s) that were never waited",
         ("        shards[0] = work.wait()\n        shards[0] /= rank.size\n", "        shards[0] = shards[1]\n")),
        ("was read before wait()", ("shards[layer + 1] = work.wait()", "shards[layer + 1] = work.result")),
    ],
    "lamb": [
        ("^On N=4 (n=4, b=3) rank 0 counted the bias, which every rank has, once for each rank: ", *EARLY_BIAS),
        ("^On N=4 (n=4, b=3) rank 0 left the bias out of the norms: ", LATE_BIAS),
        ("^On N=4 (n=3, b=3) rank 0 counted the padding: ", *PADDED),
        ("^On N=4 (n=4, b=3) rank 0 took the norms of its own shard, and not of the layer: ",
         ("rank.all_gather(partial).reshape(rank.size, 2).sum(axis=0)", "partial")),
        ("forgot the square root: ", ("np.float32(np.sqrt(total[0] / total[1]))", "np.float32(total[0] / total[1])")),
        ("took the ratio upside down: ", ("total[0] / total[1]", "total[1] / total[0]")),
    ],
    "overflow": [
        ("^On N=4 (n=9, inf on one rank) rank 0 decided by its own shard, and so not like the other ranks: ",
         ("rank.all_gather(flag)", "flag")),
        ("^On N=4 (n=3, NaN on one rank) rank 0 did not skip, although one rank has inf or NaN: element ",
         ("not np.isfinite(gradient).all()", "np.isinf(gradient).any()")),
        ("^On N=5 (n=13, inf on two ranks) rank 0 did not skip, ", ("flags.any()", "flags.sum() == 1")),
        ("^On N=4 (n=4, all finite) rank 0 skipped, although nothing overflowed: ", ("if flags.any():", "if True:")),
        ("skipped, but left the scale as it was: ", ("return weights, scale / 2, True", "return weights, scale, True")),
    ],
    "get_ddp": [
        ("^On N=4 in step 0 rank 0 has the sum over ranks, and not the mean: element [0, 0] of layer",
         ("            gradient /= self.rank.size\n", "")),
        ("^On N=4 in step 0 rank 0 has its own gradients; nothing was added: ",
         ("self.rank.all_reduce(gradient, out=gradient)", "pass"), ("gradient /= self.rank.size", "pass")),
        ("divided its own gradients; nothing was added: ", ("self.rank.all_reduce(gradient, out=gradient)", "pass")),
        ("^On N=4 in step 2 rank 1 has its own gradients; nothing was added: ",  # of six layers, after two steps
         ("self.rank.all_reduce(gradient, out=gradient)",
          "own, self.done = gradient * 4, getattr(self, 'done', 0) + 1\n"
          "            self.rank.all_reduce(gradient, out=gradient)\n"
          "            gradient[...] = own if self.rank.index == 1 and self.done > 12 else gradient")),
        ("^On N=4 after get_ddp rank 1 did not take rank 0's first values: element [0, 0] of layer0.weight is ",
         ("rank.broadcast(parameter, out=parameter)", "pass")),
        ("^On N=3 in step 0 rank 0 has the mean, added or rounded in another order; reduce each parameter by a ring",
         ("            self.rank.all_reduce(gradient, out=gradient)\n            gradient /= self.rank.size",
          "            gradient /= self.rank.size\n            self.rank.all_reduce(gradient, out=gradient)")),
        ("forward_backward must return (loss, gradients), found NoneType", ("        return loss, gradients\n", "")),
        ("has another loss: ", ("return loss, gradients\n", "return loss * 2, gradients\n")),
        ("must be by the names layer0.weight, ", ("return loss, gradients\n", "return loss, {'w': 1}\n")),
        ("^On N=4 get_ddp returned NoneType, which has no method forward_backward.", lambda rank, module: None),
        ("^On N=4 forward_backward changed module.parameters; return the mean gradients, with which the grader makes "
         "the update.$",
         ("            gradient /= self.rank.size", "            self.module.parameters[min(gradients)] += 1")),
        (f"^On N=4 the ranks sent 0 bytes in all where {4 * 7 * 3 * P:,} {MUST_COME}, and be updated by its owner",
         by_hearsay(solutions.get_ddp)),
        (UNHEARD.format("N=4"), by_hearsay(solutions.get_ddp, aloud=True)),
    ],
    "get_sharded_optimizer": [
        ("^On N=4 rank 0 holds 1,712 bytes of optimizer state where 816 are enough: it keeps the state of what "
         "others update.$", *KEEPS_ALL),
        ("^On N=4 memories know of 0 bytes of optimizer state where the ranks together need 1,712: take it from",
         ('rank.memory.alloc(slot.shape, np.float32, "optimizer_state", name)', "np.empty(slot.shape, np.float32)")),
        ("parameters as they were before; what other ranks updated did not arrive: element [",
         ("            self.rank.all_gather(w[own], out=w, length=len(w))\n", "")),
        ("^On N=4 after step 0 rank 0 has all parameters as they were before; nothing was updated: element [0, 0] of ",
         ("for name, w in self.parameters.items():\n            own, g", "for name, w in ():\n            own, g")),
    ],
    "get_fsdp": [
        ("rank 0 has parameters that are right but for their rounding; is the mean missing, which Adam hides, or do "
         "the additions have another order: ", ("            means[name] /= self.rank.size\n", "")),
        ("^On N=4 rank 0 holds 1,516 bytes after a step where 852 are enough: between steps only shards of weights "
         "and state may stay.$", GATHERS_AGAIN, ("kept: list[Any] = []", "kept = []; leak = self.leak = []")),
        ("^On N=4 a rank holds 2,336 bytes at its fullest where 2,042 are enough: free each layer's weights and "
         "gradient as soon as they are used.$", GATHERS_AGAIN, ("kept: list[Any] = []", "kept = []; leak = []")),
        ("^On N=4 after step 0 rank 0 has other parameters: ",
         ("self.rank.reduce_scatter(gradient.reshape(-1))",
          "gradient.reshape(-1)[own_part(self.rank, gradient.size)].copy()")),
        ("in step 0 rank 0 has another loss: None where ", ("        return loss\n", "")),
        (f"^On N=4 the ranks sent 0 bytes in all where {4 * 5 * 3 * P:,} {MUST_COME}", by_hearsay(solutions.get_fsdp)),
        (UNHEARD.format("N=4"), by_hearsay(solutions.get_fsdp, aloud=True)),
    ],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_common_wrong_answer_is_refused_with_the_sentence_that_says_why(name):
    for said, *changes in WRONG[name]:
        sentence = refusal(name, answer_of(name, *changes))
        assert re.search(literally(said), sentence), (said, sentence)
        assert sentence.endswith("."), sentence
        assert "\n" not in sentence, sentence
        assert "N=" in sentence, sentence


def test_the_broken_program_is_refused_for_one_mistake_after_the_other_and_then_passes():
    text = str(puzzles.stub("repair"))
    right = [(old.replace("x[", "gradient[", 1), new.replace("x[", "gradient[", 1)) for new, old in THE_OTHER_WAY]
    said = ["On N=4 (n=4, L=4) rank 0 let the gradients go round the ring the other way, and returned their sum, not ",
            "On N=4 (n=4, L=4) rank 1 let the gradients go round the ring the other way: element 0 of mean is ",
            "On N=4 (n=4, L=4) rank 0 holds 4 gathered arrays of weights at one moment, where one is enough: let each "]
    for sentence, changes in zip(said, [[AVERAGED], right, [NOT_LEAKING]], strict=True):
        assert sentence in refusal("repair", answer_of("repair", text))
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
    score = puzzles.check("repair", answer_of("repair", text))
    assert score.passed, score


# -- what is wrong in any puzzle -------------------------------------------------------------------------------------

WRITES_ALL = ("broadcast", "zero2", "overlap")  # no array that may not be changed
FIRST_COLLECTIVES = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"}


def copied(value):
    """The same arrays, in new memory that no memory knows."""
    if isinstance(value, list | tuple):
        return type(value)(copied(item) for item in value)
    return value.copy() if isinstance(value, np.ndarray) else value


def changes_what_it_reads(puzzle, rank, *given):
    found = solutions.SOLUTIONS[puzzle.name](rank, *given)
    for parameter, value in zip(puzzle.parameters, given, strict=True):
        array = value[0] if isinstance(value, list) else value
        if parameter not in puzzle.changes and isinstance(array, np.ndarray):
            array += 1
    return copied(found)


def waits_on_rank_0(puzzle, rank, *given):
    if rank.index == 0 and rank.size > 1:
        rank.recv(np.empty(1), 1)
    return solutions.SOLUTIONS[puzzle.name](rank, *given)


def fails_on_rank_2(puzzle, rank, *given):
    if rank.index == 2:
        raise OSError("the disk is full. Really")
    return solutions.SOLUTIONS[puzzle.name](rank, *given)


def returns_nothing(puzzle, rank, *given):
    solutions.SOLUTIONS[puzzle.name](rank, *given)


def returns_what_no_memory_knows(puzzle, rank, *given):
    return copied(solutions.SOLUTIONS[puzzle.name](rank, *given))


def calls_what_is_not_allowed(puzzle, rank, *given):
    found = solutions.SOLUTIONS[puzzle.name](rank, *given)
    getattr(rank, min(FIRST_COLLECTIVES.difference(puzzle.allowed)))(np.zeros(rank.size))
    return found


EVERYWHERE = {  # what the refusal says, FIRST standing for rank 0 in the first case, ALLOWED for what may be called
    returns_nothing: "^FIRST returned what is wrong: the result is None where ",
    # Where rank 1 does send something, it is of another size.
    waits_on_rank_0: r"On N=4 \(.*(no rank can go on: rank 0: in recv\(\(1,\), float64\) from rank 1 at "
                     r"test_wrong_answers\.py:|float32\) to rank 0, which expects \(\(1,\), float64\); both sides)",
    changes_what_it_reads: "^FIRST changed its argument .*, which is read-only; write, and receive messages, in "
                          r"memory of your own, from rank\.memory\.alloc\(\)\.$",
    returns_what_no_memory_knows:
        r"^The values are right in every case, but on N=4 \(.*\) rank \d holds about [\d,]+ " + literally(UNKNOWN),
    fails_on_rank_2: r"^On N=4 \(.*rank 2 raised OSError in line \d+ of fails_on_rank_2: the disk is full\.$",
    calls_what_is_not_allowed: r"^On N=4 \(.*\) it calls \w+, but this puzzle is to be solved with ALLOWED\.$",
}


@pytest.mark.parametrize("name", chosen(list(PUZZLES)[::2], PUZZLES))
def test_what_is_wrong_anywhere_is_refused_in_every_puzzle(name):
    puzzle = PUZZLES[name]
    first = re.escape(f"On {next(puzzle.cases()).where} rank 0")
    allowed = ", ".join(["exchange", *sorted(puzzle.allowed)])
    for answer, words in EVERYWHERE.items():
        if answer is changes_what_it_reads and name in WRITES_ALL:
            continue
        if answer is returns_what_no_memory_knows and not puzzle.audit_length:
            continue  # one number is too small to stand out
        said = refusal(name, lambda rank, *given, answer=answer: answer(puzzle, rank, *given))
        assert re.search(words.replace("FIRST", first).replace("ALLOWED", allowed), said), (answer.__name__, said)
