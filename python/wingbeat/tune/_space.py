"""Spaces of parameters, with Ray Tune's names and meanings."""

from __future__ import annotations

import contextlib
import inspect
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

GRID = "grid_search"
# How far from a multiple of a step a bound may be by rounding.
_ROUNDING = 1e-9

N = TypeVar("N", int, float)


class Domain:
    """A parameter of which each trial has a value of its own."""

    def sample(self, chosen: random.Random) -> Any:
        """Draws a value.

        Args:
            chosen: What draws.

        Returns:
            The value.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class _Number(Domain, Generic[N]):
    low: N
    high: N
    is_log: bool = False
    step: N | None = None

    def rounded(self, value: N) -> N:
        """The nearest value that may be drawn.

        Args:
            value: A value that is not below `low`, nor above the most.
        """
        if self.step is not None:
            value = _multiple(value, self.low, self.high, self.step) * self.step
        return min(max(value, self.low), self.high)  # a product may be a rounding error beyond them

    def _by_logarithm(self, chosen: random.Random, high: float) -> float:
        return math.exp(chosen.uniform(math.log(self.low), math.log(high)))


@dataclass(frozen=True)
class Float(_Number[float]):
    """A float from `low` to `high`.

    Attributes:
        low: The least.
        high: The most, which is not drawn itself.
        is_log: Whether its logarithm is uniform.
        step: What it is a multiple of, if it is. `high` may be drawn then, if it is one.
    """

    def sample(self, chosen: random.Random) -> float:
        """Draws a value."""
        drawn = self._by_logarithm(chosen, self.high) if self.is_log else chosen.uniform(self.low, self.high)
        return self.rounded(drawn)


@dataclass(frozen=True)
class Integer(_Number[int]):
    """An integer from `low` to `high - 1`, or to `high` if it has a step.

    Attributes:
        low: The least.
        high: What is above the most.
        is_log: Whether its logarithm is uniform.
        step: What it is a multiple of, if it is.
    """

    @property
    def most(self) -> int:
        """The largest value."""
        return self.high - 1 if self.step is None else self.high

    def sample(self, chosen: random.Random) -> int:
        """Draws a value."""
        drawn = int(self._by_logarithm(chosen, self.most + 1)) if self.is_log else chosen.randint(self.low, self.most)
        return self.rounded(drawn)


@dataclass(frozen=True)
class Categorical(Domain):
    """One of some values.

    Attributes:
        categories: The values.
    """

    categories: tuple[Any, ...]

    def sample(self, chosen: random.Random) -> Any:
        """Draws a value."""
        return chosen.choice(self.categories)


@dataclass(frozen=True)
class Normal(Domain):
    """A float with a normal distribution.

    Attributes:
        mean: Its mean.
        sd: Its standard deviation.
    """

    mean: float = 0.0
    sd: float = 1.0

    def sample(self, chosen: random.Random) -> float:
        """Draws a value."""
        return chosen.gauss(self.mean, self.sd)


@dataclass(frozen=True)
class Function(Domain):
    """What a function makes of the trial's other parameters.

    Attributes:
        function: The function. It takes no argument, or the parameters that are known.
    """

    function: Callable[..., Any]

    def of(self, config: dict[str, Any]) -> Any:
        """The value.

        Args:
            config: The parameters that are known.
        """
        return self.function(config) if _takes_config(self.function) else self.function()


def _takes_config(function: Callable[..., Any]) -> bool:
    """Whether a function takes the parameters. `*args` alone, as of `numpy.random.rand`, is for other things."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some that are built in have none
        return False
    return any(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters)


def grid_search(values: Sequence[Any]) -> dict[str, list[Any]]:
    """Each of these values, in as many trials.

    Args:
        values: The values.

    Returns:
        What stands for them in `param_space`.

    Raises:
        ValueError: There are none.
    """
    return {GRID: _values("grid_search", values)}


