"""DDP on scikit-learn's digits: rank 0 prints how many steps it makes in a second."""

import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits

dist.init_process_group("gloo")
torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
generator = torch.Generator().manual_seed(dist.get_rank())


def step():
    batch = torch.randint(len(images), (64,), generator=generator)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
    optimizer.step()


for _ in range(50):
    step()
dist.barrier()
begun = time.perf_counter()
for _ in range(1000):
    step()
dist.barrier()
if dist.get_rank() == 0:
    print("steps/s", 1000 / (time.perf_counter() - begun), flush=True)
dist.destroy_process_group()
