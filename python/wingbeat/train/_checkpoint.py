"""A checkpoint as scripts and programs see it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_METADATA = ".metadata.json"
_PREFIX = "checkpoint_"
# Of temporary copies. Ranks name theirs `wingbeat-checkpoint-…`, and remove old folders of that name.
_COPY = "wingbeat-copy-"
# What the run adds to a checkpoint, and no user wants.
_COMPLETE = ".wingbeat-complete.json"
_OWN = (_COMPLETE, ".wingbeat-made-in")


@dataclass(frozen=True)
class Checkpoint:
    """A directory with what was reported as a checkpoint, on this machine or elsewhere.

    Read a checkpoint that was reported, and leave it as it is. `get_checkpoint` gives each rank a local one.

    Attributes:
        path: The directory, or its URL (`s3://…`).
        filesystem: The `pyarrow.fs.FileSystem` in which `path` lies. None for a local path or a URL.
    """

    path: str
    filesystem: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", os.fspath(self.path))

    def __fspath__(self) -> str:
        return self.path

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Makes a checkpoint of a local directory, which is not copied until it is reported.

        Args:
            path: The directory.

        Returns:
            The checkpoint.
        """
        return cls(os.fspath(path))

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copies the checkpoint into a local directory.

        Args:
            path: The directory, which is made if it does not exist; without it, a new temporary one, which is the
                caller's to remove.

        Returns:
            The directory.

        Raises:
            FileNotFoundError: There is no such checkpoint.
            RuntimeError: The checkpoint is not local, and pyarrow is not installed.
        """
        import shutil
        import tempfile

        if self._is_local() and not os.path.isdir(self.path):
            raise FileNotFoundError(f"the checkpoint {self.path} does not exist, or is not a directory")
        to = os.fspath(path) if path is not None else tempfile.mkdtemp(prefix=_COPY)
        if self._is_local():
            shutil.copytree(self.path, to, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*_OWN))
            return to
        filesystem, source = self._remote()
        os.makedirs(to, exist_ok=True)
        import pyarrow.fs

        pyarrow.fs.copy_files(source, to, source_filesystem=filesystem, destination_filesystem=pyarrow.fs.LocalFileSystem())
        for name in _OWN:
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(to, name))
        return to

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """Gives the checkpoint as a local directory for the time of a `with`.

        Yields:
            The checkpoint's own directory if it is local, and otherwise a copy, which is removed at the end.

        Raises:
            FileNotFoundError: There is no such checkpoint.
            RuntimeError: The checkpoint is not local, and pyarrow is not installed.
        """
        if self._is_local():
            if not os.path.exists(self.path):
                raise FileNotFoundError(f"the checkpoint {self.path} does not exist")
            yield self.path
            return
        import tempfile

        with tempfile.TemporaryDirectory(prefix=_COPY) as folder:
            yield self.to_directory(folder)

    def get_metadata(self) -> dict[str, Any]:
        """The metadata that was stored with `set_metadata` or `update_metadata`.

        Returns:
            The metadata; empty if there is none.
        """
        with self.as_directory() as folder:
            try:
                with open(os.path.join(folder, _METADATA), encoding="utf-8") as file:
                    metadata: dict[str, Any] = json.load(file)
            except FileNotFoundError:
                return {}
        return metadata

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Stores metadata in the directory, in place of what there was. Call it before the checkpoint is reported.

        Args:
            metadata: What JSON can hold.

        Raises:
            NotImplementedError: The checkpoint is not local.
        """
        if not self._is_local():
            from wingbeat.train._unsupported import refuse

            raise refuse("set_metadata of a checkpoint in a remote storage", "set it before the checkpoint is reported")
        with open(os.path.join(self.path, _METADATA), "w", encoding="utf-8") as file:
            json.dump(dict(metadata), file)

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Adds to the metadata. Call it before the checkpoint is reported.

        Args:
            metadata: What JSON can hold.

        Raises:
            NotImplementedError: The checkpoint is not local.
        """
        self.set_metadata({**self.get_metadata(), **metadata})

    def _is_local(self) -> bool:
        return self.filesystem is None and "://" not in self.path

    def _remote(self) -> tuple[Any, str]:
        if self.filesystem is not None:
            return self.filesystem, self.path
        try:
            from pyarrow.fs import FileSystem
        except ImportError:
            raise RuntimeError(
                f"{self.path} is not on this machine, and reading it needs pyarrow: pip install pyarrow"
            ) from None
        filesystem, path = FileSystem.from_uri(self.path)
        return filesystem, path


def metrics_of(path: str | os.PathLike[str]) -> dict[str, float] | None:
    """The metrics that were reported with a local checkpoint.

    Args:
        path: Its directory.

    Returns:
        The metrics; None if the checkpoint is not complete.
    """
    try:
        with open(os.path.join(path, _COMPLETE), encoding="utf-8") as file:
            return {name: float(text) for name, text in json.load(file)["metrics"].items()}
    except (OSError, ValueError, LookupError):
        return None


def complete_in(folder: str | os.PathLike[str]) -> list[tuple[Checkpoint, dict[str, float]]]:
    """The complete checkpoints in the folder of a run, in the order of their reports.

    Args:
        folder: The folder, on this machine.

    Returns:
        The checkpoints, each with the metrics of its report.
    """
    try:
        names = [name for name in os.listdir(folder) if name.startswith(_PREFIX) and name[len(_PREFIX) :].isdecimal()]
    except OSError:
        return []
    paths = [os.path.join(folder, name) for name in sorted(names, key=lambda name: int(name[len(_PREFIX) :]))]
    found = [(Checkpoint(path), metrics_of(path)) for path in paths]
    return [(checkpoint, metrics) for checkpoint, metrics in found if metrics is not None]
