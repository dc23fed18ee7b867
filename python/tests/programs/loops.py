"""A trainer with one of these loops, as its first argument names it. The second is a folder for what the loop leaves."""

import os
import sys
from pathlib import Path

from wingbeat import train
from wingbeat.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from wingbeat.train.torch import TorchConfig, TorchTrainer

LOOP, FOLDER = sys.argv[1], Path(sys.argv[2])


class OddError(Exception):
    """One that cannot be made of its `args` alone."""

    def __init__(self, what, number):
        super().__init__(f"{what} {number}")
        self.number = number


def save(step):
    """Reports a checkpoint of a step."""
    import tempfile

    context = train.get_context()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / f"rank-{context.get_world_rank()}").write_text(str(step))
        train.report({"step": step, "loss": abs(step - 1)}, checkpoint=train.Checkpoint.from_directory(folder))


def fails_once(config):
    """Goes on from its checkpoint after rank 1 was killed."""
    import signal

    start = 0
    if checkpoint := train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            assert sorted(name for name in os.listdir(folder) if name[0] != ".") == ["rank-0", "rank-1"]
            start = int((Path(folder) / "rank-0").read_text()) + 1
    print("starts at", start, flush=True)
    for step in range(start, config["steps"]):
        context = train.get_context()
        if step == 2 and context.restart_count == 0 and context.get_world_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        save(step)


def raises():
    """Raises in rank 1, while rank 0 waits for it."""
    if train.get_context().get_world_rank() == 1:
        raise OddError("no luck", 7)
    train.report({"step": 1})


def crowd():
    pass


def vanishes():
    os._exit(0)


def exits_with_74():
    sys.exit(74)


def vanishes_second():
    """The second rank is gone while the first has come to the end of its loop, and waits for it."""
    if train.get_context().get_world_rank() == 1:
        os._exit(0)


def leaves_early():
    """One rank ends well by `sys.exit()`, and the other by returning."""
    rank = train.get_context().get_world_rank()
    train.report({"rank": rank})
    if rank == 1:
        sys.exit(0)


def reports_nothing_after_a_restart():
    """Everything was reported when a rank dies."""
    import signal

    if train.get_checkpoint() is None:
        save(7)
        if train.get_context().get_world_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def returns_what_nobody_can_send():
    import threading

    return threading.Lock()


def places():
    import torch.distributed as dist

    context = train.get_context()
    numbers = [
        context.get_world_rank(), context.get_world_size(), context.get_local_rank(), context.get_local_world_size(),
        context.get_node_rank(),
    ]
    (FOLDER / f"rank-{context.get_world_rank()}").write_text(
        f"{numbers} {context.get_experiment_name()} {dist.get_backend()} {train.torch.get_device()} {os.environ['SECRET']}"
    )
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert b"hunter" + b"2" not in path.read_bytes(), path
        except OSError:
            pass


def ranks_of_unequal_length(config):
    """The first ends long before the last, which has only then a group to make."""
    import time

    import torch
    import torch.distributed as dist

    if train.get_context().get_world_rank() == 1:
        time.sleep(2)
        group = dist.new_group([1], use_local_synchronization=True)
        dist.all_reduce(torch.ones(1), group=group)
    else:
        assert config == {"x": 1}


def reads_rows():
    shard = train.get_dataset_shard("rows")
    seen = [batch["x"].tolist() for batch in shard.iter_torch_batches(batch_size=2)]
    images = next(iter(shard.iter_torch_batches(batch_size=None)))["image"]
    shuffled = [row for batch in shard.iter_batches(local_shuffle_buffer_size=1, local_shuffle_seed=3) for row in batch["x"]]
    assert sorted(shuffled) == [row["x"] for row in shard.iter_rows()] and len(shard) == 3
    rank = train.get_context().get_world_rank()
    (FOLDER / f"rank-{rank}").write_text(f"{seen} {tuple(images.shape)} {shard.schema.names}")


def rows():
    import pyarrow

    return pyarrow.table({"x": range(7), "image": [[float(i), 0.0] for i in range(7)]})


def ignores_nothing():
    import signal
    import time

    def stop(number, frame):
        time.sleep(1)  # longer than nothing
        (FOLDER / "saved").write_text(signal.Signals(number).name)
        sys.exit(1)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    (FOLDER / "begun").write_text(str(os.getpid()))
    while True:
        time.sleep(0.1)


def counts():
    (FOLDER / f"of-{train.get_context().get_world_size()}").touch()


def reports_in_the_background():
    """A directory that is Wingbeat's to delete, as with Ray's ASYNC, and one that is not."""
    from wingbeat.train import CheckpointUploadMode

    rank = train.get_context().get_world_rank()
    for name, more in (("theirs", {}), ("mine", {"delete_local_checkpoint_after_upload": False})):
        folder = FOLDER / f"{name}-{rank}"
        folder.mkdir()
        (folder / "state").write_text(name)
        checkpoint = train.Checkpoint.from_directory(folder)
        checkpoint.set_metadata({"of": name})
        train.report({}, checkpoint=checkpoint, checkpoint_upload_mode=CheckpointUploadMode.ASYNC, **more)


ARGUMENTS = {
    "fails_once": {
        "train_loop_config": {"steps": 4},
        "run_config": RunConfig(
            name="again",
            storage_path="stored",
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(1, "loss", "min"),
        ),
    },
    "places": {
        "run_config": RunConfig(name="of-places", storage_path="stored", worker_runtime_env={"env_vars": {"SECRET": "hunter2"}}),
        "torch_config": TorchConfig(backend="gloo"),
    },
    "reports_nothing_after_a_restart": {
        "run_config": RunConfig(storage_path="stored", failure_config=FailureConfig(max_failures=1)),
    },
    "reads_rows": {"datasets": {"rows": rows}},
    "vanishes": {"scaling_config": ScalingConfig(1)},
    "crowd": {"scaling_config": ScalingConfig(1000)},
    "ranks_of_unequal_length": {"train_loop_config": {"x": 1}},
    "counts": {"scaling_config": ScalingConfig((1, 3))},
}

if __name__ == "__main__":
    arguments = {"scaling_config": ScalingConfig(num_workers=2), "run_config": RunConfig(storage_path="stored")}
    try:
        result = TorchTrainer(globals()[LOOP], **{**arguments, **ARGUMENTS.get(LOOP, {})}).fit()
    except train.WorkerTrainingFailedError as error:
        [(rank, cause)] = error.worker_failures.items()
        print("failed", type(error.__cause__).__name__, rank, getattr(cause, "number", None), error.__cause__ is cause, error)
        print("there", error.__cause__.__cause__)
    except train.TrainingFailedError as error:
        print("failed", error)
    except KeyboardInterrupt:
        print("interrupted")
    else:
        checkpoints = [(Path(one.path).name, metrics.get("loss"), one.get_metadata()) for one, metrics in result.best_checkpoints]
        best = result.get_best_checkpoint("loss", "min")
        print("result", result.metrics, checkpoints, best and Path(best.path).name, result.error)
        print("path", result.path)
