"""Batches as loops want them: arrays, tensors, pandas or Arrow."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas
    import pyarrow
    import torch


def maker(
    batch_format: str, with_nulls: Collection[str] = (), is_own: bool = False, is_copied: bool = False
) -> Callable[[pyarrow.Table], Any]:
    """What makes a batch of a table.

    Args:
        batch_format: "numpy" or "default" (a dict of arrays), "pandas" or "pyarrow".
        with_nulls: The columns of integers and booleans that have nulls, in these rows or in others. They have the type that
            nulls need in all batches.
        is_own: As for `arrays`.
        is_copied: As for `arrays`.

    Returns:
        The function.

    Raises:
        ValueError: It is none of these.
    """
    made: Mapping[str, Callable[[pyarrow.Table], Any]] = {
        "default": lambda batch: arrays(batch, with_nulls, is_own, is_copied),
        "numpy": lambda batch: arrays(batch, with_nulls, is_own, is_copied),
        "pandas": lambda batch: _frame(batch, with_nulls),
        "pyarrow": lambda batch: batch,
    }
    if batch_format not in made:
        raise ValueError(f'batch_format must be "numpy", "pandas" or "pyarrow", not {batch_format!r}')
    return made[batch_format]


def is_arrays(batch_format: str) -> bool:
    """Whether batches of this format are dicts of arrays.

    Args:
        batch_format: As for `maker`.
    """
    return batch_format in ("default", "numpy")


def arrays(
    batch: pyarrow.Table, with_nulls: Collection[str] = (), is_own: bool = False, is_copied: bool = False
) -> dict[str, Any]:
    """The columns as arrays. Lists of the same length in each row are arrays of two dimensions.

    Args:
        batch: The rows.
        with_nulls: As for `maker`.
        is_own: Whether nobody else reads these rows: arrays of numbers may be written then, unless they lie in a file.
        is_copied: Whether arrays that may not be written are copied.

    Returns:
        An array for each column.
    """
    made = {name: _array(batch.column(name)) for name in batch.column_names}
    for name, array in made.items():
        if name in with_nulls:
            made[name] = array.astype(_with_nulls(batch.schema.field(name).type), copy=False)
        elif not array.flags.writeable:
            array = _writable(batch.column(name), array) if is_own else array
            made[name] = array if array.flags.writeable or not is_copied else array.copy()
    return made


def _frame(batch: pyarrow.Table, with_nulls: Collection[str]) -> pandas.DataFrame:
    import numpy

    frame = batch.to_pandas()
    kinds = {name: batch.schema.field(name).type for name in batch.column_names if name in with_nulls}
    # Categories stay categories, and pandas' own types, which a table's metadata may name, have a value for nulls.
    types = frame.dtypes  # without columns that are the index
    return frame.astype({name: _with_nulls(kind) for name, kind in kinds.items() if isinstance(types.get(name), numpy.dtype)})


def _with_nulls(kind: pyarrow.DataType) -> str:
    """The type of an array of integers or booleans with nulls."""
    import pyarrow

    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    return "object" if pyarrow.types.is_boolean(kind) else "float64"


def _writable(column: pyarrow.ChunkedArray, array: Any) -> Any:
    """An array over the memory of a column, which may be written if that may; otherwise the one that is given."""
    import numpy
    import pyarrow

    kind = column.type.value_type if is_nested(column.type) else column.type
    is_number = pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind)
    if not is_number or array.dtype.hasobject or column.num_chunks != 1 or column.null_count:
        return array
    values = column.chunk(0).flatten() if is_nested(column.type) else column.chunk(0)
    data, begin = values.buffers()[1], values.offset * array.itemsize
    return numpy.frombuffer(data, array.dtype, count=len(values), offset=begin).reshape(array.shape) if data.is_mutable else array


def tensors(
    dtypes: torch.dtype | dict[str, torch.dtype] | None,
    device: str | torch.device,
    collate_fn: Callable[[dict[str, Any]], Any] | None,
) -> Callable[[dict[str, Any]], Any]:
    """What makes tensors of arrays.

    Args:
        dtypes: The tensors' type, for all columns or by column.
        device: Where the tensors are; "auto" is this rank's device.
        collate_fn: Makes something else of a batch, which it gets as a dict of arrays.

    Returns:
        The function. It raises a TypeError for a column that holds what tensors cannot hold, and a KeyError for the type of a
        column that is not there.

    Raises:
        ValueError: There are both a `collate_fn`, and a type or device.
    """
    import torch

    from wingbeat.train._device import get_device

    if collate_fn is not None:
        if dtypes is not None or device != "auto":
            raise ValueError("a collate_fn makes tensors itself: give no dtypes and no device with it")
        return collate_fn
    target = get_device() if device == "auto" else torch.device(device)

    def made(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        for name in dtypes if isinstance(dtypes, dict) else ():
            if name not in batch:
                raise KeyError(f"dtypes has {name!r}, and the columns are {', '.join(map(repr, batch))}")
        made = {}
        for name, array in batch.items():
            dtype = dtypes.get(name) if isinstance(dtypes, dict) else dtypes
            try:
                # A copy: what lies in shared memory, or in a file, cannot be written.
                made[name] = torch.tensor(array, dtype=dtype, device=target)
            except TypeError as error:
                raise TypeError(f"the column {name!r} cannot be a tensor: {error}; give a collate_fn") from error
        return made

    return made


def is_nested(kind: pyarrow.DataType) -> bool:
    """Whether a column holds lists: its arrays depend on how long they are.

    Args:
        kind: The type of the column.

    Returns:
        Whether it does.
    """
    import pyarrow

    is_list = pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)
    return bool(is_list or pyarrow.types.is_fixed_size_list(kind))


def _array(column: pyarrow.ChunkedArray) -> Any:
    import numpy
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        # `ChunkedArray.to_numpy` forgets which of its values are null.
        chunks = [chunk.dictionary_decode() for chunk in column.chunks]
        column = pyarrow.chunked_array(chunks, column.type.value_type)
    if not is_nested(column.type):
        return column.to_numpy()
    flat = _matrix(column)
    if flat is not None:
        return flat
    array = column.to_numpy()
    rows = [numpy.asarray(row) for row in array]
    return numpy.stack(rows) if len({row.shape for row in rows}) == 1 else array


def _matrix(column: pyarrow.ChunkedArray) -> Any:
    """Lists of numbers without nulls, all of one length, in one piece; None if they are not."""
    import numpy
    import pyarrow

    if column.null_count or len(column) == 0 or not pyarrow.types.is_primitive(column.type.value_type):
        return None
    values = []
    width = None
    for chunk in column.chunks:
        if len(chunk) == 0:
            continue
        flat = chunk.flatten()
        if pyarrow.types.is_fixed_size_list(chunk.type):
            own = chunk.type.list_size
        else:
            lengths = numpy.unique(numpy.diff(chunk.offsets.to_numpy()))
            own = int(lengths[0]) if len(lengths) == 1 else None
        if not own or own != (width or own) or flat.null_count:
            return None
        width = own
        values.append(flat.to_numpy(zero_copy_only=False).reshape(len(chunk), own))
    return values[0] if len(values) == 1 else numpy.concatenate(values)
