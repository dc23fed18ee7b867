"""What Ray Train's page on metrics calls, with another import: torchmetrics that ranks compute together, and barriers.

    python metrics_of_all.py
"""

import torch
import torchmetrics
from torch import nn

import wingbeat.train as train
from wingbeat.train import RunConfig, ScalingConfig
from wingbeat.train.torch import TorchConfig, TorchTrainer


def train_func():
    context = train.get_context()
    device = train.torch.get_device()
    model = train.torch.prepare_model(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mean_loss = torchmetrics.MeanMetric().to(device)
    ranks = torchmetrics.SumMetric().to(device)
    inputs = torch.randn(50, 4, generator=torch.Generator().manual_seed(context.get_world_rank())).to(device)
    for _ in range(3):
        loss = (model(inputs) - inputs.mean(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean_loss(loss.detach())
        ranks(context.get_world_rank() + 1)
        # Each waits for the others here: what rank 0 reports is of all.
        train.report({"mean_loss": mean_loss.compute().item(), "ranks": ranks.compute().item()})
        mean_loss.reset()
        ranks.reset()


if __name__ == "__main__":
    trainer = TorchTrainer(
        train_func, torch_config=TorchConfig(backend="gloo"), scaling_config=ScalingConfig(num_workers=3), run_config=RunConfig(name="metrics")
    )
    result = trainer.fit()
    print("ranks", result.metrics["ranks"], "falls", 0 < result.metrics["mean_loss"] < 5)
