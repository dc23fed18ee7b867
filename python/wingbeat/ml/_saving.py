"""Saving and loading in Spark's layout, so that `pyspark.ml.connect` loads what was saved here, and the reverse.

A folder holds `metadata.json` and a file for each model. Spark's own files are `.torch` (a pickled `torch.nn.Sequential`)
and `.sklearn.pkl` (a pickled scaler of scikit-learn). Beside each lie the same weights as `.safetensors`, which are
what is loaded here if they are there. Parameters that Spark does not have are in `wingbeatParamMap`, which it ignores.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any, TypeVar

import wingbeat
from wingbeat._own_folder import own_folder
from wingbeat.ml._errors import MlError
from wingbeat.ml.param import Params

if TYPE_CHECKING:
    import numpy

METADATA = "metadata.json"
# The release whose layout this is.
_SPARK = "4.0.1"
# The end of the names of files with weights that are no pickles.
_SAFE = ".safetensors"
_OURS, _THEIRS = "wingbeat.ml.", "pyspark.ml.connect."
# Parameters that pyspark's classes do not have, and so would fail to load.
_OWN = frozenset({"localBytes", "numWorkers", "useGpu", "collectSubModels", "skipFailedTrials"})
# The classes that a file may name. Nothing else is imported because of a file: a module runs code as it is imported.
_CLASSES = {
    "classification": ("LogisticRegression", "LogisticRegressionModel"),
    "evaluation": ("BinaryClassificationEvaluator", "MulticlassClassificationEvaluator", "RegressionEvaluator"),
    "feature": ("ArrayAssembler", "MaxAbsScaler", "MaxAbsScalerModel", "StandardScaler", "StandardScalerModel"),
    "pipeline": ("Pipeline", "PipelineModel"),
    "tuning": ("CrossValidator", "CrossValidatorModel"),
}

Loaded = TypeVar("Loaded", bound="Savable")


class Savable(Params):
    """What can be saved and loaded."""

    def saveToLocal(self, path: str, *, overwrite: bool = False) -> None:
        """Saves this object in a new folder.

        Args:
            path: The folder.
            overwrite: Whether a saved object that is there is replaced.

        Raises:
            FileExistsError: Something is there, and `overwrite` is not set or it is no saved object.
            ValueError: The path is empty, or the current folder is in it.
            ModuleNotFoundError: scikit-learn, which writes Spark's file of a scaler, is not installed.
        """
        path = _local_folder(path)
        _check_replaceable(path, overwrite)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        # Whole or not at all, and what is replaced stays until then.
        with tempfile.TemporaryDirectory(prefix=".wingbeat-", dir=os.path.dirname(path)) as folder:
            made = os.path.join(folder, "made")
            os.mkdir(made)
            metadata = self._save(made, [])
            with open(os.path.join(made, METADATA), "w", encoding="utf-8") as out:
                json.dump(metadata, out)
            _put(made, path, os.path.join(folder, "replaced"), overwrite)

    @classmethod
    def loadFromLocal(cls: type[Loaded], path: str) -> Loaded:
        """Loads an object that was saved here or by `pyspark.ml.connect`.

        Args:
            path: The folder.

        Returns:
            The object.

        Raises:
            FileNotFoundError: There is no such folder, or it has no `metadata.json`.
            MlError: The folder holds an object of another class, one that is unknown here, or a damaged one.
        """
        return _loaded(cls, path, path)

    def save(self, path: str, *, overwrite: bool = False) -> None:
        """Saves this object, also in an object store.

        Args:
            path: The folder, or its URL.
            overwrite: Whether a saved object that is there is replaced. In an object store, the old one is deleted once the
                new one has been written to a temporary folder of this machine.

        Raises:
            FileExistsError: Something is there, and `overwrite` is not set or it is no saved object.
            ValueError: The path is empty or the root of a file system, or the current folder is in it.
        """
        from pyarrow import fs

        from wingbeat.ml._parquet import filesystem_of

        path = os.fspath(path)
        filesystem, inner = filesystem_of(path)
        if not path or filesystem.type_name == "local":
            self.saveToLocal(inner if path else path, overwrite=overwrite)
            return
        if not inner.strip("/"):
            raise ValueError(f"cannot save in {path}, the root of a file system: name a folder in it")
        there = filesystem.get_file_info(inner).type
        if there == fs.FileType.Directory:
            _check_content(path, filesystem, inner, overwrite)
        elif there != fs.FileType.NotFound:
            raise FileExistsError(f"{path} already exists and is no folder: remove it, or choose another path")
        with own_folder("wingbeat-model-") as folder:
            self.saveToLocal(os.path.join(folder, "model"))
            if there == fs.FileType.Directory:
                # Not the folder itself, which may be a bucket.
                filesystem.delete_dir_contents(inner)
            filesystem.create_dir(inner, recursive=True)
            fs.copy_files(os.path.join(folder, "model"), inner, destination_filesystem=filesystem)

    @classmethod
    def load(cls: type[Loaded], path: str) -> Loaded:
        """As `loadFromLocal`, also from an object store.

        Args:
            path: The folder, or its URL.

        Returns:
            The object.

        Raises:
            FileNotFoundError: There is no such folder, or it has no `metadata.json`.
            MlError: The folder holds an object of another class, one that is unknown here, or a damaged one.
        """
        from pyarrow import fs

        from wingbeat.ml._parquet import filesystem_of

        filesystem, inner = filesystem_of(path)
        with own_folder("wingbeat-model-") as folder:
            fs.copy_files(inner, folder, source_filesystem=filesystem)
            return _loaded(cls, folder, path)

    def _save(self, root: str, node: list[str]) -> dict[str, Any]:
        """Writes this object's files, and returns its metadata.

        Args:
            root: The folder.
            node: Where in the tree of objects this one is: the beginning of its files' names.
        """
        skipped = self._skipped()
        given = {param.name: value for param, value in self._paramMap.items() if param.name not in skipped}
        default = {param.name: value for param, value in self._defaultParamMap.items() if param.name not in skipped}
        metadata: dict[str, Any] = {
            "class": f"{type(self).__module__}.{type(self).__name__}".replace(_OURS, _THEIRS),
            "timestamp": round(time.time() * 1000),
            "sparkVersion": _SPARK,
            "uid": self.uid,
            "paramMap": {name: value for name, value in given.items() if name not in _OWN},
            "defaultParamMap": {name: value for name, value in default.items() if name not in _OWN},
            "type": "spark_connect",
            "wingbeatVersion": wingbeat.__version__,
            "wingbeatParamMap": {name: value for name, value in given.items() if name in _OWN},
        }
        extra = self._extra()
        if extra is not None:
            metadata["extra"] = extra
        return metadata

    def _skipped(self) -> list[str]:
        """Parameters whose values are objects with metadata of their own."""
        return []

    def _extra(self) -> dict[str, Any] | None:
        return None

    def _load(self, root: str, metadata: dict[str, Any]) -> None:
        """Reads what `_save` has written besides the parameters."""


class Composite(Savable):
    """What consists of other objects."""

    def _children(self) -> list[Savable]:
        raise NotImplementedError


def by_uid(root: Savable) -> dict[str, Savable]:
    """An object and all that it consists of.

    Args:
        root: The object.

    Returns:
        The objects by their `uid`.

    Raises:
        MlError: Two have the same.
    """
    found: dict[str, Savable] = {}
    waiting = [root]
    while waiting:
        one = waiting.pop()
        if one.uid in found:
            raise MlError(f"{root.uid} has two parts with the uid {one.uid}: make each of its stages anew")
        found[one.uid] = one
        waiting += one._children() if isinstance(one, Composite) else []
    return found


class CoreModel(Savable):
    """A model with weights."""

    # What follows the class's name in the name of the file that Spark writes.
    _suffix: str

    def _save(self, root: str, node: list[str]) -> dict[str, Any]:
        from safetensors.numpy import save_file

        metadata = super()._save(root, node)
        name = ".".join([*node, type(self).__name__ + self._suffix])
        self._write_spark(os.path.join(root, name))
        save_file(self._weights(), os.path.join(root, _beside(name)))
        metadata["core_model_path"] = name
        return metadata

    def _load(self, root: str, metadata: dict[str, Any]) -> None:
        from safetensors.numpy import load_file

        path = os.path.join(root, os.path.basename(metadata["core_model_path"]))
        if os.path.exists(_beside(path)):
            path = _beside(path)
        try:
            weights = load_file(path) if path.endswith(_SAFE) else self._read_spark(path)
            self._take(weights, metadata.get("extra") or {})
        except (ImportError, MemoryError, OSError):
            raise
        except Exception as error:
            raise MlError(f"{os.path.basename(path)} is damaged, or another's: {_said(error)}") from error

    def _weights(self) -> dict[str, numpy.ndarray[Any, Any]]:
        raise NotImplementedError

    def _take(self, weights: dict[str, numpy.ndarray[Any, Any]], extra: dict[str, Any]) -> None:
        raise NotImplementedError

    def _write_spark(self, path: str) -> None:
        raise NotImplementedError

    def _read_spark(self, path: str) -> dict[str, numpy.ndarray[Any, Any]]:
        raise NotImplementedError


def of_width(weights: dict[str, numpy.ndarray[Any, Any]], *names: str) -> list[numpy.ndarray[Any, Any]]:
    """Weights that have a number for each feature.

    Args:
        weights: The weights.
        *names: Their names.

    Returns:
        The weights of these names.

    Raises:
        MlError: They differ in length, or are no numbers in a row.
    """
    found = [weights[name] for name in names]
    if any(one.ndim != 1 or one.dtype.kind != "f" or len(one) != len(found[0]) for one in found):
        shapes = ", ".join(f"{name} {one.dtype} {one.shape}" for name, one in zip(names, found))
        raise MlError(f"each has to have a number for each feature, and they are {shapes}")
    return found


def _loaded(kind: type[Loaded], folder: str, shown: str) -> Loaded:
    """Loads an object of a folder, which errors call `shown`."""
    path = os.path.join(folder, METADATA)
    if not os.path.exists(path):
        raise FileNotFoundError(errno.ENOENT, f"there is no saved object in {shown}: it has no {METADATA}", shown)
    try:
        with open(path, encoding="utf-8") as file:
            metadata = json.load(file)
        if not isinstance(metadata, dict):
            raise MlError(f"its {METADATA} is no object of JSON")
        loaded = load(metadata, folder)
    except (ImportError, MemoryError, OSError):
        raise
    except Exception as error:
        raise MlError(f"{shown} cannot be loaded: {_said(error)}") from error
    if not isinstance(loaded, kind):
        raise MlError(f"{shown} holds a {type(loaded).__name__}, and no {kind.__name__}")
    return loaded


def _said(error: Exception) -> str:
    if isinstance(error, MlError):
        return str(error)
    if isinstance(error, KeyError):
        return f"it has no {error}"
    return f"{type(error).__name__}: {error}"


def load(metadata: dict[str, Any], root: str) -> Savable:
    """Makes an object of its metadata.

    Args:
        metadata: The metadata.
        root: The folder that its files are in.

    Returns:
        The object.

    Raises:
        MlError: The class is unknown here.
    """
    if metadata.get("type") != "spark_connect":
        raise MlError(
            f"it was not saved by pyspark.ml.connect or wingbeat.ml: its metadata has the type {metadata.get('type')!r}. "
            "Models of pyspark.ml (without connect) have another format"
        )
    made = _class(metadata["class"])()
    made._resetUid(metadata["uid"])
    made._setDefault(**metadata["defaultParamMap"])
    made._set(**metadata["paramMap"], **metadata.get("wingbeatParamMap", {}))
    made._load(root, metadata)
    return made


def _class(name: str) -> type[Savable]:
    """The class of a name in a file: one of Wingbeat's, or one of a module that the program has imported."""
    module, _, kind = name.replace(_THEIRS, _OURS).rpartition(".")
    if kind in _CLASSES.get(module[len(_OURS) :], ()) and module.startswith(_OURS):
        importlib.import_module(module)
    # Not `getattr`: a module's `__getattr__` may import others.
    found = vars(sys.modules[module]).get(kind) if module in sys.modules else None
    if not (isinstance(found, type) and issubclass(found, Savable)):
        hint = "if it is a class of yours, import its module before you load"
        raise MlError(f"the saved object is a {name}, which wingbeat.ml does not have: {hint}")
    return found


