"""Multinomial logistic regression by stochastic gradient descent, in one process or on the ranks of a group.

A batch is the same rows whatever the number of ranks. Each rank computes the gradient of those that it holds, and the
sum over ranks is the gradient of the batch: the arithmetic of `DistributedDataParallel`, where ranks may hold different
numbers of a batch's rows. Features are float32, as Spark's are; sums and parameters are float64.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wingbeat import _interrupts
from wingbeat.ml import _sums, _threads
from wingbeat.ml._errors import MlError, TrainingDiverged
from wingbeat.ml._examples import NOTHING, Columns, Examples, Facts
from wingbeat.ml._order import Order
from wingbeat.ml._progress import Progress
from wingbeat.ml._source import Source, TableSource

if TYPE_CHECKING:
    import numpy
    import torch

# What the rows of several batches take that are read at once: so much that reading is seldom, so little that it stays
# in a processor's cache.
_CHUNK_BYTES = 2 << 20


@dataclass(frozen=True)
class Settings:
    """How to train. The names are those of the parameters of `LogisticRegression`."""

    columns: Columns
    max_iter: int
    tol: float
    batch_size: int
    learning_rate: float
    momentum: float
    fit_intercept: bool
    seed: int
    ranks: int
    # What progress calls this training.
    name: str = "LogisticRegression"


@dataclass(frozen=True)
class Fitted:
    """A trained model.

    Attributes:
        weight: A row of coefficients for each class, float32.
        bias: The intercept of each class, float32; None without intercepts.
        losses: The mean loss of each epoch.
    """

    weight: numpy.ndarray[Any, Any]
    bias: numpy.ndarray[Any, Any] | None
    losses: list[float]


def fit_here(source: Source, settings: Settings, device: str = "cpu") -> Fitted:
    """Trains in this process.

    Args:
        source: The data set.
        settings: How.
        device: On what.

    Returns:
        The model.

    Raises:
        MlError: The data set cannot be used.
    """
    examples = Examples(source, settings.columns, 0, None, settings.fit_intercept)
    # One rank, whatever the settings: there may be fewer rows than ranks.
    return _train(examples, examples.facts, 0, dataclasses.replace(settings, ranks=1), _Group(0, device, None))


def fit_rank(source: Source | None, ranges: Sequence[tuple[int, int]], settings: Settings) -> Fitted | MlError | None:
    """Trains as one rank of a group, on rows that it reads itself.

    Args:
        source: The data set; None for this rank's rows of the table that was given to the run.
        ranges: The rows of each rank.
        settings: How.

    Returns:
        The model on rank 0, and None on the others; on each rank the same error if the data set cannot be used, or the training
        diverges.

    Raises:
        MlError: This rank's files cannot be read any more.
    """
    import torch.distributed as dist

    from wingbeat.train import get_dataset_shard

    with _joined() as group:
        start, stop = ranges[group.rank]
        if source is None:
            source = TableSource(get_dataset_shard().table)
            start, stop = 0, source.num_rows
        examples, found = _read(source, start, stop, settings)
        everyone: list[Facts | MlError] = [NOTHING] * dist.get_world_size()
        dist.all_gather_object(everyone, found)
        facts, first = NOTHING, 0
        try:
            for rank, one in enumerate(everyone):
                if isinstance(one, MlError):  # the same on all ranks: that of the first
                    return one
                first = facts.rows if rank == group.rank else first
                facts = facts.and_then(one, settings.columns)
            facts.classes(settings.columns, settings.ranks)
        except MlError as error:  # of the rows of all
            return error
        assert examples is not None
        return _trained(examples, facts, first, settings, group)


def fit_rows(examples: Examples, settings: Settings) -> Fitted | MlError | None:
    """Trains as one rank of a group, on its part of rows that were checked. It imports no pyarrow, which takes time.

    Args:
        examples: The rows of all ranks.
        settings: How.

    Returns:
        As `fit_rank`.
    """
    with _joined() as group:
        ends = [examples.facts.rows * rank // settings.ranks for rank in range(settings.ranks + 1)]
        first, last = ends[group.rank : group.rank + 2]
        return _trained(examples.part(first, last), examples.facts, first, settings, group)


@dataclass(frozen=True)
class _Group:
    """The ranks that train together.

    Attributes:
        rank: This rank.
        device: What it computes on.
        summing: Makes what sums tensors of a size over all ranks, in place; None if there is one rank.
    """

    rank: int
    device: str
    summing: Callable[[int], Callable[[torch.Tensor], Any]] | None


@contextlib.contextmanager
def _joined() -> Iterator[_Group]:
    """Joins the process group, and leaves it unless there was an error: that ends all ranks."""
    import torch

    from wingbeat.train import _process_group, get_context
    from wingbeat.train._device import get_device

    context, device = get_context(), get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = _process_group.join("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    is_one_machine = context.get_local_world_size() == context.get_world_size()

    def summing(nbytes: int) -> Callable[[torch.Tensor], Any]:
        return _sums.all_reduce(is_one_machine, nbytes, device)

    yield _Group(context.get_world_rank(), str(device), summing)
    if store is not None:
        _process_group.leave(store)


def _read(source: Source, start: int, stop: int, settings: Settings) -> tuple[Examples | None, Facts | MlError]:
    try:
        examples = Examples(source, settings.columns, start, stop, settings.fit_intercept)
        return examples, examples.facts
    except MlError as error:
        return None, error


def _trained(examples: Examples, facts: Facts, first: int, settings: Settings, group: _Group) -> Fitted | MlError | None:
    """What a rank returns of `_train`."""
    try:
        fitted = _train(examples, facts, first, settings, group)
    except TrainingDiverged as error:  # on all ranks, which have the same loss and the same coefficients
        return error
    return fitted if group.rank == 0 else None


def _train(examples: Examples, facts: Facts, first: int, settings: Settings, group: _Group) -> Fitted:
    """Trains on the rows of all ranks, of which this one holds some.

    Args:
        examples: The rows that this rank holds.
        facts: What is known of the rows of all.
        first: The number of the first of its rows.
        settings: How.
        group: The ranks.
    """
    import torch

    classes = facts.classes(settings.columns, settings.ranks)
    assert facts.features is not None
    width = facts.features + settings.fit_intercept
    order = Order(facts.rows, 4 * (width + 2), settings.seed)
    all_reduce = None if group.summing is None else group.summing(8 * width * classes)
    with torch.inference_mode(), _threads.few(settings.batch_size * width * classes):
        run = _Run(examples, first, classes, width, facts.rows / facts.weight, settings, group.device, all_reduce)
        run.start(facts.features)
        progress = Progress(settings.name, settings.max_iter, facts.rows, group.rank == 0)
        losses: list[float] = []
        small = 0
        for epoch in range(settings.max_iter):
            progress.loss = loss = run.epoch(order, epoch, progress) / facts.rows
            if not math.isfinite(loss):
                raise _diverged(f"the loss is {loss}", epoch, settings)
            # Once could be chance.
            small = small + 1 if losses and abs(losses[-1] - loss) < settings.tol else 0
            losses.append(loss)
            if small == 2:
                break
        return run.fitted(losses)


def _diverged(what: str, epoch: int, settings: Settings) -> TrainingDiverged:
    hint = f"use a learningRate below {settings.learning_rate:g}, or scale the features with StandardScaler"
    return TrainingDiverged(f"{what} in epoch {epoch + 1}: {hint}", epoch=epoch)


class _Run:
    """The state of a training.

    Args:
        examples: The rows that this rank holds.
        first: The number of the first of them.
        classes: How many classes.
        width: How many coefficients a class has.
        scale: What weights are multiplied by, so that their mean is 1.
        settings: How to train.
        device: On what.
        all_reduce: Sums a tensor over all ranks, in place; None if there is one.
    """

    def __init__(
        self,
        examples: Examples,
        first: int,
        classes: int,
        width: int,
        scale: float,
        settings: Settings,
        device: str,
        all_reduce: Callable[[torch.Tensor], Any] | None,
    ) -> None:
        import torch

        self._examples, self._first = examples, first
        self._classes, self._width, self._scale = classes, width, scale
        self._settings, self._device, self._all_reduce = settings, device, all_reduce
        self._parameters = torch.zeros(width, classes, dtype=torch.float64, device=device)
        self._velocity = torch.zeros_like(self._parameters)
        row_bytes = 8 * (width + 2 * classes + 2)
        batches = max(1, _CHUNK_BYTES // row_bytes // settings.batch_size)
        self._chunk = batches * settings.batch_size

    def start(self, features: int) -> None:
        """Sets the parameters to those that Spark starts with: torch's of a linear layer, after `manual_seed`."""
        import torch

        # A generator of its own: the process's is shared by all threads, and belongs to the program.
        generator = torch.Generator().manual_seed(self._settings.seed % 2**64)
        weight = torch.empty(self._classes, features, dtype=torch.float32)
        torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)
        self._parameters[:features].copy_(weight.T)
        if self._settings.fit_intercept:
            bound = 1 / math.sqrt(features)
            bias = torch.empty(self._classes, dtype=torch.float32)
            self._parameters[features].copy_(torch.nn.init.uniform_(bias, -bound, bound, generator=generator))

    def epoch(self, order: Order, epoch: int, progress: Progress) -> float:
        """Passes once over all rows.

        Args:
            order: Their order.
            epoch: The epoch.
            progress: Says how far it is.

        Returns:
            The sum of the rows' losses, each as it was before the step that its batch made.
        """
        import torch

        total = torch.zeros((), dtype=torch.float64, device=self._device)
        count = 0
        for numbers in order.chunks(epoch, self._chunk):
            _interrupts.check()
            total += self._steps(numbers)
            count += len(numbers)
            progress.rows_done(epoch, count)
        if self._all_reduce is not None:
            self._all_reduce(total)
        return float(total)

    def _steps(self, numbers: numpy.ndarray[Any, Any]) -> torch.Tensor:
        """Makes a step with each batch of consecutive rows. Returns the sum of this rank's rows' losses."""
        import torch

        size = self._settings.batch_size
        sizes = [min(size, len(numbers) - begin) for begin in range(0, len(numbers), size)]
        mine = sizes
        if self._all_reduce is not None:
            local = numbers - self._first
            held = (local >= 0) & (local < self._examples.facts.rows)
            numbers = local[held]
            mine = [int(held[begin : begin + size].sum()) for begin in range(0, len(held), size)]
        rows = torch.from_numpy(self._examples.read(numbers)).to(self._device, torch.float64)
        if not len(rows):
            rows = rows.reshape(0, self._width + 2)
        inputs = rows[:, : self._width].contiguous()
        targets = torch.nn.functional.one_hot(rows[:, self._width].long(), self._classes).to(torch.float64)
        weights = rows[:, self._width + 1 :] * self._scale if self._settings.columns.weight else None
        parts = torch.split(inputs, mine), torch.split(targets, mine)
        weight_parts = [None] * len(mine) if weights is None else torch.split(weights, mine)
        steps = [self._step(*batch) for batch in zip(*parts, weight_parts, sizes)]
        outputs, totals = (torch.cat(part) for part in zip(*steps))
        losses = totals.log_() - outputs.mul_(targets).sum(1, keepdim=True)
        return (losses if weights is None else losses.mul_(weights)).sum()

    def _step(
        self, inputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None, size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Makes a step. Returns x W less its maximum before the step, and the sums of its exponentials.

        The gradient of the cross-entropy of softmax(x W) is x' (softmax(x W) - target): Bishop, "Pattern Recognition and
        Machine Learning" (2006), 4.109. The step is torch's `SGD` with momentum and without dampening. Not torch's own
        softmax, which wakes all threads, also for 32 rows.
        """
        outputs = inputs @ self._parameters
        outputs.sub_(outputs.amax(1, keepdim=True))
        errors = outputs.exp()
        totals = errors.sum(1, keepdim=True)
        errors.div_(totals).sub_(targets)
        if weights is not None:
            errors.mul_(weights)
        if self._all_reduce is None:
            self._velocity.addmm_(inputs.T, errors, beta=self._settings.momentum, alpha=1 / size)
        else:
            gradient = inputs.T @ errors
            self._all_reduce(gradient)
            self._velocity.mul_(self._settings.momentum).add_(gradient, alpha=1 / size)
        self._parameters.sub_(self._velocity, alpha=self._settings.learning_rate)
        return outputs, totals

    def fitted(self, losses: list[float]) -> Fitted:
        """The model as it is now. Its losses are of the parameters before the last step: these are checked here."""
        import torch

        parameters = self._parameters.to("cpu", torch.float32).T
        if not bool(torch.isfinite(parameters).all()):
            raise _diverged("a coefficient is beyond the range of float32", len(losses) - 1, self._settings)
        if not self._settings.fit_intercept:
            return Fitted(parameters.contiguous().numpy(), None, losses)
        return Fitted(parameters[:, :-1].contiguous().numpy(), parameters[:, -1].contiguous().numpy(), losses)
