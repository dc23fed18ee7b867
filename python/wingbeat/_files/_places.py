"""Where files are: paths and URLs, the file systems that open them, and the files below a folder."""

from __future__ import annotations

import os
from typing import Any


class UnreadableError(Exception):
    """A file cannot be read. `wingbeat.train` and `wingbeat.ml` make errors of their own of it.

    Attributes:
        path: The file, the folder or the URL.
        why: Why.
    """

    def __init__(self, path: str, why: str) -> None:
        super().__init__(path, why)
        self.path, self.why = path, why


def reason(error: Exception) -> str:
    """The first line of what pyarrow or the system say.

    Args:
        error: What was raised.
    """
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def filesystem_of(path: str) -> tuple[Any, str]:
    """The file system of a path or URL: pyarrow's own where it has one, and fsspec's elsewhere.

    Args:
        path: The path or URL.

    Returns:
        The file system, and the path in it.

    Raises:
        UnreadableError: Neither knows the scheme.
    """
    from pyarrow import fs

    if "://" not in path:
        return fs.LocalFileSystem(), os.path.abspath(os.path.expanduser(path))
    try:
        filesystem, inner = fs.FileSystem.from_uri(path)
        return filesystem, inner
    except Exception as own:
        try:
            import fsspec  # type: ignore[import-untyped,unused-ignore]

            other, inner = fsspec.core.url_to_fs(path)
            return fs.PyFileSystem(fs.FSSpecHandler(other)), inner
        except Exception as error:
            raise UnreadableError(path, f"pyarrow: {own}; fsspec: {error}") from error


def absolute(filesystem: Any, path: str) -> str:
    """A path as other processes take it, which have other working directories.

    Args:
        filesystem: The `pyarrow.fs.FileSystem` in which it is.
        path: The path.
    """
    from pyarrow import fs

    return os.path.abspath(os.path.expanduser(path)) if isinstance(filesystem, fs.LocalFileSystem) else path


def files_below(filesystem: Any, inner: str, path: str, ending: str = "") -> list[str] | None:
    """The files of a folder and below, in the order of their paths, without those that begin with "_" or ".", or are in such
    a folder.

    Args:
        filesystem: The `pyarrow.fs.FileSystem`.
        inner: The path in it.
        path: What errors call it.
        ending: How the names of the files end.

    Returns:
        Their paths; None if it is no folder but a file.

    Raises:
        UnreadableError: There is no such file or folder, or it cannot be listed.
    """
    import pyarrow
    from pyarrow import fs

    try:
        kind = filesystem.get_file_info(inner).type
        if kind == fs.FileType.File:
            return None
        is_here = isinstance(filesystem, fs.LocalFileSystem)
        if kind != fs.FileType.Directory:
            hint = "; patterns are not expanded: give glob.glob(…)" if any(one in path for one in "*?[") else ""
            raise UnreadableError(path, f"there is no such file or folder{hint}")
        if is_here:
            paths = _walked(inner)
        else:
            paths = [one.path for one in filesystem.get_file_info(fs.FileSelector(inner, recursive=True)) if one.is_file]
    except (OSError, pyarrow.ArrowException) as error:
        raise UnreadableError(path, str(error)) from error
    below = len(inner.rstrip("/"))
    found = sorted(one for one in paths if one.endswith(ending) and _is_data(one[below:]))
    if is_here:
        for one in found:
            if not os.path.exists(one):
                raise UnreadableError(one, "it is a link to nothing")
        # A file that links lead to as well is read once.
        kept: dict[str, str] = {}
        for one in found:
            kept.setdefault(os.path.realpath(one), one)
        return list(kept.values())
    return found


def _walked(folder: str) -> list[str]:
    """The files below a folder of this machine, and links to nothing. A folder that a link leads to again is walked once."""

    def fail(error: OSError) -> None:
        raise error

    seen, found = set(), []
    for parent, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        about = os.stat(parent)
        if (about.st_dev, about.st_ino) in seen:
            folders.clear()
            continue
        seen.add((about.st_dev, about.st_ino))
        folders[:] = sorted(filter(_is_data, folders))
        paths = [os.path.join(parent, name) for name in files]
        found += [path for path in paths if os.path.isfile(path) or not os.path.exists(path)]
    return found


def _is_data(path: str) -> bool:
    return not any(part.startswith(("_", ".")) for part in path.split("/"))
