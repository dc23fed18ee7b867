"""Columns of record batches as numpy arrays, checked: every value that an algorithm cannot use is an error that names it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wingbeat.ml._errors import InvalidFeatures, InvalidLabels, InvalidWeights
from wingbeat.ml._source import Batch

if TYPE_CHECKING:
    import numpy
    import pyarrow


def features(batch: Batch, column: str, size: int | None = None) -> numpy.ndarray[Any, Any]:
    """A column of arrays as a matrix.

    Args:
        batch: The rows.
        column: The column.
        size: How many elements each array has; None for as many as the first.

    Returns:
        A matrix of float64, a row for each array.

    Raises:
        InvalidFeatures: The column holds no arrays of numbers, the arrays differ in length, or an element is null, NaN
            or infinite.
    """
    import numpy

    matrix = arrays(batch, column, size)
    good = numpy.isfinite(matrix)
    if not good.all():
        row, element = map(int, numpy.argwhere(~good)[0])
        value = "null or NaN" if numpy.isnan(matrix[row, element]) else "infinite"
        raise _invalid(InvalidFeatures, batch, column, row, f"element {element} is {value}")
    return matrix


def arrays(
    batch: Batch, column: str, size: int | None = None, *, null_rows: bool = False, nan: bool = True
) -> numpy.ndarray[Any, Any]:
    """As `features`, but elements that are null are NaN, and any number is allowed.

    Args:
        batch: The rows.
        column: The column.
        size: How many elements each array has; None for as many as the first.
        null_rows: Whether an array may be null, which is `size` times NaN then.
        nan: Whether an element may be null or NaN.

    Returns:
        A matrix of float64, a row for each array.

    Raises:
        InvalidFeatures: The column holds no arrays of numbers, they differ in length, or a value is not allowed.
    """
    import numpy
    from pyarrow import compute

    values = _plain(batch.data.column(column))
    order = getattr(batch.data.column(column).type, "permutation", None)
    if order is not None and list(order) != sorted(order):
        message = f"the column {column!r} holds tensors whose axes are stored in the order {list(order)}: store them in their own"
        raise InvalidFeatures(message, column=column, row=None)
    kind = values.type
    if not _is_array(kind):
        assembled = f"assemble it with ArrayAssembler(inputCols=[{column!r}], …)"
        hint = assembled if _is_numeric(kind) else "features are arrays of numbers"
        raise InvalidFeatures(f"the column {column!r} holds {kind}, and no arrays: {hint}", column=column, row=None)
    if not _is_numeric(kind.value_type):
        message = f"the column {column!r} holds arrays of {kind.value_type}; features are arrays of numbers"
        raise InvalidFeatures(message, column=column, row=None)
    is_null = numpy.asarray(values.is_null())
    if is_null.any():
        if not null_rows:
            raise _invalid(InvalidFeatures, batch, column, int(is_null.argmax()), "the array is null")
        matrix = numpy.full((len(values), size or 0), numpy.nan)
        there = Batch(batch.rows[~is_null], batch.data.filter(compute.is_valid(batch.data.column(column))), batch.file)
        matrix[~is_null] = arrays(there, column, size, nan=nan)
        return matrix
    if not len(values):
        return numpy.empty((0, size or 0))
    lengths = numpy.asarray(compute.list_value_length(values))
    expected = int(lengths[0]) if size is None else size
    other = lengths != expected
    if other.any():
        row = int(other.argmax())
        raise _invalid(InvalidFeatures, batch, column, row, f"the array has {lengths[row]} elements, and needs {expected}")
    matrix = _float64(values.flatten()).reshape(len(values), expected)
    if not nan:
        bad = numpy.isnan(matrix)
        if bad.any():
            row, element = map(int, numpy.argwhere(bad)[0])
            raise _invalid(InvalidFeatures, batch, column, row, f"element {element} is null or NaN")
    return matrix


def is_array(batch: Batch, column: str) -> bool:
    """Whether a column holds arrays."""
    return _is_array(_plain(batch.data.column(column)).type)


def scalars(batch: Batch, column: str, *, nan: bool = True) -> numpy.ndarray[Any, Any]:
    """A column of numbers. Those that are null are NaN.

    Args:
        batch: The rows.
        column: The column.
        nan: Whether a number may be null or NaN.

    Returns:
        A vector of float64.

    Raises:
        InvalidFeatures: The column holds no numbers, or one is not allowed.
    """
    import numpy

    values = _plain(batch.data.column(column))
    if not _is_numeric(values.type):
        raise InvalidFeatures(f"the column {column!r} holds {values.type}, and no numbers", column=column, row=None)
    numbers = _float64(values)
    if not nan and numpy.isnan(numbers).any():
        raise _invalid(InvalidFeatures, batch, column, int(numpy.isnan(numbers).argmax()), "the value is null or NaN")
    return numbers


def labels(batch: Batch, column: str) -> numpy.ndarray[Any, Any]:
    """A column of labels.

    Args:
        batch: The rows.
        column: The column.

    Returns:
        A vector of float64.

    Raises:
        InvalidLabels: The column holds no numbers, or one is null, NaN or infinite.
    """
    import numpy

    values = _plain(batch.data.column(column))
    if not _is_numeric(values.type):
        hint = "map them to 0, 1, 2 and so on" if "string" in str(values.type) else "labels are numbers"
        message = f"the label column {column!r} holds {values.type}: {hint}"
        raise InvalidLabels(message, column=column, row=None, labels=None)
    numbers = _float64(values)
    bad = ~numpy.isfinite(numbers)
    if bad.any():
        row = int(bad.argmax())
        what = "infinite" if numpy.isinf(numbers[row]) else "null or NaN"
        raise _invalid(InvalidLabels, batch, column, row, f"the label is {what}", labels=None)
    return numbers


def weights(batch: Batch, column: str) -> numpy.ndarray[Any, Any]:
    """A column of row weights.

    Args:
        batch: The rows.
        column: The column.

    Returns:
        A vector of float64.

    Raises:
        InvalidWeights: The column holds no numbers, or one is null, NaN, negative, or too large for float32.
    """
    import numpy

    values = _plain(batch.data.column(column))
    if not _is_numeric(values.type):
        raise InvalidWeights(f"the weight column {column!r} holds {values.type}, and no numbers", column=column, row=None)
    numbers = _float64(values)
    bad = ~((numbers >= 0) & (numbers <= numpy.finfo(numpy.float32).max))
    if bad.any():
        row = int(bad.argmax())
        what = "null or NaN" if numpy.isnan(numbers[row]) else f"{numbers[row]:g}; weights are at least 0, and fit float32"
        raise _invalid(InvalidWeights, batch, column, row, f"the weight is {what}")
    return numbers


def array_column(matrix: numpy.ndarray[Any, Any]) -> pyarrow.Array:
    """A column of arrays of doubles.

    Args:
        matrix: A row for each array.

    Returns:
        The column.
    """
    import numpy
    import pyarrow

    rows, size = matrix.shape
    flat = pyarrow.array(numpy.ascontiguousarray(matrix, dtype=numpy.float64).ravel())
    if rows * size > numpy.iinfo(numpy.int32).max:
        raise MemoryError(f"a batch of {rows} arrays of {size} elements is too large for one column of arrays")
    return pyarrow.ListArray.from_arrays(pyarrow.array(numpy.arange(rows + 1, dtype=numpy.int32) * numpy.int32(size)), flat)


def _plain(values: Any) -> Any:
    import pyarrow

    if isinstance(values.type, pyarrow.BaseExtensionType):
        values = values.storage
    return values.dictionary_decode() if pyarrow.types.is_dictionary(values.type) else values


def _is_array(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_numeric(kind: Any) -> bool:
    from pyarrow import types

    is_kind = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal, types.is_null)
    return any(one(kind) for one in is_kind)


def _float64(values: Any) -> numpy.ndarray[Any, Any]:
    import numpy
    import pyarrow

    if values.type != pyarrow.float64():
        # Not safely: an integer beyond 2^53 is rounded, as it is in every library.
        via = pyarrow.uint8() if pyarrow.types.is_boolean(values.type) else pyarrow.float64()
        values = values.cast(via, safe=False).cast(pyarrow.float64())
    return numpy.asarray(values.to_numpy(zero_copy_only=False), dtype=numpy.float64)


def _invalid(kind: type[Any], batch: Batch, column: str, row: int, what: str, **more: Any) -> Any:
    where = int(batch.rows[row])
    file = "" if batch.file is None else f" (row {where - batch.file[1]} of {batch.file[0]})"
    return kind(f"column {column!r}, row {where}{file}: {what}", column=column, row=where, **more)
