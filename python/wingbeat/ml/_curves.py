"""Areas under the curves of a binary classifier, exact also where rows have the same score."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy

    Array = numpy.ndarray[Any, Any]


# Scores that are put in order together at least: sorting a few at a time would sort the others again and again.
_LEAST = 1 << 18


class Scores:
    """Distinct scores in ascending order, with the number of negative and positive rows of each.

    It takes 24 bytes for each distinct score, and at most as much again while rows are taken in.
    """

    def __init__(self) -> None:
        import numpy

        self._scores: Array = numpy.empty(0)
        self._counts: Array = numpy.empty((0, 2), dtype=numpy.int64)
        self._waiting: list[tuple[Array, Array]] = []

    def add(self, scores: Array, positive: Array) -> None:
        """Takes more rows in.

        Args:
            scores: Their scores.
            positive: Whether each is positive.
        """
        import numpy

        self._add(scores, numpy.stack([~positive, positive], axis=1).astype(numpy.int64))

    def merge(self, other: Scores) -> None:
        """Takes in the rows of others.

        Args:
            other: The others.
        """
        self._add(*other.distinct())

    def distinct(self) -> tuple[Array, Array]:
        """The distinct scores, ascending, and the number of negative and positive rows of each."""
        import numpy

        if self._waiting:
            scores = numpy.concatenate([self._scores, *(scores for scores, _ in self._waiting)])
            counts = numpy.concatenate([self._counts, *(counts for _, counts in self._waiting)])
            self._waiting = []
            order = numpy.argsort(scores, kind="stable")
            scores, counts = scores[order], counts[order]
            firsts = numpy.flatnonzero(numpy.r_[True, scores[1:] != scores[:-1]])
            self._scores, self._counts = scores[firsts], numpy.add.reduceat(counts, firsts, axis=0)
        return self._scores, self._counts

    def _add(self, scores: Array, counts: Array) -> None:
        if len(scores):
            self._waiting.append((scores, counts))
        if sum(len(scores) for scores, _ in self._waiting) > max(_LEAST, len(self._scores)):
            self.distinct()

    def area_under_roc(self) -> float:
        """The probability that a positive row has a larger score than a negative one, where a tie counts one half:
        Hanley and McNeil, "The Meaning and Use of the Area under a ROC Curve" (1982). It is the trapezoids' area."""
        negative, positive = self.distinct()[1].astype(float).T
        below = negative.cumsum() - negative
        return float((positive * (below + negative / 2)).sum() / positive.sum() / negative.sum())

    def area_under_pr(self) -> float:
        """The average precision, the sum over thresholds of the precision times what the recall grows by: scikit-learn's
        `average_precision_score`, and what pyspark.ml.connect computes. Precision is not interpolated."""
        counts = self.distinct()[1][::-1]
        positive = counts[:, 1].astype(float)
        precision = positive.cumsum() / counts.sum(axis=1).cumsum()
        return float((precision * positive).sum() / positive.sum())
