"""Parameters of estimators, transformers and evaluators: pyspark's `pyspark.ml.param`."""

from __future__ import annotations

import copy
import functools
import inspect
import uuid
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from wingbeat.ml._errors import InvalidParameter, UnknownParameter, nearest

__all__ = ["Param", "ParamMap", "Params", "TypeConverters", "keyword_only"]

T = TypeVar("T")
Owner = TypeVar("Owner", bound="Params")
Function = TypeVar("Function", bound=Callable[..., Any])


class Param(Generic[T]):
    """A parameter of one object.

    Two are equal if they have the same owner and name, so a `Param` is a key of a param map.

    Args:
        parent: The `uid` of the object that has it; "undefined" for that of a class.
        name: Its name.
        doc: What it is.
        typeConverter: Makes a valid value of what a user gives, or raises a TypeError or ValueError.
    """

    def __init__(self, parent: str, name: str, doc: str, typeConverter: Callable[[Any], T] | None = None) -> None:
        self.parent = parent
        self.name = name
        self.doc = doc
        self.typeConverter: Callable[[Any], T] = TypeConverters.identity if typeConverter is None else typeConverter

    def of(self, parent: str) -> Param[T]:
        """The same parameter of another object.

        Args:
            parent: That object's `uid`.

        Returns:
            The parameter.
        """
        other = copy.copy(self)
        other.parent = parent
        return other

    def __str__(self) -> str:
        return f"{self.parent}__{self.name}"

    def __repr__(self) -> str:
        return f"Param(parent={self.parent!r}, name={self.name!r}, doc={self.doc!r})"

    def __hash__(self) -> int:
        return hash((self.parent, self.name))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Param) and (self.parent, self.name) == (other.parent, other.name)


ParamMap = dict[Param[Any], Any]


class TypeConverters:
    """Makes a parameter's value of what a user gives. Each raises a TypeError where it cannot."""

    @staticmethod
    def identity(value: T) -> T:
        """Any value, as it is.

        Args:
            value: What the user gives.

        Returns:
            The value.
        """
        return value

    @staticmethod
    def toInt(value: Any) -> int:
        """An int, of any number without a fraction.

        Args:
            value: What the user gives.

        Returns:
            The int.

        Raises:
            TypeError: It is no number, or has a fraction.
        """
        if _is_number(value) and float(value).is_integer():
            return int(value)
        raise TypeError(f"{value!r} is not an integer")

    @staticmethod
    def toFloat(value: Any) -> float:
        """A float, of any number.

        Args:
            value: What the user gives.

        Returns:
            The float.

        Raises:
            TypeError: It is no number.
        """
        if _is_number(value):
            return float(value)
        raise TypeError(f"{value!r} is not a number")

    @staticmethod
    def toString(value: Any) -> str:
        """A string.

        Args:
            value: What the user gives.

        Returns:
            The string.

        Raises:
            TypeError: It is none.
        """
        if isinstance(value, str):
            return str(value)
        raise TypeError(f"{value!r} is not a string")

    @staticmethod
    def toBoolean(value: Any) -> bool:
        """A bool.

        Args:
            value: What the user gives.

        Returns:
            The bool.

        Raises:
            TypeError: It is none.
        """
        if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
            return bool(value)
        raise TypeError(f"{value!r} is not a bool")

    @staticmethod
    def toList(value: Any) -> list[Any]:
        """A list, of a list, tuple, range or array.

        Args:
            value: What the user gives.

        Returns:
            The list.

        Raises:
            TypeError: It is none of these.
        """
        if isinstance(value, (list, tuple, range)) or hasattr(value, "tolist"):
            made = value.tolist() if hasattr(value, "tolist") else list(value)
            if isinstance(made, list):
                return made
        raise TypeError(f"{value!r} is not a list")

    @staticmethod
    def toListString(value: Any) -> list[str]:
        """A list of strings.

        Args:
            value: What the user gives.

        Returns:
            The list.

        Raises:
            TypeError: It is none, or holds something else.
        """
        return [TypeConverters.toString(one) for one in TypeConverters.toList(value)]

    @staticmethod
    def toListInt(value: Any) -> list[int]:
        """A list of ints.

        Args:
            value: What the user gives.

        Returns:
            The list.

        Raises:
            TypeError: It is none, or holds something else.
        """
        return [TypeConverters.toInt(one) for one in TypeConverters.toList(value)]

    @staticmethod
    def toListFloat(value: Any) -> list[float]:
        """A list of floats.

        Args:
            value: What the user gives.

        Returns:
            The list.

        Raises:
            TypeError: It is none, or holds something else.
        """
        return [TypeConverters.toFloat(one) for one in TypeConverters.toList(value)]


def at_least(
    least: float, convert: Callable[[Any], T], *, below: float | None = None, is_open: bool = False
) -> Callable[[Any], T]:
    """Restricts a type converter to a range.

    Args:
        least: The smallest value.
        convert: The type converter of a number.
        below: Values are smaller than this.
        is_open: Whether `least` itself is excluded.

    Returns:
        A type converter.
    """

    return functools.partial(_in_range, least, convert, below, is_open)


