"""A mesh of ranks: its groups, and the collectives that go inside nodes and then across them."""

from collections import Counter

import numpy as np
import pytest

import zerosim as zs
from tests.ranks import oracles
from tests.ranks.asking import KINDS, bits, cuts_of
from tests.ranks.data import FLOATS
from tests.support import assert_refused, literally
from zerosim.planning import Link, Network, cost
from zerosim.planning import collectives as closed_forms

MESHES = [(1, 1), (1, 4), (3, 1), (2, 2), (2, 3), (3, 2)]


def in_two_steps(x, cut, nodes, each):
    """Chunk m·R + i: the sums of nodes, each in the order i+1 ... i, added in the order m+1 ... m."""
    found = []
    for chunk in range(nodes * each):
        here, (node, place) = slice(cut[chunk], cut[chunk + 1]), divmod(chunk, each)
        sums = [oracles.rank_order([v[here] for v in x[m * each:(m + 1) * each]], root=place + 1) for m in range(nodes)]
        found.append(oracles.rank_order(sums, root=node + 1))
    return np.concatenate(found)


@pytest.mark.parametrize(("nodes", "each"), MESHES)
def test_hierarchical_collectives_add_inside_nodes_first_and_send_what_is_counted(nodes, each):
    ranks, algorithm, rng = nodes * each, f"hierarchical({each})", np.random.default_rng(nodes)
    for length, (kind, how), dtype in zip((0, 1, ranks, 3 * ranks + 1), KINDS.items(), ("fp32", "bf16", "fp16", "fp32"),
                                          strict=True):
        x = [rng.standard_normal(length).astype(FLOATS[dtype]) for _ in range(ranks)]
        for cut in (oracles.ceil_cut(length, ranks), *cuts_of(length, ranks)):
            whole = in_two_steps(x, cut, nodes, each)

            def program(rank, x=x, cut=cut):
                both = {"algorithm": algorithm, "splits": cut}
                own, mine = rank.reduce_scatter(x[rank.index], **both), x[rank.index].copy()
                rank.all_reduce(mine, out=mine, **both)
                return own, rank.all_gather(own, **both), mine

            cluster = zs.Cluster(ranks, **how)
            for index, (own, gathered, total) in enumerate(cluster.run(program)):
                assert bits(own) == bits(whole[cut[index]:cut[index + 1]]), kind
                assert bits(gathered) == bits(total) == bits(whole), kind
            assert_counted(cluster, cut, x[0].itemsize, zs.Mesh(nodes, each))


def assert_counted(cluster, cut, itemsize, mesh):
    """Measured bytes are the closed forms', those between nodes too; each chunk crosses so often as it must."""
    across = [0] * mesh.ranks
    for number, row in enumerate(cluster.trace[0].collectives()):
        shape = closed_forms.checked_shape(closed_forms.CollectiveShape(
            row.call.operation, row.call.algorithm, cut, itemsize, itemsize))
        rows = [trace.collectives()[number] for trace in cluster.trace]
        assert tuple(row.sent_nbytes for row in rows) == closed_forms.sent_of(shape).nbytes
        hops = Counter()
        for hop in row.hops():
            assert hop.nbytes == itemsize * sum(cut[chunk + 1] - cut[chunk] for chunk in hop.chunks)
            hops[hop.source, hop.destination] += hop.nbytes
        levels = Counter()
        for level in closed_forms.levels(shape):
            for source, to, nbytes in zip(level.sources, level.destinations, level.nbytes, strict=True):
                levels[int(source), int(to)] += int(nbytes) * level.times
                crosses = mesh.place(int(source))[0] != mesh.place(int(to))[0]
                across[int(source)] += int(nbytes) * level.times * crosses
        assert hops == levels
    assert mesh.sent_nbytes_across(cluster.trace) == across
    assert sum(across) == 4 * (mesh.nodes - 1) * cut[-1] * itemsize, "reduce-scatter, all-gather, and both again"


