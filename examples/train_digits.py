"""Trains a small network on scikit-learn's digits with plain DistributedDataParallel.

It knows nothing of Wingbeat: it reads the environment that torchrun sets (RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR, MASTER_PORT), so whatever keeps that contract can start it:

    torchrun --standalone --nproc-per-node 2 examples/train_digits.py
    wingbeat torchrun --nproc-per-node 2 examples/train_digits.py --metrics digits.json

The global batch, and with it the accuracy, does not depend on the number of ranks.
"""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SEED = 0
GLOBAL_BATCH = 64
LEARNING_RATE = 3e-3


def main():
    options = parse_arguments()
    started = time.monotonic()
    torch.set_num_threads(1)  # a rank is a core: more threads only contend with the other ranks
    torch.manual_seed(SEED)

    device = join_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train, test = load_data()
    if GLOBAL_BATCH % world_size:
        raise SystemExit(f"the batch of {GLOBAL_BATCH} does not divide among {world_size} ranks")

    accuracy = fit(train, test, options.epochs, device)
    # Everyone has the last result, and gloo has let go of it, before anyone's Python finalizes.
    dist.barrier()
    dist.destroy_process_group()

    if rank == 0:
        seconds = time.monotonic() - started
        if options.metrics:
            with open(options.metrics, "w", encoding="utf-8") as file:
                json.dump(
                    {"accuracy": accuracy, "world_size": world_size, "seconds": seconds}, file
                )
        print(f"digits: test accuracy {accuracy:.3f} on {world_size} ranks", flush=True)


def parse_arguments():
    parser = argparse.ArgumentParser(description="Trains on scikit-learn's digits with DDP.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--metrics", metavar="FILE", help="rank 0 writes its result here, as JSON")
    return parser.parse_args()


def join_process_group():
    """Joins the group that the environment describes; answers this rank's device."""
    if "RANK" not in os.environ:
        raise SystemExit("RANK is not set: start this script with torchrun or `wingbeat torchrun`")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    return device


def load_data():
    """The digits as 1x8x8 images in 0..1, split alike on every rank."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, test = train_test_split(
        range(len(labels)), test_size=0.25, stratify=digits.target, random_state=SEED
    )
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def fit(train, test, epochs, device):
    """Trains; answers the accuracy on the test set."""
    sampler = DistributedSampler(train, seed=SEED)
    batches = DataLoader(train, batch_size=GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    model = DistributedDataParallel(build_model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=LEARNING_RATE, total_steps=epochs * len(batches)
    )

    accuracy = 0.0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, batches, optimizer, schedule, device)
        last = epoch + 1 == epochs
        if last or (epoch + 1) % max(1, epochs // 4) == 0:
            accuracy = evaluate(model.module, test, device)
            if dist.get_rank() == 0:
                print(
                    f"epoch {epoch + 1}/{epochs}: loss {loss:.3f}, "
                    f"test accuracy {accuracy:.3f}",
                    flush=True,
                )
    return accuracy


def train_epoch(model, batches, optimizer, schedule, device):
    """Takes one step a batch; answers this rank's mean loss."""
    model.train()
    total = 0.0
    for images, labels in batches:
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        total += loss.item()
    return total / len(batches)


@torch.no_grad()
def evaluate(model, test, device):
    """The accuracy over the whole test set. Each rank judges its share, none twice, which a
    DistributedSampler, padding to equal shares, would not promise."""
    model.eval()
    images, labels = (part[dist.get_rank() :: dist.get_world_size()] for part in test.tensors)
    right = (model(images.to(device)).argmax(dim=1) == labels.to(device)).sum()
    dist.all_reduce(right)
    return right.item() / len(test)


if __name__ == "__main__":
    main()
