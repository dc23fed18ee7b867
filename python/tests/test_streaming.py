"""Datasets in files: which rows ranks read, in which order, and what is refused."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import DEADLINE_SECONDS

from wingbeat.train import (
    DatasetError,
    MissingColumnError,
    SchemaMismatchError,
    StreamingShard,
    TooFewRowsError,
    TorchTrainer,
    UnreadableFileError,
    read_files,
)
from wingbeat.train._order import Order

PROGRAMS = Path(__file__).parent / "programs"


def write_parquet(folder, rows_of_files, group=100):
    """Files `0.parquet` and so on of these numbers of rows, with an `id` that counts through all of them."""
    folder.mkdir(exist_ok=True)
    first = 0
    for number, rows in enumerate(rows_of_files):
        ids = np.arange(first, first + rows)
        table = pa.table({"id": ids, "x": ids * 0.5, "name": [f"row {one}" for one in ids]})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=group)
        first += rows
    return folder


def shards(dataset, ranks):
    return [StreamingShard(dataset, rank, ranks) for rank in range(ranks)]


def batches_of(each, size, **options):
    """What each rank gets, step by step: a list of steps, each a list of the ids of each rank."""
    return list(zip(*[[batch["id"].tolist() for batch in shard.iter_batches(batch_size=size, **options)] for shard in each], strict=True))


def global_order(steps):
    """The ids in the order of their global positions: rank r has every n-th row from r on."""
    order = []
    for step in steps:
        for place in range(max(map(len, step))):
            order += [ids[place] for ids in step if place < len(ids)]
    return order


def digest(ids):
    return hashlib.sha256(np.asarray(ids, "<i8").tobytes()).hexdigest()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_parquet(tmp_path_factory.mktemp("data"), [1000, 730, 270, 995, 3])


@pytest.mark.parametrize("seed", [None, 7])
def test_the_order_of_rows_is_that_of_the_seed_at_1_2_and_4_ranks(folder, seed):
    dataset = read_files(folder, window_rows=150)
    orders = [global_order(batches_of(shards(dataset, n), 64 // n, shuffle_seed=seed)) for n in (1, 2, 4)]
    assert sorted(orders[0]) == list(range(2998))
    assert len({digest(order) for order in orders}) == 1
    if seed is None:
        assert orders[0] == list(range(2998))


def test_the_order_is_the_documented_one(folder):
    dataset = read_files(folder, window_rows=150)
    (shard,) = shards(dataset, 1)
    got = [id for batch in shard.iter_batches(batch_size=100, shuffle_seed=5) for id in batch["id"].tolist()]

    def drawn(length, *seeds):
        return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seeds))).permutation(length)

    starts = np.cumsum([0, *dataset.unit_rows])
    lanes = [[] for _ in range(8)]
    for unit in drawn(len(dataset.unit_rows), 5, 0, 0):
        min(lanes, key=len).extend(range(starts[unit], starts[unit + 1]))
    for lane, rows in enumerate(lanes):
        begin, shuffled = 0, []
        for number in range(len(rows)):
            window = rows[begin : begin + (-(-150 * (lane + 1) // 8) if number == 0 else 150)]
            begin += len(window)
            shuffled += [window[place] for place in drawn(len(window), 5, 0, 1, lane, number)]
        lanes[lane] = shuffled
    expected = []
    for place in range(max(map(len, lanes))):
        expected += [rows[place] for rows in lanes if place < len(rows)]
    assert got == expected


def test_another_seed_or_epoch_is_another_order(folder):
    dataset = read_files(folder)
    (shard,) = shards(dataset, 1)
    seen = set()
    for seed in (1, 2):
        shard.set_epoch(0)
        for epoch in range(2):
            assert shard.epoch == epoch
            seen.add(digest(global_order(batches_of([shard], 500, shuffle_seed=seed))))
    assert len(seen) == 4
    shard.set_epoch(1)
    assert digest(global_order(batches_of([shard], 500, shuffle_seed=2))) in seen


@pytest.fixture
def train_on(cluster, folder, tmp_path):
    """Trains on the files for two epochs with real ranks; answers with the ids of each step by rank, and what was printed."""

    def train_on(ranks, *, killed_at=0, stopped_at=0, out=None):
        out = tmp_path / (out or f"of-{ranks}")
        out.mkdir(exist_ok=True)
        arguments = [folder, ranks, 3, killed_at, stopped_at, out]
        done = subprocess.run(
            [sys.executable, PROGRAMS / "streams.py", *map(str, arguments)],
            env=cluster, capture_output=True, text=True, timeout=DEADLINE_SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        steps = {}
        for path in sorted(out.glob("???-*")):
            steps.setdefault(int(path.name[:3]), []).append(json.loads(path.read_text()))
        return [steps[number] for number in sorted(steps)], done.stdout

    return train_on


@pytest.fixture(scope="module")
def two_epochs(folder):
    """The hash of the order of two epochs, by one rank in this process."""
    (shard,) = shards(read_files(folder), 1)
    return digest([id for _ in range(2) for id in global_order(batches_of([shard], 60, shuffle_seed=3))])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_real_ranks_read_in_the_same_order(train_on, two_epochs, ranks):
    steps, _ = train_on(ranks)
    assert {len(step) for step in steps} == {ranks}
    assert digest(global_order(steps)) == two_epochs


def test_after_a_kill_the_order_goes_on_from_the_checkpoint(train_on, two_epochs):
    steps, printed = train_on(2, killed_at=7)
    assert printed.count("goes on at {'epoch': 0, 'rows': 300") == 2
    assert digest(global_order(steps)) == two_epochs


def test_a_run_goes_on_in_the_middle_of_an_epoch_with_another_number_of_ranks(train_on, two_epochs):
    first, _ = train_on(4, stopped_at=15, out="moved")
    then, printed = train_on("1:2", stopped_at=0, out="moved")
    assert "goes on at {'epoch': 0, 'rows': 900" in printed
    assert [len(step) for step in first] == [4] * 15
    assert [len(step) for step in then[15:]] == [2] * (len(then) - 15)
    assert digest(global_order(first) + global_order(then[15:])) == two_epochs
