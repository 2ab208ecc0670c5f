"""Benchmarks: both sides of each row run and compute the same, what is measured is printed; no time is asserted."""

import json
from importlib.util import find_spec

import numpy as np
import pytest

from benchmarks.speed import rows, runner
from tests.support import ask, assert_command_refuses
from zerosim.cli import bench

# Rows whose sides need processes of their own: it is accounts that one side leaves out, and imports that are timed.
APART = ("accounts", "import", "plan-prompt", "mpi-16")
HERE = [row for row in rows().values() if row.processes == (1, 1) and row.goal is not None and row.theirs
        and row.name not in APART]


@pytest.mark.parametrize("row", HERE, ids=lambda row: row.name)
def test_both_sides_run_and_compute_the_same_where_they_compute_the_same(row):
    missing = [name for name in row.needs if find_spec(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} is not installed")
    ours, theirs = row.ours(True), row.theirs(True)
    for _ in range(2):
        found, wanted = ours(), theirs()
    if row.tolerance is None:
        return
    found, wanted = (np.asarray(value, np.float64) for value in (found, wanted))
    assert np.abs(found - wanted).max() <= row.tolerance * np.abs(wanted).max()


def test_rows_without_a_goal_take_their_step():
    for row in rows().values():
        if row.name in ("by-ranks-4", "by-parameters-10000", "by-layers-1", "null"):
            assert row.theirs(True)() is row.ours(True)() is None


def test_targets_of_make_are_run_and_reported_in_seconds_and_only_where_they_are_named(monkeypatch):
    named = [row for row in rows().values() if not row.theirs]
    assert [row.name for row in named] == ["make-demo", "make-test", "make-test-cpu"]
    assert [row.name for row in runner.chosen([]) if row in named] == []
    for row in named:
        begun = row.clock()
        row.ours(True)()
        assert row.clock() > begun
    monkeypatch.setattr(runner, "_child", lambda row, arguments, processes: {"seconds": [7.0]})
    found = runner.measure(named[0], rounds=1)
    assert found.theirs == ()
    assert found.ratio == found.seconds == found.as_json()["ratio"] == 7.0
    assert "7.00" in str(bench._cells(found))


@pytest.mark.slow
@pytest.mark.parametrize("name", APART)
def test_a_row_is_measured_by_processes_in_turns(name):
    row = rows()[name]
    if row.needs and find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    found = runner.measure(row, rounds=2)
    assert len(found.ours) == len(found.theirs) == 2
    assert min(*found.ours, *found.theirs) > 0
    assert found.as_json()["ratio"] == found.ratio == found.seconds / found.seconds_against


def test_the_command_lists_measures_and_refuses(monkeypatch, tmp_path):
    """The measurement itself is replaced: half of the other's time for each row."""
    monkeypatch.setattr(runner, "measure", lambda row, rounds: runner.Measured(row, (1.0,) * rounds, (2.0,) * rounds))
    monkeypatch.setattr(runner, "machine", lambda: {"processor": "a laptop", "cores": 2})
    listed = json.loads(ask("bench", "--list", "--json").stdout)["rows"]
    assert [row["name"] for row in listed] == [row.name for row in rows().values() if row.goal is not None]
    measured = json.loads(ask("bench", "ring", "by-ranks", "--rounds", "3", "--json", "--plots", str(tmp_path)).stdout)
    assert {row["name"].rpartition("-")[0] for row in measured["rows"]} == {"ring-4", "ring-8", "ring-64", "by-ranks"}
    assert all(row["ratio"] == 0.5 and len(row["seconds"]) == 3 for row in measured["rows"])
    assert [path.name for path in tmp_path.iterdir()] == ["by-ranks.svg"]
    said = ask("bench", "gpt").stdout
    assert all(part in said for part in ("0.50", "1.00", "a laptop"))
    assert_command_refuses("no benchmark is called 'rings'; they are fsdp2-2,", "bench", "rings")
    assert_command_refuses("at most one row of each was asked for; name by, by-ranks", "bench", "gpt", "--plots", "no")
    assert_command_refuses("but: File exists; name a folder", "bench", "by", "--plots", __file__)


def test_a_peer_that_is_not_installed_is_said(monkeypatch):
    monkeypatch.setattr(runner, "find_spec", lambda name: None)
    assert runner.measure(rows()["gpt"]).lacking == "torch is not installed"
    assert runner.measure(rows()["deepspeed-2"]).lacking == "torch and deepspeed are not installed"
