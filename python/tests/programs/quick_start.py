"""Ray Train's PyTorch quick start with another import, and with random images in place of FashionMNIST.

    python quick_start.py EPOCHS STORAGE
"""

import os
import sys
import tempfile

import torch
from torch.nn import CrossEntropyLoss
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

import wingbeat.train.torch

EPOCHS, STORAGE = int(sys.argv[1]), sys.argv[2]


def build_model():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(28 * 28, 10))


def load_data():
    """Images whose brightest tenth of the rows is their label."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (200,), generator=generator)
    images = torch.rand(200, 1, 28, 28, generator=generator) / 4
    for image, label in zip(images, labels):
        image[0, 2 * label : 2 * label + 2] += 1
    return TensorDataset(images, labels)


def train_func():
    # Model, Loss, Optimizer
    model = build_model()
    # [1] Prepare model.
    model = wingbeat.train.torch.prepare_model(model)
    criterion = CrossEntropyLoss()
    optimizer = Adam(model.parameters(), lr=0.01)

    start = 0
    checkpoint = wingbeat.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as checkpoint_dir:
            state = torch.load(os.path.join(checkpoint_dir, "model.pt"))
            model.module.load_state_dict(state["model"])
            start = state["epoch"] + 1
    print("starts at epoch", start)

    # Data
    train_loader = DataLoader(load_data(), batch_size=20, shuffle=True)
    # [2] Prepare dataloader.
    train_loader = wingbeat.train.torch.prepare_data_loader(train_loader)

    # Training
    for epoch in range(start, EPOCHS):
        if wingbeat.train.get_context().get_world_size() > 1:
            train_loader.sampler.set_epoch(epoch)

        for images, labels in train_loader:
            outputs = model(images)
            loss = criterion(outputs, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        # [3] Report metrics and checkpoint.
        metrics = {"loss": loss.item(), "epoch": epoch}
        with tempfile.TemporaryDirectory() as temp_checkpoint_dir:
            checkpoint = None
            if wingbeat.train.get_context().get_world_rank() == 0:
                torch.save(
                    {"model": model.module.state_dict(), "epoch": epoch},
                    os.path.join(temp_checkpoint_dir, "model.pt"),
                )
                checkpoint = wingbeat.train.Checkpoint.from_directory(temp_checkpoint_dir)
            wingbeat.train.report(metrics, checkpoint=checkpoint)
        if wingbeat.train.get_context().get_world_rank() == 0:
            print(metrics)


if __name__ == "__main__":
    # [4] Configure scaling and resource requirements.
    scaling_config = wingbeat.train.ScalingConfig(num_workers=2, use_gpu=False)

    # [5] Launch distributed training job.
    trainer = wingbeat.train.torch.TorchTrainer(
        train_func,
        scaling_config=scaling_config,
        run_config=wingbeat.train.RunConfig(name="quick-start", storage_path=STORAGE),
    )
    result = trainer.fit()

    # [6] Load the trained model.
    with result.checkpoint.as_directory() as checkpoint_dir:
        model = build_model()
        model.load_state_dict(torch.load(os.path.join(checkpoint_dir, "model.pt"))["model"])
    images, labels = load_data().tensors
    accuracy = (model(images).argmax(1) == labels).float().mean()
    print("last epoch", result.metrics["epoch"], "accuracy", "good" if accuracy > 0.9 else accuracy)
    print("kept", len(result.best_checkpoints), "path", result.path)
