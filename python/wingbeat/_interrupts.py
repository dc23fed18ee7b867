"""Ctrl-C for threads, where Python raises no `KeyboardInterrupt`: that is for the main thread alone. The same goes for what
handlers of other signals raise there.

The main thread sets an `Interrupt`. Threads that run under it raise `Interrupted` where they next look, and the commands
that they have started receive SIGINT.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence


class Interrupted(BaseException):
    """A thread ends because of a signal. As `KeyboardInterrupt`, it is no `Exception`: nothing goes on after it."""


class Interrupt:
    """Interrupts threads, once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_set = False
        # Commands that run: of each thread one at most.
        self._commands: set[subprocess.Popen[bytes]] = set()

    def is_set(self) -> bool:
        """Whether the threads are to end."""
        return self._is_set

    def set(self) -> None:
        """Interrupts the threads, and the commands that they have started."""
        with self._lock:
            self._is_set = True
            commands = list(self._commands)
        for command in commands:
            command.send_signal(signal.SIGINT)

    def add(self, command: subprocess.Popen[bytes]) -> None:
        """Has a command interrupted, also if that happened just before it was started."""
        with self._lock:
            self._commands.add(command)
            is_late = self._is_set
        if is_late:
            command.send_signal(signal.SIGINT)

    def discard(self, command: subprocess.Popen[bytes]) -> None:
        """Leaves out a command that has ended."""
        with self._lock:
            self._commands.discard(command)


class _Own(threading.local):
    interrupts: tuple[Interrupt, ...] = ()


_own = _Own()


def current() -> tuple[Interrupt, ...]:
    """The interrupts that this thread runs under, to be handed to threads that it starts.

    Returns:
        The interrupts.
    """
    return _own.interrupts


@contextlib.contextmanager
def under(interrupts: Sequence[Interrupt]) -> Iterator[None]:
    """Has this thread run under interrupts.

    Args:
        interrupts: The interrupts. Any of them interrupts it.
    """
    before, _own.interrupts = _own.interrupts, tuple(interrupts)
    try:
        yield
    finally:
        _own.interrupts = before


def check() -> None:
    """Ends this thread's work if it was interrupted.

    Raises:
        Interrupted: It was.
    """
    if any(interrupt.is_set() for interrupt in _own.interrupts):
        raise Interrupted
