"""What Ray Train's example of image classification calls, with another import: loaders for training and for a test.

    python loaders.py EPOCHS
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import wingbeat.train
from wingbeat.train import ScalingConfig
from wingbeat.train.torch import TorchTrainer


def images(count, seed):
    """Images whose label is the row that is bright."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    pixels = torch.rand(count, 1, 10, 10, generator=generator) / 4
    pixels[torch.arange(count), 0, labels] += 1
    return TensorDataset(pixels, labels)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(100, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))

    def forward(self, pixels):
        return self.layers(pixels)


def train_func_per_worker(config: dict):
    train_loader = DataLoader(images(400, seed=0), batch_size=config["batch_size_per_worker"])
    test_loader = DataLoader(images(100, seed=1), batch_size=config["batch_size_per_worker"])
    # `wingbeat.train.torch` is there without an import of its own.
    train_loader = wingbeat.train.torch.prepare_data_loader(train_loader)
    test_loader = wingbeat.train.torch.prepare_data_loader(test_loader)
    model = wingbeat.train.torch.prepare_model(Classifier())
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    for epoch in range(config["epochs"]):
        model.train()
        for pixels, labels in tqdm(train_loader, desc=f"Train Epoch {epoch}"):
            loss = loss_fn(model(pixels), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        test_loss, right, total = 0, 0, 0
        with torch.no_grad():
            for pixels, labels in tqdm(test_loader, desc=f"Test Epoch {epoch}"):
                predicted = model(pixels)
                test_loss += loss_fn(predicted, labels).item()
                total += labels.shape[0]
                right += (predicted.argmax(1) == labels).sum().item()
        wingbeat.train.report(metrics={"test_loss": test_loss / len(test_loader), "accuracy": right / total, "seen": total})


def main(num_workers=2, use_gpu=False):
    trainer = TorchTrainer(
        train_loop_per_worker=train_func_per_worker,
        train_loop_config={"lr": 0.05, "epochs": int(sys.argv[1]), "batch_size_per_worker": 32 // num_workers},
        scaling_config=ScalingConfig(num_workers=num_workers, use_gpu=use_gpu),
    )
    result = trainer.fit()
    print(f"Training result: {result}")
    print("accuracy", "good" if result.metrics["accuracy"] > 0.9 else result.metrics["accuracy"], "of", result.metrics["seen"])


if __name__ == "__main__":
    main()
