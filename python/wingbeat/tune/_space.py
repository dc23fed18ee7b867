"""Spaces of parameters, with Ray Tune's names and meanings."""

from __future__ import annotations

import inspect
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GRID = "grid_search"


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
class Float(Domain):
    """A float from `low` to `high`.

    Attributes:
        low: The least.
        high: The most, which is not drawn itself.
        is_log: Whether its logarithm is uniform.
        step: What it is a multiple of, if it is. `high` may be drawn then.
    """

    low: float
    high: float
    is_log: bool = False
    step: float | None = None

    def sample(self, chosen: random.Random) -> float:
        """Draws a value."""
        if self.is_log:
            value = math.exp(chosen.uniform(math.log(self.low), math.log(self.high)))
        else:
            value = chosen.uniform(self.low, self.high)
        return self.rounded(value)

    def rounded(self, value: float) -> float:
        """The nearest value that may be drawn.

        Args:
            value: A value from `low` to `high`.
        """
        value = value if self.step is None else round(value / self.step) * self.step
        return min(max(value, self.low), self.high)


@dataclass(frozen=True)
class Integer(Domain):
    """An integer from `low` to `high - 1`, or to `high` if it has a step.

    Attributes:
        low: The least.
        high: What is above the most.
        is_log: Whether its logarithm is uniform.
        step: What it is a multiple of, if it is.
    """

    low: int
    high: int
    is_log: bool = False
    step: int | None = None

    @property
    def most(self) -> int:
        """The largest value."""
        return self.high - 1 if self.step is None else self.high

    def sample(self, chosen: random.Random) -> int:
        """Draws a value."""
        if self.is_log:
            value = int(math.exp(chosen.uniform(math.log(self.low), math.log(self.most + 1))))
        else:
            value = chosen.randint(self.low, self.most)
        return self.rounded(value)

    def rounded(self, value: int) -> int:
        """The nearest value that may be drawn.

        Args:
            value: A value from `low` to `most`.
        """
        value = value if self.step is None else round(value / self.step) * self.step
        return min(max(value, self.low), self.most)


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
        return self.function(config) if inspect.signature(self.function).parameters else self.function()


def grid_search(values: Sequence[Any]) -> dict[str, list[Any]]:
    """Each of these values, in as many trials.

    Args:
        values: The values.

    Returns:
        What stands for them in `param_space`.

    Raises:
        ValueError: There are none.
    """
    if not list(values):
        raise ValueError("grid_search needs values, and has none")
    return {GRID: list(values)}


def choice(categories: Sequence[Any]) -> Categorical:
    """One of these values, each equally often.

    Args:
        categories: The values.

    Raises:
        ValueError: There are none.
    """
    if not list(categories):
        raise ValueError("choice needs values, and has none")
    return Categorical(tuple(categories))


def uniform(lower: float, upper: float) -> Float:
    """A float from `lower` to `upper`."""
    return Float(*_range("uniform", lower, upper))


def quniform(lower: float, upper: float, q: float) -> Float:
    """A multiple of `q` from `lower` to `upper`."""
    return Float(*_range("quniform", lower, upper), step=q)


def loguniform(lower: float, upper: float, base: float = 10) -> Float:
    """A float from `lower` to `upper` whose logarithm is uniform. The base makes no difference."""
    return Float(*_range("loguniform", lower, upper, is_log=True), is_log=True)


def qloguniform(lower: float, upper: float, q: float, base: float = 10) -> Float:
    """A multiple of `q` from `lower` to `upper` whose logarithm is about uniform. The base makes no difference."""
    return Float(*_range("qloguniform", lower, upper, is_log=True), is_log=True, step=q)


def randn(mean: float = 0.0, sd: float = 1.0) -> Normal:
    """A float with a normal distribution."""
    return Normal(mean, sd)


def randint(lower: int, upper: int) -> Integer:
    """An integer from `lower` to `upper - 1`."""
    return Integer(*_range("randint", lower, upper))


def qrandint(lower: int, upper: int, q: int = 1) -> Integer:
    """A multiple of `q` from `lower` to `upper`."""
    return Integer(*_range("qrandint", lower, upper), step=q)


def lograndint(lower: int, upper: int, base: float = 10) -> Integer:
    """An integer from `lower` to `upper - 1` whose logarithm is about uniform. The base makes no difference."""
    return Integer(*_range("lograndint", lower, upper, is_log=True), is_log=True)


def sample_from(func: Callable[..., Any]) -> Function:
    """What a function returns for each trial. It may take the other parameters as a dict."""
    return Function(func)


def _range(name: str, lower: Any, upper: Any, is_log: bool = False) -> tuple[Any, Any]:
    if not lower < upper:
        raise ValueError(f"{name}({lower!r}, {upper!r}): the lower bound must be less than the upper one")
    if is_log and lower <= 0:
        raise ValueError(f"{name}({lower!r}, {upper!r}): the lower bound must be positive, as it has a logarithm")
    return lower, upper


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


def configurations(space: Mapping[str, Any], samples: int, chosen: random.Random) -> Iterator[dict[str, Any]]:
    """The parameters of each trial: for each sample, all combinations of the grid.

    Args:
        space: The space.
        samples: How many samples; -1 for one after the other without end.
        chosen: What draws.

    Yields:
        The parameters.
    """
    values = list(leaves(space))
    grids = [(path, value[GRID]) for path, value in values if is_grid(value)]
    for _ in itertools.count() if samples == -1 else range(samples):
        for combination in itertools.product(*(of for _, of in grids)):
            fixed = dict(zip((path for path, _ in grids), combination))
            config: dict[str, Any] = {}
            for path, value in values:
                value = fixed.get(path, value)
                is_drawn = isinstance(value, Domain) and not isinstance(value, Function)
                put(config, path, value.sample(chosen) if is_drawn else value)
            for path, value in values:
                if isinstance(value, Function):
                    put(config, path, value.of(shaped(space, config)))
            yield shaped(space, config)
