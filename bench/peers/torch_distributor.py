"""Spark's TorchDistributor: seconds of each run of two ranks that only all-reduce, after Spark's own start."""

import time

from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession


def train():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ones = torch.ones(1000)
    dist.all_reduce(ones)
    dist.destroy_process_group()
    return float(ones[0])


if __name__ == "__main__":
    SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    for _ in range(4):
        begun = time.perf_counter()
        assert TorchDistributor(num_processes=2, local_mode=True, use_gpu=False).run(train) == 2.0
        print("seconds", time.perf_counter() - begun, flush=True)