def choice(categories: Sequence[Any]) -> Categorical:
    """One of these values, each equally often.

    Args:
        categories: The values.

    Returns:
        What `param_space` takes.

    Raises:
        ValueError: There are none.
    """
    return Categorical(tuple(_values("choice", categories)))


def uniform(lower: float, upper: float) -> Float:
    """A float from `lower` to `upper`.

    Args:
        lower: The least value.
        upper: The bound, below which all values are.

    Returns:
        What `param_space` takes.

    Raises:
        ValueError: The lower bound is not less than the upper one.
    """
    return Float(*_range("uniform", lower, upper))


def quniform(lower: float, upper: float, q: float) -> Float:
    """A multiple of `q` from `lower` to `upper`.

    Args:
        lower: The least value.
        upper: The largest value.
        q: Of what the values are multiples.

    Returns:
        What `param_space` takes.

    Raises:
        ValueError: The lower bound is not less than the upper one, or no multiple is between them.
    """
    return Float(*_range("quniform", lower, upper, step=q), step=q)


def loguniform(lower: float, upper: float, base: float = 10) -> Float:
    """A float from `lower` to `upper` whose logarithm is uniform.

    Args:
        lower: The least value.
        upper: The bound, below which all values are.
        base: Ray's; it makes no difference.

    Returns:
        What `param_space` takes.

    Raises:
        ValueError: The lower bound is not positive, or not less than the upper one.
    """
    return Float(*_range("loguniform", lower, upper, is_log=True), is_log=True)


def qloguniform(lower: float, upper: float, q: float, base: float = 10) -> Float:
    """A multiple of `q` from `lower` to `upper` whose logarithm is about uniform.

    Args:
        lower: The least value.
        upper: The largest value.
        q: Of what the values are multiples.
        base: Ray's; it makes no difference.

    Returns:
        What `param_space` takes.

    Raises:
        ValueError: The lower bound is not positive or not less than the upper one, or no multiple is between them.
    """
    return Float(*_range("qloguniform", lower, upper, is_log=True, step=q), is_log=True, step=q)


def randn(mean: float = 0.0, sd: float = 1.0) -> Normal:
    """A float with a normal distribution.

    Args:
        mean: The mean.
        sd: The standard deviation.

    Returns:
        What `param_space` takes.
    """
    return Normal(mean, sd)


def randint(lower: int, upper: int) -> Integer:
    """An integer from `lower` to `upper - 1`.

    Args:
        lower: The least value.
        upper: The bound, below which all values are.

    Returns:
        What `param_space` takes.

    Raises:
        ValueError: The lower bound is not less than the upper one.
    """
    return Integer(*_range("randint", lower, upper))


def qrandint(lower: int, upper: int, q: int = 1) -> Integer:
    """A multiple of `q` from `lower` to `upper`.

    Args:
        lower: The least value.
        upper: The largest value.
        q: Of what the values are multiples.

    Returns:
        What `param_space` takes.

    Raises:
        ValueError: The lower bound is not less than the upper one, or no multiple is between them.
    """
    return Integer(*_range("qrandint", lower, upper, step=q), step=q)


def lograndint(lower: int, upper: int, base: float = 10) -> Integer:
    """An integer from `lower` to `upper - 1` whose logarithm is about uniform.

    Args:
        lower: The least value.
        upper: The bound, below which all values are.
        base: Ray's; it makes no difference.

    Returns:
        What `param_space` takes.

    Raises:
        ValueError: The lower bound is not positive, or not less than the upper one.
    """
    return Integer(*_range("lograndint", lower, upper, is_log=True), is_log=True)


def sample_from(func: Callable[..., Any]) -> Function:
    """What a function returns for each trial.

    Args:
        func: The function. It may take the other parameters as a dict, also those of other functions: `config["x"]`, or as Ray
            had it, `spec.config.x`.

    Returns:
        What `param_space` takes.

    Raises:
        TypeError: It is none, or takes more than one argument.
    """
    if not callable(func):
        raise TypeError(f"sample_from takes a function, not {func!r:.100}")
    with contextlib.suppress(ValueError):  # of one that is built in
        signature = inspect.signature(func)
        try:
            signature.bind(*([{}] if _takes_config(func) else []))
        except TypeError as error:
            raise TypeError(f"sample_from({func!r:.100}): the function takes the parameters, or nothing: {error}") from None
    return Function(func)


