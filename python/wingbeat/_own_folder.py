"""Folders for the time of a `with`, which the next program removes if this one is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

# The file in each that its program locks. Nobody else makes one of this name: its folder may be removed.
_LOCK = ".wingbeat-own"


@contextlib.contextmanager
def own_folder(prefix: str) -> Iterator[str]:
    """Makes a folder among the temporary ones, which nobody else can read, and removes what killed programs have left of such.

    Args:
        prefix: How its name begins.

    Yields:
        Its path.
    """
    remove_left(prefix)
    with tempfile.TemporaryDirectory(prefix=prefix) as folder, _locked(folder):
        yield folder


def remove_left(prefix: str) -> None:
    """Removes the folders of programs that were killed.

    Args:
        prefix: How their names begin.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with open(folder / _LOCK, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Holds a lock in a folder, which the kernel gives up when this program ends."""
    made = Path(folder, f"{_LOCK}-new")
    with open(made, "wb") as file:
        with contextlib.suppress(OSError):  # a file system without locks: nobody can lock it either
            fcntl.flock(file, fcntl.LOCK_EX)
            made.rename(Path(folder, _LOCK))  # nobody finds it unlocked before
        yield
