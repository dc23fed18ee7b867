"""Why a run failed, as the program sees it that has started the run."""

from __future__ import annotations


class TrainingError(RuntimeError):
    """A run failed.

    Attributes:
        rank: The rank that failed first, if one did.
    """

    __module__ = "wingbeat.torch"

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class RemoteTraceback(Exception):
    """The cause of an exception that was raised in a rank: where it was raised there."""

    __module__ = "wingbeat.torch"

    def __init__(self, rank: int | None, text: str) -> None:
        super().__init__(rank, text)
        self.rank, self.text = rank, text

    def __str__(self) -> str:
        return f"in rank {self.rank}:\n\n{self.text}"


class LaunchFailed(Exception):
    """A run failed: what the launcher tells the trainers.

    Attributes:
        error: The exception that the rank raised, with its remote traceback as the cause, or a `TrainingError`.
        rank: The rank that failed first, if one did.
    """

    def __init__(self, error: BaseException, rank: int | None) -> None:
        super().__init__(error, rank)
        self.error, self.rank = error, rank
