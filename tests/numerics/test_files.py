"""What is written is whole, or what was there before; and what is no file stays what it is."""

import os
import threading

import pytest

from zerosim.numerics.files import write_whole


def test_a_write_that_fails_leaves_what_was_there_and_nothing_beside_it(tmp_path):
    path = write_whole(tmp_path / "run.json", b"before")
    with pytest.raises(TypeError):
        write_whole(path, "no bytes")
    assert path.read_bytes() == b"before"
    write_whole(path, b"after")
    assert path.read_bytes() == b"after"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_and_a_file_in_no_folder_are_refused(tmp_path):
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path, b"")
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "nowhere" / "run.json", b"")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path):
    path, found = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: found.append(path.read_bytes()), daemon=True)
    reader.start()
    write_whole(path, b"through")
    reader.join(10)
    assert found == [b"through"]
    assert path.is_fifo()
