"""Temporary folders that do not stay if the program is killed: each is locked, and the next program removes unlocked ones."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

# The file that the program which uses a folder locks. The kernel gives the lock up when the program ends.
_LOCK = ".lock"


@contextlib.contextmanager
def temporary(prefix: str) -> Iterator[str]:
    """Makes a folder for the time of a `with`, and removes those that killed programs of this user have left.

    Args:
        prefix: The start of its name, which says whose it is.

    Yields:
        Its path.
    """
    _remove_left(prefix)
    with tempfile.TemporaryDirectory(prefix=prefix) as folder, _locked(folder):
        yield folder


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    made = Path(folder, f"{_LOCK}-new")
    with open(made, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        made.rename(Path(folder, _LOCK))  # nobody finds it unlocked before
        yield


def _remove_left(prefix: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with open(folder / _LOCK, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
