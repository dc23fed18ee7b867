"""Where a run's checkpoints and metrics lie."""

from __future__ import annotations

import os
import time
import urllib.parse

from wingbeat.train._config import RunConfig
from wingbeat.train._unsupported import refuse


def name_of(config: RunConfig) -> str:
    """The run's name: its own, or one that no other run has."""
    return config.name or f"torch_trainer-{time.strftime('%Y-%m-%d_%H-%M-%S')}-{os.urandom(2).hex()}"


def folder_of(config: RunConfig, name: str) -> str:
    """The run's folder: an absolute path or a URL.

    Raises:
        RuntimeError: No storage is named, and this user has no home.
        NotImplementedError: A URL has settings in it.
    """
    if config.storage_path is None:
        return os.path.join(_own(), name)
    path = os.fspath(config.storage_path)
    if "://" not in path:
        return os.path.join(os.path.abspath(os.path.expanduser(path)), name)
    if "?" in path or "#" in path:
        raise refuse(f"settings in a URL ({path})", "set them in the environment, as AWS_REGION and AWS_ENDPOINT_URL")
    local = local_path(path)
    return os.path.join(local, name) if local is not None else f"{path.rstrip('/')}/{urllib.parse.quote(name, safe='')}"


def make_own(config: RunConfig, folder: str) -> None:
    """Makes the run's folder, if nobody has said where: the home of this user may be one that cannot be written.

    Args:
        config: What may name a storage. It is made by what uses it.
        folder: The run's folder.

    Raises:
        OSError: It cannot be made; the text says what to do.
    """
    if config.storage_path is not None:
        return
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        why = f"{error.strerror}; name a folder that can be written: RunConfig(storage_path=…)"
        raise OSError(error.errno, why, folder) from error


def local_path(url: str) -> str | None:
    """The path of a `file:` URL, or of what is a path already; None for other URLs."""
    if "://" not in url:
        return url
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.unquote(parts.path) if parts.scheme == "file" else None


def _own() -> str:
    """As `wingbeat train` has it without `--storage`."""
    data = os.environ.get("XDG_DATA_HOME", "")
    if not os.path.isabs(data):
        home = os.environ.get("HOME", "")
        if not os.path.isabs(home):
            raise RuntimeError("there is no home to store checkpoints in: name RunConfig(storage_path=…)")
        data = os.path.join(home, ".local", "share")
    return os.path.join(data, "wingbeat", "runs")
