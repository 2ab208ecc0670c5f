"""PyTorch's and DeepSpeed's own training beside the engine's of the settings that zerosim reads: each as judged."""

import tomllib
from importlib.resources import files

import numpy as np
import pytest

import zerosim as zs
from tests.peers.cases import CASES, MODEL, OPTIMIZERS, WEIGHTS, by_peers, by_zerosim, flat, judged
from tests.peers.launcher import launch

pytestmark = [pytest.mark.slow, pytest.mark.peer, pytest.mark.usefixtures("installed")]


@pytest.fixture(scope="module")
def peers(installed):
    assert (zs.round_to(flat(WEIGHTS).astype(np.float32), "bf16") != flat(WEIGHTS)).mean() > 0.9
    return by_peers()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_run_of_a_peer_is_judged_as_the_table_says_and_is_not_with_one_setting_wrong(case, peers):
    there = peers[case.name]
    assert judged(case, there, case.arguments)[0] == case.verdict, there.get("refused")
    if case.verdict == "equal":
        assert judged(case, there, case.wrong)[0] != "equal"
    else:  # a peer that ran and came to zerosim's bits is none of these
        ours = {"weights": by_zerosim(case, case.arguments)["weights"]}
        assert judged(case, ours, case.arguments)[0] == "equal"
        assert case.verdict == "refused" or judged(case, there, case.wrong)[0] == "other"
    if case.spoiled:
        assert there["skipped"] == [False, True, False, False]


def test_the_table_of_docs_is_what_this_run_found(peers):
    recorded = tomllib.loads(files("zerosim.course.published").joinpath("peers.toml").read_text("utf-8"))["row"]
    assert [(row["name"], row["ranks"], row["verdict"], row["why"]) for row in recorded] == [
        (case.name, case.ranks, case.verdict, case.why) for case in CASES]
    for case, row in zip(CASES, recorded, strict=True):
        verdict, differ, _ = judged(case, peers[case.name], case.arguments)
        assert verdict == row["verdict"]
        assert (differ == 0) == (row["differ"] == 0), row
        assert row.get("said", "") == peers[case.name].get("refused", ""), row


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 3), (4, 2), (4, 3)])
def test_a_checkpoint_resharded_by_torch_and_by_zerosim_holds_the_same_masters(saved_on, loaded_on, tmp_path):
    trained = {name: w + np.float32(1) for name, w in WEIGHTS.items()}
    saved = launch("tests.peers.jobs:resaved", saved_on, trained, str(tmp_path / "dcp"), saves=True)
    loaded = launch("tests.peers.jobs:resaved", loaded_on, WEIGHTS, str(tmp_path / "dcp"), saves=False)

    def save(rank):
        zs.Engine(rank, MODEL, OPTIMIZERS["AdamW"], stage=3, policy="bf16", weights=trained).save(tmp_path / "own")

    def load(rank):
        engine = zs.Engine(rank, MODEL, OPTIMIZERS["AdamW"], stage=3, policy="bf16")
        engine.load(tmp_path / "own")
        return {name: engine.state(name)["master"] for name in WEIGHTS}

    zs.Cluster(saved_on).run(save)
    own = zs.Cluster(loaded_on).run(load)
    for found in (*saved, *loaded, *own):
        assert np.array_equal(flat(found), flat(trained))
