"""How much memory ranks need that read a dataset larger than it.

`python memory.py [GIB]` writes so many GiB of Parquet (3.8 if nothing is said: 31 columns of float64 in row groups of 24 MiB), and has two
ranks read all of it once in the order of the file, and once shuffled. It prints the most memory that a rank had resident, by the kernel's
count (VmHWM), and how much of it was there before it read.
"""

import os
import pathlib
import sys
import tempfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from wingbeat import train
from wingbeat.train import RunConfig, ScalingConfig, TorchTrainer, read_files

COLUMNS, ROWS_OF_A_GROUP = 31, 100_000


def resident():
    """The most that this process had, in MiB."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1]) / 1024


def reads(config):
    before = resident()
    shard, rows = train.get_dataset_shard("train"), 0
    for batch in shard.iter_torch_batches(batch_size=1024, shuffle_seed=config["seed"]):
        rows += len(batch["x0"])
    most = torch.tensor([before, resident()])
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    train.report({"rows": rows, "before": most[0].item(), "most": most[1].item()})


def main():
    gib = float(sys.argv[1]) if len(sys.argv) > 1 else 3.8
    groups = int(gib * (1 << 30) / (COLUMNS * 8 * ROWS_OF_A_GROUP))
    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rows.parquet")
        schema = pa.schema([(f"x{one}", pa.float64()) for one in range(COLUMNS)])
        with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
            for _ in range(groups):
                columns = [draw.random(ROWS_OF_A_GROUP) for _ in range(COLUMNS)]
                writer.write_table(pa.table(columns, schema=schema), row_group_size=ROWS_OF_A_GROUP)
        print(f"{os.path.getsize(path) / (1 << 30):.2f} GiB in {groups} row groups", flush=True)
        for seed in (None, 7):
            result = TorchTrainer(
                reads,
                train_loop_config={"seed": seed},
                scaling_config=ScalingConfig(num_workers=2),
                run_config=RunConfig(storage_path=folder),
                datasets={"train": read_files(path)},
            ).fit()
            metrics = result.metrics
            how = "in order" if seed is None else "shuffled"
            print(f"{how}: {metrics['most']:.0f} MiB at most, {metrics['before']:.0f} MiB before it read ({metrics['rows']} rows)", flush=True)


if __name__ == "__main__":
    main()
