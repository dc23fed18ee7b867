"""How a `TorchTrainer` runs: Ray Train's configurations, with a few fields of Wingbeat's own."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wingbeat import _job
from wingbeat.train._unsupported import refuse

# The most failures that `wingbeat train` takes: with one attempt more, the number of attempts still fits.
_UNLIMITED = 2**32 - 2
# The label that a node with GPUs of one model has.
_MODEL = "accelerator-type"


@dataclass
class ScalingConfig:
    """How many ranks there are, and what each holds.

    Attributes:
        num_workers: How many ranks. `(2, 4)` starts as many as fit, continues with fewer when a node is lost, and with
            more when there is room.
        use_gpu: Whether each rank gets a GPU.
        resources_per_worker: `{"CPU": …, "GPU": …, "memory": …}` of each rank, and custom resources by name. Without
            "CPU", a rank holds one. "memory" is in bytes.
        placement_strategy: "PACK" (close to each other), "SPREAD" (on as many nodes as there are), "STRICT_PACK" (all on
            one node) or "STRICT_SPREAD" (each on a node of its own).
        accelerator_type: On nodes with which GPUs ranks may be: the value of the label `accelerator-type` that each such node
            has, as "NVIDIA-H200". `wingbeat list nodes --json` shows it.
        label_selector: On which nodes ranks may be, by their labels: `{"zone": "a"}`, `{"zone": "!a"}`,
            `{"zone": "in(a, b)"}` or `{"zone": "!in(a, b)"}`. A list with one for each rank must have the same for all.
        trainer_resources: Ray Train's; refused: the trainer runs in this program.
        use_tpu: Ray Train's; refused.
        topology: Ray Train's; refused.
        wait_for_room_s: How many seconds to wait for room, and for nodes that are not there yet. Without it, a run waits
            as long as others hold what it needs, and what no node could hold is an error at once. Wingbeat's own.

    Raises:
        ValueError: A value makes no sense.
        NotImplementedError: A value is refused.
    """

    num_workers: int | tuple[int, int] = 1
    use_gpu: bool = False
    resources_per_worker: Mapping[str, float] | None = None
    placement_strategy: str = "PACK"
    accelerator_type: str | None = None
    label_selector: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None
    trainer_resources: Mapping[str, float] | None = None
    use_tpu: bool = False
    topology: str | None = None
    wait_for_room_s: float | None = None

    def __post_init__(self) -> None:
        least, most = self.workers
        for workers in (least, most):
            if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
                raise ValueError(f"num_workers must be a positive integer or (min, max), not {self.num_workers!r}")
        if least > most:
            raise ValueError(f"num_workers={self.num_workers!r}: the minimum is larger than the maximum")
        if self.topology is not None:
            raise refuse("ScalingConfig(topology=…)", "use a cluster whose nodes are alike")
        self.label_rules()
        if self.trainer_resources is not None:
            raise refuse("ScalingConfig(trainer_resources=…)", "the trainer runs in this program")
        if self.use_tpu:
            raise refuse("ScalingConfig(use_tpu=True)", "ranks run on CPUs and GPUs")
        resources = dict(self.resources_per_worker or {})
        for name, amount in resources.items():
            if not isinstance(name, str) or not name or "=" in name:
                raise ValueError(f"resources_per_worker: {name!r} is no name of a resource")
            if isinstance(amount, bool) or not isinstance(amount, (int, float)) or amount < 0:
                raise ValueError(f"resources_per_worker[{name!r}] must be a number that is not negative, not {amount!r}")
        if self.use_gpu and resources.get("GPU") == 0:
            raise ValueError('use_gpu=True, and resources_per_worker["GPU"] is 0: set use_gpu=False, or ask for a GPU')
        if not self.use_gpu and resources.get("GPU", 0) > 0:
            raise ValueError('resources_per_worker has a "GPU", and use_gpu is False: set use_gpu=True')
        if self.placement_strategy not in ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"):
            raise ValueError(f"{self.placement_strategy!r} is no placement_strategy")
        if self.placement_strategy == "STRICT_PACK" and least != most:
            raise refuse('placement_strategy="STRICT_PACK" with (min, max) workers', 'use "PACK"')

    @property
    def workers(self) -> tuple[int, int]:
        """The least and the most ranks."""
        if isinstance(self.num_workers, (tuple, list)):
            least, most = self.num_workers
            return least, most
        return self.num_workers, self.num_workers

    def label_rules(self) -> str | None:
        """The rules about labels as `wingbeat train` takes them.

        Raises:
            ValueError: A selector makes no sense.
            NotImplementedError: Ranks are to have different ones.
        """
        selector, model = self.label_selector, self.accelerator_type
        if isinstance(selector, Sequence) and not isinstance(selector, str):
            if any(other != selector[0] for other in selector):
                raise refuse("ScalingConfig(label_selector=[…]) with different selectors", "ranks have the same one")
            selector = selector[0] if selector else None
        selector = {} if selector is None else selector
        if not isinstance(selector, Mapping):
            raise ValueError(f"label_selector must be a dict of labels and values, not {selector!r}")
        if model is not None:
            if _MODEL in selector:
                raise ValueError(f"accelerator_type={model!r}, and label_selector has {_MODEL!r} as well: give one of them")
            if not isinstance(model, str) or not re.fullmatch(r"[\w./:-]+", model):
                raise ValueError(f'accelerator_type must be the value of a label, as "NVIDIA-H200", not {model!r}')
            selector = {**selector, _MODEL: model}
        return ", ".join(_rule(key, value) for key, value in selector.items()) or None

    def options(self) -> list[str]:
        """The options of `wingbeat train` that say this."""
        least, most = self.workers
        workers = f"{least}:{most}" if least != most else str(most)
        layout = {
            "PACK": ["--workers", workers],
            "SPREAD": ["--workers", workers, "--spread"],
            "STRICT_PACK": ["--nodes", "1", "--workers", workers],
            "STRICT_SPREAD": ["--nodes", workers, "--workers", "1"],
        }[self.placement_strategy]
        resources = self.resources_per_worker or {}
        cpus, gpus = resources.get("CPU", 1), resources.get("GPU", 1 if self.use_gpu else 0)
        options = [*layout, "--cpus-per-worker", str(cpus), "--gpus-per-worker", str(gpus)]
        for name, amount in resources.items():
            if name == "memory" and amount:
                options += ["--memory-per-worker", str(math.ceil(amount))]
            elif name not in ("CPU", "GPU", "memory"):
                options += ["--resource-per-worker", f"{name}={amount}"]
        rules = self.label_rules()
        if rules is not None:
            options += ["--labels", rules]
        if self.wait_for_room_s is not None:
            options += ["--wait-for-room", seconds(self.wait_for_room_s)]
        return options


def _rule(key: object, value: object) -> str:
    """A rule about a label, as `wingbeat train` takes it."""
    if not isinstance(key, str) or not isinstance(value, str):
        raise ValueError(f"label_selector: {key!r} and {value!r} must be text")
    no = "not " if value.startswith("!") else ""
    text = value.removeprefix("!").strip()
    rule = f"{key} {no}{text}" if text.startswith("in(") else f"{key}{'!=' if no else '='}{text}"
    if not re.fullmatch(r"[\w./:-]+( (not )?in\([\w./:-]+(, *[\w./:-]+)*\)|!?=[\w./:-]+)", rule):
        raise ValueError(f'label_selector: {{{key!r}: {value!r}}} must be a value, "!value", "in(a, b)" or "!in(a, b)"')
    return rule.replace("in(", "in (")


@dataclass
class FailureConfig:
    """What happens after a failure.

    Attributes:
        max_failures: How often the ranks are started again, from their newest checkpoint; -1 for any number of times.
        controller_failure_limit: Ray Train's; refused: the run ends with this program.
        restart_on_hang: Whether a run that hangs has failed. Wingbeat's own.

    Raises:
        ValueError: `max_failures` is less than -1.
        NotImplementedError: A value is refused.
    """

    max_failures: int = 0
    controller_failure_limit: int = -1
    restart_on_hang: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.max_failures, bool) or not isinstance(self.max_failures, int) or self.max_failures < -1:
            raise ValueError(f"max_failures must be an integer from -1 up, not {self.max_failures!r}")
        if self.controller_failure_limit != -1:
            raise refuse("FailureConfig(controller_failure_limit=…)", "the run ends with this program")

    def options(self) -> list[str]:
        """The options of `wingbeat train` that say this."""
        failures = _UNLIMITED if self.max_failures == -1 else self.max_failures
        return ["--max-failures", str(failures), *(["--restart-on-hang"] if self.restart_on_hang else [])]


@dataclass
class CheckpointConfig:
    """Which checkpoints are kept.

    Attributes:
        num_to_keep: How many of the newest are kept, or of the best if there is a `checkpoint_score_attribute`; None for
            all. The newest is kept in any case: a run that is started again goes on from it.
        checkpoint_score_attribute: A metric, by which checkpoints are better or worse.
        checkpoint_score_order: "max" if more is better, or "min".

    Raises:
        ValueError: A value makes no sense.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: str = "max"

    def __post_init__(self) -> None:
        number = self.num_to_keep
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ValueError(f"num_to_keep must be a positive integer or None, not {number!r}")
        if self.checkpoint_score_order not in ("max", "min"):
            raise ValueError(f'checkpoint_score_order must be "max" or "min", not {self.checkpoint_score_order!r}')

    def options(self) -> list[str]:
        """The options of `wingbeat train` that say this."""
        if self.checkpoint_score_attribute is None:
            return ["--keep", str(self.num_to_keep or _UNLIMITED)]
        best = ["--keep-best", f"{self.checkpoint_score_attribute}:{self.checkpoint_score_order}"]
        if self.num_to_keep is None:
            return ["--keep", str(_UNLIMITED), *best]
        return ["--keep", "1", *best, "--keep-best-count", str(self.num_to_keep)]


