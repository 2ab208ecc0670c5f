"""What is written is a whole file; a link, a pipe or a device stays what it is."""

import io
import os
import stat
import threading
from pathlib import Path

import numpy as np
import pytest

import zerosim as zs
from tests.support import assert_refused
from zerosim.display import report
from zerosim.numerics import files
from zerosim.planning import hardware, recording, timeline


@pytest.fixture
def cluster() -> zs.Cluster:
    """Three ranks that have added up three numbers."""
    cluster = zs.Cluster(3)
    cluster.run(lambda rank: rank.all_reduce(np.arange(3.0) + rank.index))
    return cluster


WRITERS = {"a run": lambda cluster, path: cluster.save(path),
           "a page": lambda cluster, path: report.save_report(cluster.save(path.with_name("recorded.json")), path),
           "a recording": lambda cluster, path: recording.save(recording.record(cluster.trace), path),
           "a timeline": lambda cluster, path: replayed(cluster).save_chrome_trace(path),
           "bytes": lambda cluster, path: files.write_whole(path, b"word")}


def replayed(cluster: zs.Cluster) -> timeline.Timeline:
    """The last run, on a machine that is known."""
    network = hardware.Network(hardware.link("nvlink4"))
    return timeline.replay(recording.record(cluster.trace), timeline.Machine(hardware.device("h100-80"), network))


@pytest.mark.parametrize("writer", WRITERS)
def test_a_pipe_stays_a_pipe_and_a_link_a_link_and_the_file_to_which_it_points_is_written(writer, cluster, tmp_path):
    plain = WRITERS[writer](cluster, tmp_path / "plain").read_bytes()
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()), daemon=True)
    reader.start()
    WRITERS[writer](cluster, pipe)
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    reader.join(timeout=600)
    assert found == [plain]
    for name in ("there", "new"):
        file, link = tmp_path / name / "file", tmp_path / f"link to {name}"
        file.parent.mkdir()
        if name == "there":
            file.write_text("before")
        link.symlink_to(file)
        WRITERS[writer](cluster, link)
        assert link.is_symlink()
        assert file.read_bytes() == plain
        assert [one.name for one in file.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("writer", WRITERS)
def test_a_write_that_fails_leaves_what_was_there_and_nothing_beside_it(writer, cluster, tmp_path, monkeypatch):
    file = files.write_whole(tmp_path / "file", b"before")
    left = {"file", "recorded.json"} if writer == "a page" else {"file"}

    class Full(io.FileIO):
        def write(self, content: bytes) -> int:
            super().write(content[:2])
            raise OSError(28, "No space left on device")

    real = Path.open
    monkeypatch.setattr(Path, "open", lambda path, mode="r", **others: Full(path, "w") if (
        mode == "wb" and not path.name.startswith(".recorded")) else real(path, mode, **others))
    assert_refused(lambda: WRITERS[writer](cluster, file), "No space left", Exception)
    assert file.read_bytes() == b"before"
    assert {one.name for one in tmp_path.iterdir()} == left


def test_a_folder_and_a_file_in_no_folder_are_refused(tmp_path):
    assert_refused(lambda: files.write_whole(tmp_path, b""), "", IsADirectoryError)
    assert_refused(lambda: files.write_whole(tmp_path / "nowhere" / "run.json", b""), "", FileNotFoundError)
    (tmp_path / "circle").symlink_to("circle")
    assert_refused(lambda: files.write_whole(tmp_path / "circle", b""), "", OSError)
    assert_refused(lambda: files.require_writable(tmp_path / "circle", "write"), "name a file that can be written")
