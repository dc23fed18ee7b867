"""What a run's job is called, whose quota it counts against, and whose work is placed first."""

from __future__ import annotations

from typing import Any

# The command takes 32 bits.
_PRIORITIES = range(-(2**31), 2**31)
# The most bytes of a name, which a cluster refuses to be longer.
_LONGEST_NAME = 256


def check(namespace: Any, priority: Any) -> None:
    """Checks what a program says of a run's job.

    Args:
        namespace: The namespace, or None.
        priority: The priority.

    Raises:
        TypeError: A namespace is no text.
        ValueError: The namespace is empty, or cannot be on a command line, or the priority is no integer of 32 bits.
    """
    if namespace is not None and not isinstance(namespace, str):
        raise TypeError(f"a namespace is a str; {namespace!r} is a {type(namespace).__qualname__}")
    if namespace is not None and (not namespace or "\0" in namespace):
        raise ValueError(f"a namespace is a name, or None for a new one, not {namespace!r}")
    if isinstance(priority, bool) or not isinstance(priority, int) or priority not in _PRIORITIES:
        raise ValueError(f"priority must be an integer of 32 bits, not {priority!r}")


def options(namespace: str | None, priority: int) -> list[str]:
    """The options of `wingbeat train` that say this.

    Args:
        namespace: The namespace; None for `$WINGBEAT_NAMESPACE`, and without that a new one.
        priority: The priority.
    """
    # With "=": a value may begin with a dash.
    said = [] if namespace is None else [f"--namespace={namespace}"]
    return [*said, *([f"--priority={priority}"] if priority else [])]


def named(name: Any) -> str:
    """The option of `wingbeat train` that says what the job is called. That is shown and means nothing else: of a name that
    cannot be one, it has what can.

    Args:
        name: The name of what is run.
    """
    shown = "".join(letter if letter.isprintable() else "�" for letter in str(name))
    # The end tells trials of one search apart.
    return "--job-name=" + shown.encode()[-_LONGEST_NAME:].decode(errors="ignore")