@dataclass
class RunConfig:
    """A run's name, storage and behaviour.

    Attributes:
        name: The run's name. A run with the name and the storage of an earlier one goes on from its newest checkpoint.
            Without it, the run has a name that no other has.
        storage_path: Where the run's folder is: a folder that all nodes share, or a URL (`s3://…`, `gs://…`, `az://…`).
            A relative one is in the working directory of this program. Without it, that is
            `~/.local/share/wingbeat/runs` (`$XDG_DATA_HOME/wingbeat/runs`).
        storage_filesystem: Ray Train's; refused.
        failure_config: What happens after a failure.
        checkpoint_config: Which checkpoints are kept.
        callbacks: Ray Train's; refused.
        worker_runtime_env: `{"env_vars": {…}, "working_dir": …}` of the ranks. Other keys are refused.
        grace_s: How many seconds ranks have to save what they have, when the run is stopped or moved, or another rank
            has failed. Wingbeat's own.
        hang_timeout_s: After how many seconds without output or report the ranks' stacks are shown; more than 0. Wingbeat's
            own.
        warm: Whether ranks are forked from a process that has torch imported. Wingbeat's own.
        namespace: The namespace of the run's job, to which quotas apply; None for `$WINGBEAT_NAMESPACE`, and without that a
            new one. Wingbeat's own.
        priority: Whose ranks are placed first: those of the job with the larger number. Wingbeat's own.

    Raises:
        ValueError: A value makes no sense.
        TypeError: A name or a namespace is no text.
        NotImplementedError: A value is refused.
    """

    name: str | None = None
    storage_path: str | os.PathLike[str] | None = None
    storage_filesystem: Any = None
    failure_config: FailureConfig | None = None
    checkpoint_config: CheckpointConfig | None = None
    callbacks: Sequence[Any] | None = None
    worker_runtime_env: Mapping[str, Any] | None = None
    grace_s: float = 30.0
    hang_timeout_s: float = 600.0
    warm: bool = True
    namespace: str | None = None
    priority: int = 0
    env: dict[str, str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.name is not None and not isinstance(self.name, str):
            raise TypeError(f"a run's name is a str; {self.name!r} is a {type(self.name).__qualname__}")
        if self.name is not None and (
            not self.name or "/" in self.name or self.name in (".", "..") or not self.name.isprintable()
        ):
            raise ValueError(f"a run's name is the name of a folder; {self.name!r} cannot be one")
        _job.check(self.namespace, self.priority)
        if self.storage_filesystem is not None:
            raise refuse(
                "RunConfig(storage_filesystem=…)",
                "give storage_path as a URL, with its usual settings in the environment",
            )
        if self.callbacks:
            raise refuse("RunConfig(callbacks=…)", "print or log in the loop, or read metrics.jsonl in Result.path")
        if seconds(self.hang_timeout_s) == "0ms":
            raise ValueError(
                f"hang_timeout_s must be more than 0, not {self.hang_timeout_s!r}: give the seconds of silence after which a "
                "run hangs, as 600; a large number, as 1e9, turns it off"
            )
        self.failure_config = self.failure_config or FailureConfig()
        self.checkpoint_config = self.checkpoint_config or CheckpointConfig()
        runtime = dict(self.worker_runtime_env or {})
        other = sorted(set(runtime) - {"env_vars", "working_dir"})
        if other:
            raise refuse(
                f"RunConfig(worker_runtime_env={{{other[0]!r}: …}})",
                '"env_vars" and "working_dir" are; packages are those of the interpreter on each node',
            )
        self.env = {str(name): str(value) for name, value in dict(runtime.get("env_vars", {})).items()}
        for variable, value in self.env.items():
            if not variable or "=" in variable or "\0" in variable + value:
                raise ValueError(f"env_vars: {variable!r} with the value {value!r} cannot be a variable of an environment")

    def options(self) -> list[str]:
        """The options of `wingbeat train` that say this, but for the storage."""
        assert self.failure_config is not None and self.checkpoint_config is not None
        options = [*self.failure_config.options(), *self.checkpoint_config.options()]
        options += ["--grace", seconds(self.grace_s), "--hang-timeout", seconds(self.hang_timeout_s)]
        if not self.warm:
            options.append("--cold")
        folder = (self.worker_runtime_env or {}).get("working_dir")
        if folder is not None:
            options += ["--working-dir", os.fspath(folder)]
        return [*options, *_job.options(self.namespace, self.priority)]


@dataclass(frozen=True)
class TorchConfig:
    """How ranks join their process group.

    Attributes:
        backend: "nccl" or "gloo"; None for NCCL with GPUs and gloo without.
        init_method: Ray Train's; "env" is the only one.
        timeout_s: After how many seconds a collective has failed.

    Raises:
        ValueError: The backend is none of these.
        NotImplementedError: Another `init_method`.
    """

    backend: str | None = None
    init_method: str = "env"
    timeout_s: float = 1800

    def __post_init__(self) -> None:
        if self.backend not in (None, "nccl", "gloo"):
            raise ValueError(f'backend must be "nccl", "gloo" or None, not {self.backend!r}')
        if self.init_method != "env":
            raise refuse(f"TorchConfig(init_method={self.init_method!r})", 'Wingbeat does the rendezvous; use "env"')

    def options(self) -> list[str]:
        """The options of `wingbeat train` that say this."""
        return ["--backend", self.backend or "auto"]


def seconds(time: float) -> str:
    """A time as `wingbeat train` takes it."""
    if isinstance(time, bool) or not isinstance(time, (int, float)) or not 0 <= time < math.inf:
        raise ValueError(f"a time must be a finite number of seconds that is not negative, not {time!r}")
    return f"{int(time * 1000)}ms"
