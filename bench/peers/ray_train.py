"""Ray Train: seconds of each run of two ranks that only all-reduce, after Ray's own start."""

import time

import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def train(_):
    import torch
    import torch.distributed as dist

    ones = torch.ones(1000)
    dist.all_reduce(ones)
    assert ones[0] == 2


if __name__ == "__main__":
    ray.init(num_cpus=4, include_dashboard=False, logging_level="error")
    for _ in range(3):
        begun = time.perf_counter()
        TorchTrainer(train, train_loop_config={}, scaling_config=ScalingConfig(num_workers=2)).fit()
        print("seconds", time.perf_counter() - begun, flush=True)
