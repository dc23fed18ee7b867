"""What gloo reaches between two ranks of this machine: seconds of an all-reduce of 64 MiB, of several types, and of 1 KiB."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.set_num_threads(1)
for name, kind, count, times in (
    ("large", torch.float32, 64 << 18, 8),
    ("f16", torch.float16, 64 << 19, 8),
    ("bf16", torch.bfloat16, 64 << 19, 8),
    ("small", torch.float32, 256, 2000),
):
    ones = torch.ones(count, dtype=kind)
    for _ in range(3):
        dist.all_reduce(ones)
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(times):
        dist.all_reduce(ones)
    seconds = (time.perf_counter() - begun) / times
    if dist.get_rank() == 0:
        print(name, seconds, flush=True)
dist.destroy_process_group()
