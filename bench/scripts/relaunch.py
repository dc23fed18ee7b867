"""The last rank kills itself once, or waits to be killed: argv[1] is a folder, argv[2] `self` or `wait`.

Each event is a line of `events` in the folder: when, what, which attempt.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

folder, how = sys.argv[-2:]
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def tell(event):
    with open(os.path.join(folder, "events"), "a") as file:
        file.write(f"{time.time()} {event} {attempt}\n")


dist.init_process_group("gloo")
last = dist.get_rank() == dist.get_world_size() - 1
for step in range(5 if attempt else 1 << 30):
    ones = torch.ones(1000)
    dist.all_reduce(ones)
    if step == 0:
        tell("step")
    if step == 3 and last and attempt == 0 and how == "self":
        tell("kill")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.01)
dist.destroy_process_group()
