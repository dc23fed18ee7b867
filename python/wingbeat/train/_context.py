"""Which rank this is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from wingbeat.train._unsupported import refuse

EXPERIMENT = "WINGBEAT_EXPERIMENT"
# Set in the ranks of a trial of `wingbeat.tune`: its name, and its folder.
TRIAL, TRIAL_DIR = "WINGBEAT_TRIAL", "WINGBEAT_TRIAL_DIR"


@dataclass(frozen=True)
class Context:
    """This rank's place in the run.

    The numbers are torchrun's, and each is both an attribute (`world_rank`) and a method as in Ray Train
    (`get_world_rank()`).

    Attributes:
        world_rank: The rank, from 0 to `world_size - 1`.
        world_size: How many ranks the run has now.
        local_rank: The rank among those of its node.
        local_world_size: How many ranks its node has.
        node_rank: The number of its node.
        run_id: An id that no other run has.
        restart_count: How often the group was started again after a failure.
        experiment_name: `RunConfig.name` of a `TorchTrainer` or a `Tuner`, and else the run's id.
        trial_id: The trial of `wingbeat.tune` that this rank is of; None outside of one.
        trial_dir: The folder of that trial; None outside of one.
    """

    world_rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    run_id: str
    restart_count: int
    experiment_name: str = ""
    trial_id: str | None = None
    trial_dir: str | None = None

    def get_world_rank(self) -> int:
        """The rank, from 0 to `get_world_size() - 1`."""
        return self.world_rank

    def get_world_size(self) -> int:
        """How many ranks the run has now."""
        return self.world_size

    def get_local_rank(self) -> int:
        """The rank among those of its node."""
        return self.local_rank

    def get_local_world_size(self) -> int:
        """How many ranks its node has."""
        return self.local_world_size

    def get_node_rank(self) -> int:
        """The number of its node."""
        return self.node_rank

    def get_experiment_name(self) -> str:
        """`RunConfig.name` of a `TorchTrainer` or a `Tuner`, and else the run's id."""
        return self.experiment_name

    def get_trial_id(self) -> str | None:
        """The trial of `wingbeat.tune` that this rank is of; None outside of one."""
        return self.trial_id

    def get_trial_name(self) -> str | None:
        """As `get_trial_id`: trials are named by their number."""
        return self.trial_id

    def get_trial_dir(self) -> str | None:
        """The folder of the trial, with its `params.json` and `metrics.jsonl`; None outside of one."""
        return self.trial_dir

    def get_trial_resources(self) -> Any:
        """Ray Tune's, and refused.

        Raises:
            NotImplementedError: Always.
        """
        raise refuse("Context.get_trial_resources", "put what the function has to know into param_space")


def get_context() -> Context:
    """This rank's place in the run.

    Returns:
        The context. Outside of a run, it is that of a single rank.
    """

    def number(name: str, default: int) -> int:
        return int(os.environ.get(name, default))

    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return Context(
        world_rank=number("RANK", 0),
        world_size=number("WORLD_SIZE", 1),
        local_rank=number("LOCAL_RANK", 0),
        local_world_size=number("LOCAL_WORLD_SIZE", 1),
        node_rank=number("GROUP_RANK", 0),
        run_id=run_id,
        restart_count=number("TORCHELASTIC_RESTART_COUNT", 0),
        experiment_name=os.environ.get(EXPERIMENT, run_id),
        trial_id=os.environ.get(TRIAL),
        trial_dir=os.environ.get(TRIAL_DIR),
    )
