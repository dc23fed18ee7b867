"""What Ray Train's pages on checkpoints and on failures call, with another import.

A run fails after its second epoch and goes on from there, with the state of its optimizer. Each rank has a file of its own in
the checkpoints.

    python resumes.py STORAGE
"""

import os
import sys
import tempfile

import torch
from torch import nn

import wingbeat.train.torch
from wingbeat import train
from wingbeat.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from wingbeat.train.torch import TorchTrainer


def train_func(config):
    rank = train.get_context().get_world_rank()
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(100, 4, generator=generator)
    targets = inputs.sum(1, keepdim=True)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model = wingbeat.train.torch.prepare_model(model)
    first = 0
    checkpoint = train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            model.module.load_state_dict(torch.load(os.path.join(folder, "model.pt")))
            optimizer.load_state_dict(torch.load(os.path.join(folder, "optimizer.pt")))
            first = torch.load(os.path.join(folder, "extra_state.pt"))["epoch"] + 1
            assert torch.load(os.path.join(folder, f"of-rank={rank}.pt"))["rank"] == rank
    print("begins at epoch", first)
    for epoch in range(first, config["num_epochs"]):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            torch.save({"rank": rank}, os.path.join(folder, f"of-rank={rank}.pt"))
            if rank == 0:
                torch.save(model.module.state_dict(), os.path.join(folder, "model.pt"))
                torch.save(optimizer.state_dict(), os.path.join(folder, "optimizer.pt"))
                torch.save({"epoch": epoch}, os.path.join(folder, "extra_state.pt"))
            checkpoint = Checkpoint.from_directory(folder)
            train.report({"loss": loss.item(), "epoch": epoch}, checkpoint=checkpoint)
        if epoch == 1 and first == 0:
            raise RuntimeError("an error, to show what comes after it")


if __name__ == "__main__":
    trainer = TorchTrainer(
        train_func,
        train_loop_config={"num_epochs": 5},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="resumes",
            storage_path=sys.argv[1],
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min"),
        ),
    )
    result = trainer.fit()
    with result.checkpoint.as_directory() as folder:
        print("stored", *sorted(name for name in os.listdir(folder) if name.endswith(".pt")))
    print("kept", *(metrics["epoch"] for _, metrics in result.best_checkpoints))
    best = result.get_best_checkpoint("loss", "min")
    print("best", best.path == result.checkpoint.path, result.metrics["epoch"], result.error)