def _local_folder(path: str) -> str:
    """The absolute path of a folder that may be replaced."""
    given = os.fspath(path)
    if not given:
        raise ValueError("cannot save in an empty path: name a folder, as in 'model'")
    absolute, here = os.path.abspath(given), os.path.realpath(os.getcwd())
    if os.path.commonpath([os.path.realpath(absolute), here]) == os.path.realpath(absolute):
        raise ValueError(f"cannot save in {given!r}, which is or contains the current folder: name a new folder, as in 'model'")
    return absolute


def _check_replaceable(path: str, overwrite: bool) -> None:
    from pyarrow import fs

    if not os.path.lexists(path):
        return
    if not os.path.isdir(path):
        raise FileExistsError(f"{path} already exists and is no folder: remove it, or choose another path")
    _check_content(path, fs.LocalFileSystem(), path, overwrite)


def _check_content(path: str, filesystem: Any, inner: str, overwrite: bool) -> None:
    """Checks that a folder may be replaced: that it is empty, or holds what was saved."""
    from pyarrow import fs

    if not overwrite:
        raise FileExistsError(f"{path} already exists; pass overwrite=True to replace it")
    if not filesystem.get_file_info(fs.FileSelector(inner)):
        return
    try:
        with filesystem.open_input_stream(f"{inner.rstrip('/')}/{METADATA}") as file:
            metadata = json.loads(file.read())
    except (OSError, ValueError):
        metadata = None
    if not isinstance(metadata, dict) or metadata.get("type") != "spark_connect":
        raise FileExistsError(f"{path} holds no saved object, and is not replaced: remove it, or choose another path")


def _put(made: str, path: str, replaced: str, overwrite: bool) -> None:
    """Renames a folder. What was there is at `replaced` then, or where it was if that fails."""
    try:
        if overwrite and os.path.lexists(path):
            _check_replaceable(path, overwrite)
            os.rename(path, replaced)
        os.rename(made, path)
    except BaseException as error:
        if os.path.lexists(replaced) and not os.path.lexists(path):
            os.rename(replaced, path)
        elif isinstance(error, OSError) and os.path.lexists(path):
            raise FileExistsError(f"{path} was made by another while this was saved; it is left as it is") from error
        raise


def _beside(path: str) -> str:
    for suffix in (".torch", ".sklearn.pkl"):
        path = path[: -len(suffix)] if path.endswith(suffix) else path
    return path + _SAFE
