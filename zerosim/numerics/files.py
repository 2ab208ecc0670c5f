"""Files that are whole or not there."""

import errno
import os
from pathlib import Path


def write_whole(path: Path, content: bytes) -> Path:
    """Writes a file so that all of it is there, or what was there before; raises OSError where it cannot be written.

    What is no file, a pipe or a device, is written to as it is.
    """
    if not path.name or path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():  # a file moved to the place of /dev/null would be the end of it
        path.write_bytes(content)
        return path
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")  # in the same folder, so that it can be renamed
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        if path.parent.is_dir():
            unfinished.unlink(missing_ok=True)
    return path
