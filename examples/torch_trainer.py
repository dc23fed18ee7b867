"""Trains a small network on scikit-learn's digits with `TorchTrainer`, whose names and meanings are Ray Train's.

    pip install ./python
    python examples/torch_trainer.py --workers 2 --storage results

Run it again with more epochs, and it goes on from its newest checkpoint.
"""

import argparse
import os
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from wingbeat import train
from wingbeat.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from wingbeat.train.torch import TorchTrainer, prepare_data_loader, prepare_model


def main():
    options = parse_arguments()
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"epochs": options.epochs, "batch_size": 32, "rate": 3e-3},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(
            name="digits",
            storage_path=options.storage,
            failure_config=FailureConfig(max_failures=2),
            checkpoint_config=CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="accuracy"),
        ),
    )
    result = trainer.fit()

    best = result.get_best_checkpoint("accuracy", "max")
    model = build_model()
    with best.as_directory() as folder:
        model.load_state_dict(torch.load(os.path.join(folder, "state.pt"))["model"])
    _, test = load_data()
    print(f"digits: test accuracy {accuracy(model, test):.3f}, from {best.path}")


def parse_arguments():
    parser = argparse.ArgumentParser(description="Trains on scikit-learn's digits with TorchTrainer.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument("--storage", help="a folder that all nodes share, or a URL")
    return parser.parse_args()


def train_loop(config):
    torch.set_num_threads(1)  # a rank is a core: more threads only contend with the other ranks
    torch.manual_seed(0)
    data, test = load_data()
    model = prepare_model(build_model())
    loader = prepare_data_loader(DataLoader(data, batch_size=config["batch_size"], shuffle=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["rate"])
    plain = getattr(model, "module", model)  # with several ranks, prepare_model has wrapped it

    start = 0
    checkpoint = train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"))
        plain.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["epoch"] + 1

    for epoch in range(start, config["epochs"]):
        if train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if train.get_context().get_world_rank() == 0:
                state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(state, os.path.join(folder, "state.pt"))
                checkpoint = Checkpoint.from_directory(folder)
            metrics = {"epoch": epoch, "loss": loss.item(), "accuracy": accuracy(plain, test)}
            train.report(metrics, checkpoint=checkpoint)


def load_data():
    """The digits as 1x8x8 images in 0..1, split alike everywhere."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train_rows, test_rows = order[:1350], order[1350:]
    return TensorDataset(images[train_rows], labels[train_rows]), TensorDataset(images[test_rows], labels[test_rows])


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


@torch.no_grad()
def accuracy(model, data):
    images, labels = data.tensors
    device = next(model.parameters()).device
    return (model(images.to(device)).argmax(dim=1).cpu() == labels).float().mean().item()


if __name__ == "__main__":
    main()
