"""Both ways in which Spark's documentation uses `TorchDistributor`, with another import: a function, and a script.

    python torch_distributor.py
    python torch_distributor.py --learning-rate=0.1 --batch-size=8      as the script
"""

import argparse
import sys

# from pyspark.ml.torch.distributor import TorchDistributor
from wingbeat.torch import TorchDistributor


def train(learning_rate, use_gpu, batch_size=10):
    import os

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    backend = "nccl" if use_gpu else "gloo"
    dist.init_process_group(backend)
    device = int(os.environ["LOCAL_RANK"]) if use_gpu else "cpu"
    inputs = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = DDP(torch.nn.Linear(3, 1).to(device))
    loader = DataLoader(dataset, batch_size=batch_size, sampler=DistributedSampler(dataset))
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    for _ in range(10):
        for values, wanted in loader:
            loss = torch.nn.functional.mse_loss(model(values.to(device)), wanted.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    ranks = dist.get_world_size()
    dist.destroy_process_group()
    return ranks, loss.item()


def main():
    distributor = TorchDistributor(num_processes=2, local_mode=True, use_gpu=False)
    ranks, loss = distributor.run(train, 0.1, False)
    print("function", ranks, "good" if loss < 0.01 else loss)
    distributor.run(__file__, "--learning-rate=0.1", "--batch-size=8")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("--learning-rate", type=float)
        parser.add_argument("--batch-size", type=int)
        given = parser.parse_args()
        ranks, loss = train(given.learning_rate, False, given.batch_size)
        print("script", ranks, "good" if loss < 0.01 else loss)