def _values(name: str, given: Iterable[Any]) -> list[Any]:
    values = list(given)
    if not values:
        raise ValueError(f"{name} needs values, and has none")
    return values


def _range(name: str, lower: Any, upper: Any, is_log: bool = False, step: Any = None) -> tuple[Any, Any]:
    if not lower < upper:
        raise ValueError(f"{name}({lower!r}, {upper!r}): the lower bound must be less than the upper one")
    if is_log and lower <= 0:
        raise ValueError(f"{name}({lower!r}, {upper!r}): the lower bound must be positive, as it has a logarithm")
    if step is not None:
        if not step > 0:
            raise ValueError(f"{name}({lower!r}, {upper!r}, {step!r}): q must be positive")
        least, most = _multiples(lower, upper, step)
        if least > most:
            raise ValueError(f"{name}({lower!r}, {upper!r}, {step!r}): no multiple of q is between the bounds")
    return lower, upper


def _multiples(low: float, high: float, step: float) -> tuple[int, int]:
    """The least and the largest number of steps from `low` to `high`."""
    # 0.3 / 0.1 is a little less than 3.
    return math.ceil(low / step - _ROUNDING), math.floor(high / step + _ROUNDING)


def _multiple(value: float, low: float, high: float, step: Any) -> int:
    """The number of steps nearest to a value, of those from `low` to `high`."""
    least, most = _multiples(low, high, step)
    return min(max(int(round(value / step)), least), most)


def is_grid(value: Any) -> bool:
    """Whether this is a `grid_search`.

    Args:
        value: A value of a space.
    """
    return isinstance(value, Mapping) and set(value) == {GRID}


def _is_searched(value: Any) -> bool:
    """Whether something in this differs between trials."""
    if isinstance(value, Domain) or is_grid(value):
        return True
    if isinstance(value, Mapping):
        return any(map(_is_searched, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_is_searched, value))


def _parts(value: Any) -> list[tuple[Any, Any]] | None:
    """The keys and values of a dict, or of a list in which something is searched; None of what is one value."""
    if isinstance(value, Mapping) and not is_grid(value) and value:
        return list(value.items())
    if isinstance(value, (list, tuple)) and _is_searched(value):
        return list(enumerate(value))
    return None


