"""What a rank runs that was given a Python function: calls it, and tells what it returned or raised.

    python .../wingbeat/_rank_main.py .../wingbeat/_function.py FILE

FILE holds two pickles: a dict with `sys_path` (where the driver finds its modules), `first` (how many of these come before
the standard library) and `returns` ("first" or "all", the ranks whose value is wanted), and the function with its arguments.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from typing import Any


def main() -> None:
    with open(sys.argv[1], "rb") as file:
        about = pickle.load(file)
        find_modules(about["sys_path"], about["first"])
        try:
            function, args, kwargs = pickle.load(file)
        except ModuleNotFoundError as error:
            if error.name == "cloudpickle":
                raise RuntimeError(
                    f"{sys.executable} has no cloudpickle, and functions travel with it; "
                    f"install it there: {sys.executable} -m pip install cloudpickle"
                ) from None
            raise
    del sys.argv[1]
    is_wanted = about["returns"] == "all" or os.environ["RANK"] == "0"
    try:
        value = function(*args, **kwargs)
        if is_wanted:
            tell("returned", pickle_value(value))
    except SystemExit as error:
        if is_wanted and not error.code:
            tell("returned", pickle_value(None))  # as a function that ends well without a value
        raise
    except Exception as error:
        try:
            pickled = pickle_error(error)
        except Exception:
            raise error from None  # its traceback tells
        tell("raised", pickled)
        raise


def find_modules(paths: list[str], first: int) -> None:
    """Finds modules where the driver does: beside its script first, whatever they are called, and not beside this file."""
    own = [os.path.abspath(path) for path in paths[:first]]  # '' is the working directory, here as there
    own = [path for path in own if os.path.exists(path)]
    usual = sys.path if sys.flags.isolated or getattr(sys.flags, "safe_path", False) else sys.path[1:]
    sys.path[:] = own + [path for path in usual if path not in own]
    sys.path += [path for path in paths[first:] if path not in sys.path and os.path.exists(path)]


def tell(kind: str, pickled: memoryview) -> None:
    from wingbeat.train._connection import connection

    connection().ask({"kind": kind}, pickled)


def pickle_value(value: Any) -> memoryview:
    try:
        return pickle_portably(value)
    except Exception as error:
        what = f"what the function returned, a {type(value).__qualname__}"
        raise TypeError(f"{what}, cannot be pickled: {error}") from error


def pickle_error(error: BaseException) -> memoryview:
    """Pickles an exception so that it can be made again there. Python calls its class with its `args`, which fails for
    one whose `__init__` takes other arguments."""
    from wingbeat._exceptions import remake

    pickled = pickle_portably(error)
    try:
        pickle.loads(pickled)
        return pickled
    except Exception:
        return pickle_portably(Remade(remake, (type(error), error.args, error.__dict__)))


class Remade:
    """Is something else when it is unpickled."""

    def __init__(self, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.make, self.arguments = make, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.make, self.arguments


def pickle_portably(value: Any) -> memoryview:
    """Pickles a value so that a process without a GPU can read it: tensors come from the CPU."""
    import io

    import cloudpickle

    torch = sys.modules.get("torch")

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, item: Any) -> Any:
            if torch is not None and isinstance(item, torch.Tensor) and item.device.type != "cpu":
                return item.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return super().reducer_override(item)

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getbuffer()


if __name__ == "__main__":
    main()