def _in_range(least: float, convert: Callable[[Any], T], below: float | None, is_open: bool, value: Any) -> T:
    number = convert(value)
    # A NaN is in no range.
    if not (cast(float, number) > least if is_open else cast(float, number) >= least):
        raise ValueError(f"{number!r} is not {'more than' if is_open else 'at least'} {least}")
    if below is not None and not cast(float, number) < below:
        raise ValueError(f"{number!r} is not less than {below}")
    return number


def one_of(*names: str) -> Callable[[Any], str]:
    """A type converter that takes one of several names.

    Args:
        *names: The names.

    Returns:
        The type converter.
    """

    return functools.partial(_one_of, names)


def _one_of(names: tuple[str, ...], value: Any) -> str:
    if TypeConverters.toString(value) not in names:
        near = nearest(value, names)
        hint = f"; did you mean {near!r}?" if near else ""
        raise ValueError(f"{value!r} is not one of {', '.join(map(repr, names))}{hint}")
    return str(value)


def of_parts(extra: ParamMap | None) -> ParamMap | None:
    """What a param map says of the parts of an object: a name as a key means the object itself.

    Args:
        extra: The param map.

    Returns:
        The entries whose keys are parameters.
    """
    return None if extra is None else {key: value for key, value in extra.items() if isinstance(key, Param)}


def keyword_only(function: Function) -> Function:
    """Makes a method take keyword arguments alone, and keeps those that were given in `self._input_kwargs`.

    Args:
        function: The method, whose parameters name all that may be given.

    Returns:
        The method. It raises `UnknownParameter` for any other name.
    """
    names = [name for name in inspect.signature(function).parameters if name != "self"]

    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        what = type(self).__name__ if function.__name__ == "__init__" else f"{type(self).__name__}.{function.__name__}"
        if args:
            raise TypeError(f"{what} takes keyword arguments only, as in {what}({names[0]}={args[0]!r})")
        for name in kwargs:
            if name not in names:
                raise _unknown(what, name, names)
        self._input_kwargs = kwargs
        return function(self, **kwargs)

    return cast(Function, wrapper)