def leaves(space: Mapping[str, Any], path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The values of a space, with where they are.

    Args:
        space: The space; dicts in it are parts of it, and so are lists and tuples in which something is searched.
        path: Where it is itself.

    Yields:
        The keys that lead to a value, and the value.
    """
    for name, value in _parts(space) or ():
        if _parts(value) is None:
            yield (*path, name), value
        else:
            yield from leaves(value, (*path, name))


def check_grids(space: Mapping[str, Any]) -> None:
    """Checks that each grid of a space has values: it may have been written as a dict.

    Args:
        space: The space.

    Raises:
        ValueError: A grid has none.
        TypeError: Its values are no list.
    """
    for path, value in leaves(space):
        if is_grid(value):
            values, name = value[GRID], f"param_space[{name_of(path)!r}]"
            if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__getitem__") or not hasattr(values, "__len__"):
                raise TypeError(f"{name}: grid_search needs a list of values, not {values!r:.100}")
            _values(f"{name}: grid_search", values)


def name_of(path: tuple[Any, ...]) -> str:
    """The keys that lead to a value, as a name.

    Args:
        path: The keys.
    """
    return "/".join(map(str, path))


def shaped(space: Any, config: Any) -> Any:
    """Makes lists of what `put` has put for the lists of a space.

    Args:
        space: The space, or a part of it.
        config: What `put` has made of it.

    Returns:
        The parameters.
    """
    parts = _parts(space)
    if parts is None:
        return config
    made = {name: shaped(value, config[name]) for name, value in parts}
    if isinstance(space, Mapping):
        return made
    if hasattr(space, "_fields"):  # a named tuple
        return type(space)(*made.values())
    return tuple(made.values()) if isinstance(space, tuple) else list(made.values())


def put(config: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    """Puts a value into a nested dict, which has the parts of lists by their numbers.

    Args:
        config: The dict.
        path: The keys that lead to it.
        value: The value.
    """
    for name in path[:-1]:
        config = config.setdefault(name, {})
    config[path[-1]] = value


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """A nested dict as one whose keys are like `a/b`.

    Args:
        config: The dict.
    """
    return {name_of(path): value for path, value in leaves(config)}


class Configurations:
    """The parameters of each trial: for each sample, all combinations of the grid. One that is pickled goes on where it was.

    Args:
        space: The space.
        samples: How many samples; -1 for one after the other without end.
        chosen: What draws.
    """

    def __init__(self, space: Mapping[str, Any], samples: int, chosen: random.Random) -> None:
        self._space, self._samples, self._chosen = space, samples, chosen
        self._done = 0

    def __iter__(self) -> Configurations:
        return self

    def __next__(self) -> dict[str, Any]:
        values = list(leaves(self._space))
        grids = [(path, value[GRID]) for path, value in values if is_grid(value)]
        sample, number = divmod(self._done, math.prod(len(of) for _, of in grids))
        if sample == self._samples:
            raise StopIteration
        self._done += 1
        fixed = {}
        for path, of in reversed(grids):  # the last one changes first
            number, place = divmod(number, len(of))
            fixed[path] = of[place]
        config: dict[str, Any] = {}
        for path, value in values:
            value = fixed.get(path, value)
            is_drawn = isinstance(value, Domain) and not isinstance(value, Function)
            put(config, path, value.sample(self._chosen) if is_drawn else value)
        _call(self._space, config, {path: value for path, value in values if isinstance(value, Function)})
        made: dict[str, Any] = shaped(self._space, config)
        return made


def _call(space: Mapping[str, Any], config: dict[Any, Any], functions: dict[tuple[Any, ...], Function]) -> None:
    """Puts what functions return in their place. One that asks for what another returns is called after that."""
    while functions:
        waiting = {}
        for path, function in functions.items():
            try:
                value = _plain(function.of(_Known(shaped(space, config))))
            except _Unknown as unknown:
                waiting[path] = function
                last = f"param_space[{name_of(path)!r}] asks for {unknown.args[0]!r}"
            except Exception as error:
                what = f"param_space[{name_of(path)!r}]: the function of sample_from has failed"
                raise ValueError(f"{what}: {type(error).__name__}: {error}") from error
            else:
                put(config, path, value)
        if len(waiting) == len(functions):
            raise ValueError(f"{last}, and functions of sample_from that ask for each other have no values")
        functions = waiting


class _Unknown(Exception):
    """A parameter was asked for that a function has still to make."""


class _Known(dict[str, Any]):
    """The parameters that are known, for functions of `sample_from`: a dict whose keys are attributes, too.

    `config` is all of them, where no parameter is called so: Ray gave functions a `spec` with that.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__({name: _Known(value) if type(value) is dict else value for name, value in config.items()})
        self._unknown = {name for name, value in config.items() if isinstance(value, Function)}
        for name in self._unknown:
            del self[name]

    def __missing__(self, name: str) -> Any:
        if name in self._unknown:
            raise _Unknown(name)
        if name == "config":
            return self
        raise KeyError(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self or name in self._unknown else default

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what Python looks for, or not made yet
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"there is no parameter {name!r}") from None


def _plain(value: Any) -> Any:
    """What a function has returned, without a `_Known`."""
    if not isinstance(value, _Known):
        return value
    for name in value._unknown:
        raise _Unknown(name)
    return {name: _plain(inner) for name, inner in value.items()}
