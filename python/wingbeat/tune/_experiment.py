"""The folder of a tuner: which program uses it, and what it knows of its trials, so that another can go on with them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
from pathlib import Path
from typing import Any

# Locked by the program that uses the folder, for as long as it lives.
_LOCK = "tuner.lock"
_STATE = "tuner.pickle"


class Experiment:
    """The folder of a tuner, which this program alone uses until `close`.

    Args:
        folder: The folder.
        is_new: Whether there must be nothing in it yet; else there must be what another program has left.

    Raises:
        FileExistsError: It is to be new, and has files.
        FileNotFoundError: It is to go on, and nothing to go on with is there.
        RuntimeError: Another program uses it.
    """

    def __init__(self, folder: str, is_new: bool) -> None:
        self.folder, self._is_new = folder, is_new
        lock = os.path.join(folder, _LOCK)
        if not is_new:
            if not can_restore(folder):
                raise FileNotFoundError(f"{folder} has no trials to go on with: a Tuner writes {_STATE} to its folder")
            self._file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        else:
            try:
                os.makedirs(folder, exist_ok=True)
            except OSError as error:
                where = "trials are stored there unless RunConfig(storage_path=…) names another folder"
                raise type(error)(error.errno, f"{error.strerror}; {where}", folder) from error
            taken = FileExistsError(
                f"{folder} has files already, perhaps earlier trials; give RunConfig another name, or go on with Tuner.restore"
            )
            if os.listdir(folder):
                raise taken
            try:
                self._file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            except FileExistsError:
                raise taken from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise RuntimeError(f"another program runs the trials in {folder}") from None
        except OSError:  # a file system without locks
            pass

    def folder_of(self, trial_id: str) -> Path:
        """The folder of a trial.

        Args:
            trial_id: The trial.
        """
        return Path(self.folder, trial_id)

    def save(self, state: dict[str, Any]) -> None:
        """Writes what is known, whole or not at all.

        Args:
            state: What is known.

        Raises:
            Exception: It cannot be pickled, or not be written.
        """
        import cloudpickle

        made = os.path.join(self.folder, f".{_STATE}-{os.getpid()}")
        try:
            with open(made, "wb") as file:
                cloudpickle.dump(state, file)
                file.flush()
                os.fsync(file.fileno())  # or the file may be empty after a loss of power
            os.replace(made, os.path.join(self.folder, _STATE))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(made)
            raise

    def close(self) -> None:
        """Lets others use the folder. One that was new and in which nothing was stored is removed."""
        if self._is_new and set(os.listdir(self.folder)) <= {_LOCK}:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.folder, _LOCK))
                os.rmdir(self.folder)
        os.close(self._file)


def can_restore(folder: str) -> bool:
    """Whether a tuner has left in a folder what another can go on with.

    Args:
        folder: The folder.
    """
    return os.path.isfile(os.path.join(folder, _STATE))


def load(folder: str) -> dict[str, Any]:
    """What a tuner has known last.

    Args:
        folder: Its folder.

    Raises:
        FileNotFoundError: There is nothing.
        RuntimeError: It is damaged, or has something that cannot be made here. The cause says what.
    """
    try:
        with open(os.path.join(folder, _STATE), "rb") as file:
            state: dict[str, Any] = pickle.load(file)
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder} has no trials to go on with: a Tuner writes {_STATE} to its folder") from None
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        file_name = os.path.join(folder, _STATE)
        raise RuntimeError(f"{file_name} is damaged, or needs a module that is not to be had here: {why}") from error
    return state