class Params:
    """An object with parameters.

    A subclass has an attribute of type `Param` for each. An object has its own of the same names, which are keys of
    param maps: `estimator.fit(data, {estimator.maxIter: 5})`.

    Attributes:
        uid: Names this object among all others.
    """

    _input_kwargs: dict[str, Any]

    def __init__(self) -> None:
        self.uid = f"{type(self).__name__}_{uuid.uuid4().hex[-12:]}"
        self._paramMap: ParamMap = {}
        self._defaultParamMap: ParamMap = {}
        for name in _names(type(self)):
            setattr(self, name, getattr(type(self), name).of(self.uid))

    def __repr__(self) -> str:
        return self.uid

    @property
    def params(self) -> list[Param[Any]]:
        """All parameters, by name."""
        return [getattr(self, name) for name in _names(type(self))]

    def explainParam(self, param: str | Param[Any]) -> str:
        """Describes a parameter: its name, what it is, its default and its value.

        Args:
            param: The parameter, or its name.

        Returns:
            The description.
        """
        param = self._resolve(param)
        values = [f"default: {self._defaultParamMap[param]}"] if param in self._defaultParamMap else []
        values += [f"current: {self._paramMap[param]}"] if param in self._paramMap else []
        return f"{param.name}: {param.doc} ({', '.join(values) or 'undefined'})"

    def explainParams(self) -> str:
        """Describes all parameters.

        Returns:
            A line for each.
        """
        return "\n".join(map(self.explainParam, self.params))

    def getParam(self, paramName: str) -> Param[Any]:
        """The parameter of a name.

        Args:
            paramName: The name.

        Returns:
            The parameter.

        Raises:
            UnknownParameter: There is none.
        """
        if not self.hasParam(paramName):
            raise _unknown(type(self).__name__, paramName, _names(type(self)))
        found: Param[Any] = getattr(self, paramName)
        return found

    def hasParam(self, paramName: str) -> bool:
        """Whether there is a parameter of this name.

        Args:
            paramName: The name.

        Returns:
            Whether there is one.
        """
        return isinstance(paramName, str) and paramName in _names(type(self))

    def isSet(self, param: str | Param[Any]) -> bool:
        """Whether a parameter was given a value.

        Args:
            param: The parameter, or its name.

        Returns:
            Whether it was.

        Raises:
            UnknownParameter: There is no such parameter.
        """
        return self._resolve(param) in self._paramMap

    def hasDefault(self, param: str | Param[Any]) -> bool:
        """Whether a parameter has a default value.

        Args:
            param: The parameter, or its name.

        Returns:
            Whether it has.

        Raises:
            UnknownParameter: There is no such parameter.
        """
        return self._resolve(param) in self._defaultParamMap

    def isDefined(self, param: str | Param[Any]) -> bool:
        """Whether a parameter has a value, given or by default.

        Args:
            param: The parameter, or its name.

        Returns:
            Whether it has.

        Raises:
            UnknownParameter: There is no such parameter.
        """
        return self.isSet(param) or self.hasDefault(param)

    def getOrDefault(self, param: str | Param[T]) -> Any:
        """The value of a parameter.

        Args:
            param: The parameter, or its name.

        Returns:
            What it was set to, or else its default value.

        Raises:
            InvalidParameter: It was not set, and has no default value.
            UnknownParameter: There is no such parameter.
        """
        param = self._resolve(param)
        if param in self._paramMap:
            return self._paramMap[param]
        if param not in self._defaultParamMap:
            name = type(self).__name__
            raise InvalidParameter(f"{name} needs {param.name} ({param.doc}): pass {name}({param.name}=…)")
        return self._defaultParamMap[param]

    def extractParamMap(self, extra: ParamMap | None = None) -> ParamMap:
        """All values.

        Args:
            extra: Values that replace those of this object.

        Returns:
            The values by parameter.
        """
        return {**self._defaultParamMap, **self._paramMap, **(extra or {})}

    def copy(self: Owner, extra: ParamMap | None = None) -> Owner:
        """A copy with the same `uid`.

        Args:
            extra: Values of parameters that replace those of this object. Those of other objects are left out.

        Returns:
            The copy.
        """
        other = copy.copy(self)
        other._paramMap = {}
        other._defaultParamMap = {}
        return self._copyValues(other, extra)

    def set(self, param: Param[T], value: Any) -> None:
        """Gives a parameter a value.

        Args:
            param: The parameter.
            value: Its value; None takes its value away, as `clear` does.

        Raises:
            UnknownParameter: It is not one of this object.
            TypeError: The value is of another type.
            InvalidParameter: The value is not allowed.
        """
        self._set(**{self._resolve(param).name: value})

    def clear(self, param: Param[Any]) -> None:
        """Takes a parameter's value away, so that it has its default value again.

        Args:
            param: The parameter.
        """
        self._paramMap.pop(self._resolve(param), None)

    def _resolve(self, param: str | Param[Any]) -> Param[Any]:
        if isinstance(param, str):
            return self.getParam(param)
        if not isinstance(param, Param):
            raise TypeError(f"{param!r} is not a parameter of {self.uid}: pass a Param, as in estimator.maxIter, or its name")
        if param.parent != self.uid or not self.hasParam(param.name):
            raise UnknownParameter(f"the parameter {param} is not one of {self.uid}", nearest=None)
        return param

    def _set(self: Owner, **values: Any) -> Owner:
        for name, value in values.items():
            param = self.getParam(name)
            if value is None:
                self._paramMap.pop(param, None)
            else:
                self._paramMap[param] = self._converted(param, value)
        return self

    def _setDefault(self: Owner, **values: Any) -> Owner:
        for name, value in values.items():
            param = self.getParam(name)
            self._defaultParamMap[param] = self._converted(param, value)
        return self

    def _converted(self, param: Param[Any], value: Any) -> Any:
        if value is None:
            return None
        try:
            return param.typeConverter(value)
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}: invalid {param.name}: {error}") from None
        except ValueError as error:
            raise InvalidParameter(f"{type(self).__name__}: invalid {param.name}: {error}") from None

    def _copyValues(self, to: Owner, extra: ParamMap | None = None) -> Owner:
        values = dict(self._paramMap)
        for param, value in (extra or {}).items():
            values[param if isinstance(param, Param) else self._resolve(param)] = value
        for param in self.params:
            if not to.hasParam(param.name):
                continue
            if param in self._defaultParamMap:
                to._defaultParamMap[to.getParam(param.name)] = self._defaultParamMap[param]
            if param in values:
                to._set(**{param.name: values[param]})
        return to

    def _resetUid(self: Owner, uid: str) -> Owner:
        """Gives this object another `uid`, and its parameters the same values under it."""
        self.uid = uid
        for name in _names(type(self)):
            setattr(self, name, getattr(type(self), name).of(uid))
        self._paramMap = {param.of(uid): value for param, value in self._paramMap.items()}
        self._defaultParamMap = {param.of(uid): value for param, value in self._defaultParamMap.items()}
        return self


_known: dict[type, list[str]] = {}


def _names(kind: type) -> list[str]:
    """The names of a class's parameters. They are looked for once."""
    if kind not in _known:
        _known[kind] = _find_names(kind)
    return _known[kind]


def _find_names(kind: type) -> list[str]:
    return [name for name in dir(kind) if isinstance(inspect.getattr_static(kind, name), Param)]


def _is_number(value: Any) -> bool:
    import numbers

    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _unknown(what: str, name: str, names: list[str]) -> UnknownParameter:
    near = nearest(name, names)
    hint = f"did you mean {near!r}?" if near else f"its parameters are {', '.join(names)}"
    return UnknownParameter(f"{what} has no parameter {name!r}; {hint}", nearest=near)
