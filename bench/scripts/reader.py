"""How fast a rank reads a dataset in files, beside pyarrow's own reading of the same files in one thread.

`python reader.py [ROWS_OF_A_ROW_GROUP]` writes a Parquet file of a million rows with 30 columns of float64, and reads it by turns:
by pyarrow, row group by row group; as a rank in the order of the file; and as one that shuffles. A turn of a rank is an epoch: as in a
run, the driver has looked into the file before, and the shard stays. It prints the medians of the seconds, by the clock and of CPU, and
of the rates as multiples of pyarrow's in the same turn.
"""

import statistics
import sys
import tempfile
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from wingbeat.train import StreamingShard, read_files

ROWS, COLUMNS, BATCH, TURNS = 1_000_000, 30, 1024, 9


def pyarrow_alone(path):
    file, rows = pq.ParquetFile(path), 0
    for group in range(file.metadata.num_row_groups):
        rows += file.read_row_group(group, use_threads=False).num_rows
    return rows


def as_a_rank(shard, seed):
    return sum(len(batch["x0"]) for batch in shard.iter_batches(batch_size=BATCH, shuffle_seed=seed))


def main():
    group = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/rows.parquet"
        pq.write_table(pa.table({f"x{one}": draw.random(ROWS) for one in range(COLUMNS)}), path, row_group_size=group)
        in_order, shuffled = (StreamingShard(read_files(path), 0, 1) for _ in range(2))
        kinds = {
            "pyarrow": lambda: pyarrow_alone(path),
            "in order": lambda: as_a_rank(in_order, None),
            "shuffled": lambda: as_a_rank(shuffled, 1),
        }
        turns = []
        for _ in range(TURNS + 1):
            turn = {}
            for kind, read in kinds.items():
                wall, cpu = time.perf_counter(), time.process_time()
                assert read() == ROWS
                turn[kind] = time.perf_counter() - wall, time.process_time() - cpu
            turns.append(turn)
        for kind in kinds:
            said = []
            for number, of in enumerate(("clock", "CPU")):
                seconds = statistics.median(turn[kind][number] for turn in turns[1:])
                rate = statistics.median(turn["pyarrow"][number] / turn[kind][number] for turn in turns[1:])
                said.append(f"{of} {seconds:.3f} s, {rate:.2f} of pyarrow's rate")
            print(f"{kind}: {'; '.join(said)}", flush=True)


if __name__ == "__main__":
    main()