def test_a_node_sends_all_that_leaves_it_by_the_cards_of_all_its_ranks_in_a_ring_and_in_the_hierarchy():
    """(N - 1)/N of a vector twice in a ring, (M - 1)/M in the hierarchy; over R cards."""
    fast, slow = Link("fast", 1e12, 0, "made up", "today"), Link("slow", 1e9, 0, "made up", "today")
    cut, network = oracles.ceil_cut(10**9, 16), Network(fast, slow, 4)
    ring, steps = (cost.cost("all_reduce", name, cut, 1, network).seconds for name in ("ring", "hierarchical(4)"))
    assert ring == pytest.approx(2 * 15 / 16 / 4, rel=1e-2)  # what goes on inside, at 1e12 bytes a second, is left out
    assert steps == pytest.approx(2 * 3 / 4 / 4, rel=1e-2)


def test_a_group_that_all_know_sends_nothing_and_is_made_once_at_its_place():
    def program(rank):
        mesh = zs.Mesh.of("2x3", rank.size)
        inside, across = mesh.inside(rank), mesh.across(rank)
        again = mesh.inside(rank)
        assert inside.key == again.key
        before = rank.trace.sent_nbytes()
        sums = [int(group.all_reduce(np.array([rank.index]))[0]) for group in (inside, across, again)]
        other = rank.new_group([0, 1, 2] if rank.index < 3 else [5, 4, 3])
        return before, inside.group, across.group, sums, other.key == inside.key

    results = zs.Cluster(6, debug=True).run(program)
    assert results[4] == (0, (3, 4, 5), (1, 4), [12, 5, 12], False)


def test_messages_between_nodes_are_counted_too():
    def program(rank):
        rank.exchange(np.zeros(5, np.uint8), (rank.index + 1) % 4, np.empty(5, np.uint8), (rank.index - 1) % 4)

    cluster = zs.Cluster(4)
    cluster.run(program)
    assert zs.Mesh(2, 2).sent_nbytes_across(cluster.trace) == [0, 5, 0, 5]


@pytest.mark.parametrize(("ask", "text"), [
    (lambda r: zs.Mesh.of((2, 3), r.size), "a mesh of 2 nodes with 3 ranks each has 6 ranks, and there are 4; take "),
    (lambda r: zs.Mesh.of((4,), r.size), "mesh=(4,) must be nodes and ranks of a node, as \"2x4\""),
    (lambda r: zs.Mesh.of("2*2", r.size), "mesh='2*2' must be nodes and ranks of a node"),
    (lambda r: zs.Mesh.of(4, r.size), "mesh=4 must be"), (lambda r: zs.Mesh(0, 4), "1 or more, found nodes=0; write"),
    (lambda r: zs.Mesh(2, True), "found ranks_per_node=True"),
    (lambda r: r.all_reduce(np.zeros(4), algorithm="hierarchical"), "all_reduce by 'hierarchical': name the ranks of "),
    (lambda r: r.all_reduce(np.zeros(4), algorithm="hierarchical(0)"), "name the ranks of a node, as hierarchical(4)"),
    (lambda r: r.all_gather(np.zeros(4), algorithm="hierarchical(3)"), "needs whole nodes of 3 ranks, and this group "),
    (lambda r: r.broadcast(np.zeros(4), algorithm="hierarchical(2)"), "only reduce_scatter, all_gather, all_reduce go"),
    (lambda r: r.all_reduce(np.zeros(4, np.float32), algorithm="hierarchical(2)", wire="bf16"), "served by algorithm="),
    (lambda r: r.new_group([1 - r.index // 3, 3]), "rank 0 asked for a group of the ranks [1, 3]; name each member"),
    (lambda r: r.new_group([0, 1, 1, 2, 3]), "asked for a group of the ranks [0, 1, 1, 2, 3]"),
    (lambda r: r.new_group([0, 4]), "member of a group=4, but the group has the ranks 0 to 3"),
])
def test_what_makes_no_mesh_and_no_group_is_refused(ask, text):
    assert_refused(lambda: zs.Cluster(4).run(ask), literally(text))
