"""Trains on files: `streams.py FOLDER RANKS SEED KILLED_AT STOPPED_AT OUT`. Ranks write which rows they had, step by step."""

import json
import os
import signal
import sys
import tempfile
from pathlib import Path

from wingbeat import train
from wingbeat.train import FailureConfig, RunConfig, ScalingConfig
from wingbeat.train.torch import TorchTrainer

GLOBAL_BATCH = 60


def loop(config):
    context = train.get_context()
    shard = train.get_dataset_shard("train")
    assert train.get_dataset_shard("train") is shard
    step, out = 0, Path(config["out"])
    if checkpoint := train.get_checkpoint():
        state = json.loads((Path(checkpoint.path) / "state.json").read_text())
        step = state["step"]
        shard.load_state_dict(state["shard"])
        print("goes on at", state["shard"], flush=True)
    size = GLOBAL_BATCH // context.get_world_size()
    while shard.epoch < 2:
        for batch in shard.iter_torch_batches(batch_size=size, shuffle_seed=config["seed"], collate_fn=lambda rows: rows["id"].tolist()):
            (out / f"{step:03}-{context.get_world_rank()}").write_text(json.dumps(batch))
            step += 1
            if step == config["killed_at"] and context.restart_count == 0 and context.get_world_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if step % 5 == 0:
                with tempfile.TemporaryDirectory() as folder:
                    (Path(folder) / "state.json").write_text(json.dumps({"step": step, "shard": shard.state_dict()}))
                    train.report({"step": step}, checkpoint=folder if context.get_world_rank() == 0 else None)
            if step == config["stopped_at"]:
                return


if __name__ == "__main__":
    folder, ranks, seed, killed_at, stopped_at, out = sys.argv[1:]
    low, _, high = ranks.partition(":")
    TorchTrainer(
        loop,
        train_loop_config={"out": out, "seed": int(seed), "killed_at": int(killed_at), "stopped_at": int(stopped_at)},
        scaling_config=ScalingConfig(num_workers=(int(low), int(high)) if high else int(low)),
        run_config=RunConfig(name="run", storage_path=f"{out}/stored", failure_config=FailureConfig(max_failures=1)),
        datasets={"train": folder},
    ).fit()
