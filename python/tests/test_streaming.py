"""Datasets in files: which rows ranks read, in which order, and what is refused."""

import dataclasses
import datetime
import gc
import hashlib
import json
import os
import subprocess
import sys
import time
import weakref
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from conftest import DEADLINE_SECONDS

from wingbeat.torch import TorchDistributor
from wingbeat.train import (
    DatasetError,
    MissingColumnError,
    ScalingConfig,
    SchemaMismatchError,
    StreamingShard,
    TooFewRowsError,
    TorchTrainer,
    UnreadableFileError,
    read_files,
)

PROGRAMS = Path(__file__).parent / "programs"


def write_parquet(folder, rows_of_files, group=100):
    """Files `0.parquet` and so on of these numbers of rows, with an `id` that counts through all of them."""
    folder.mkdir(exist_ok=True)
    first = 0
    for number, rows in enumerate(rows_of_files):
        ids = np.arange(first, first + rows)
        table = pa.table({"id": ids, "x": ids * 0.5, "name": pa.array([f"row {one}" for one in ids], pa.string())})
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


@pytest.mark.parametrize("rows, ranks, size, drops", [
    (100, 4, 5, False), (101, 4, 5, False), (103, 4, 5, False), (99, 4, 5, False), (4, 4, 8, False), (83, 2, 40, False),
    (100, 4, 7, True), (30, 4, 8, True), (103, 3, 5, False),
])
@pytest.mark.filterwarnings("ignore:epoch 0 has no batch")
def test_all_ranks_take_as_many_steps(tmp_path, rows, ranks, size, drops):
    dataset = read_files(write_parquet(tmp_path / "data", [rows], group=16), window_rows=10)
    steps = batches_of(shards(dataset, ranks), size, shuffle_seed=1, drop_last=drops)
    had = [id for step in steps for ids in step for id in ids]
    assert len(set(had)) == len(had)
    if drops:
        assert all(len(ids) == size for step in steps for ids in step) and len(steps) == rows // (size * ranks)
    else:
        assert sorted(had) == list(range(rows))
        assert all(0 < len(ids) <= size + 1 for step in steps for ids in step)


def test_an_epoch_goes_on_from_any_step_with_any_number_of_ranks(folder):
    dataset = read_files(folder, window_rows=70)
    whole = global_order(batches_of(shards(dataset, 1), 64, shuffle_seed=9))
    for before, after in [(1, 4), (4, 1), (2, 3), (3, 2)]:
        for stop in (1, 7, 11):
            first = shards(dataset, before)
            going = [shard.iter_batches(batch_size=60 // before, shuffle_seed=9) for shard in first]
            steps = [[next(one)["id"].tolist() for one in going] for _ in range(stop)]
            (state,) = {json.dumps(shard.state_dict()) for shard in first}
            assert json.loads(state)["rows"] == 60 * stop and len(state) < 200
            second = shards(dataset, after)
            for shard in second:
                shard.load_state_dict(json.loads(state))
            assert global_order(steps) + global_order(batches_of(second, 25, shuffle_seed=9)) == whole
            assert {shard.epoch for shard in second} == {1}


def test_after_the_last_batch_of_an_epoch_the_state_is_the_beginning_of_the_next(folder):
    (shard,) = shards(read_files(folder), 1)
    for batch in shard.iter_batches(batch_size=1000):
        state = shard.state_dict()
    assert (state["epoch"], state["rows"]) == (1, 0)


def test_each_iteration_is_an_epoch_also_after_one_that_was_left(folder):
    (shard,) = shards(read_files(folder), 1)
    assert next(shard.iter_batches())["id"][0] == 0 and shard.epoch == 1
    assert [batch["id"][0] for batch in shard.iter_batches(batch_size=2998)] == [0] and shard.epoch == 2


def test_epochs_are_counted_where_each_is_left_early(folder):
    (shard,) = shards(read_files(folder), 1)
    begun = []
    while shard.epoch < 3:
        for number, batch in enumerate(shard.iter_batches(batch_size=10, shuffle_seed=1)):
            begun.append(shard.epoch)
            if number == 2:
                break
    assert begun == [0] * 3 + [1] * 3 + [2] * 3
    shard.set_epoch(shard.epoch)
    assert (shard.state_dict()["epoch"], shard.state_dict()["rows"]) == (3, 0)


def test_a_table_is_shuffled_by_a_seed_as_files_are():
    from wingbeat.train._dataset import DatasetShard

    def orders(seed):
        shard = DatasetShard(pa.table({"id": range(20)}))
        return [[id for batch in shard.iter_torch_batches(batch_size=8, shuffle_seed=seed) for id in batch["id"].tolist()] for _ in range(2)]

    assert orders(None) == [list(range(20))] * 2
    first, second = orders(1)
    assert sorted(first) == list(range(20)) and first != second != list(range(20)) and orders(1) == [first, second] != orders(2)


@pytest.mark.parametrize("seed", [None, 4])
def test_small_row_groups_are_read_together_and_their_rows_are_those_of_each(tmp_path, monkeypatch, seed):
    from wingbeat.train import _lane

    folder = write_parquet(tmp_path / "data", [1000, 30, 1010], group=10)
    pq.write_table(pq.read_table(folder / "1.parquet").slice(0, 0), folder / "1a.parquet")
    pyarrow.feather.write_feather(pq.read_table(folder / "1.parquet"), str(folder / "1b.arrow"), compression="uncompressed")
    dataset, read, pieces_of = read_files(folder, lanes=2 if seed else 1), [], _lane.pieces_of

    def noted(files, file, numbers, *arguments, **more):
        read.append((file.path, tuple(numbers)))
        return pieces_of(files, file, numbers, *arguments, **more)

    monkeypatch.setattr(_lane, "pieces_of", noted)

    def order(rows=0):
        (shard,) = shards(dataset, 1)
        shard.load_state_dict({"epoch": 0, "rows": rows})
        return global_order(batches_of([shard], 64, shuffle_seed=seed))

    together = order()
    units = sum(rows > 0 for rows in dataset.unit_rows)
    had = [(path, number) for path, numbers in read for number in numbers]
    assert len(had) == len(set(had)) == units > 204 and len(read) < units - 50
    assert [order(rows) for rows in (5, 10, 995, 1000, 1500)] == [together[rows:] for rows in (5, 10, 995, 1000, 1500)]
    monkeypatch.setattr(_lane, "_IN_A_LANE", 0)
    read.clear()
    assert order() == together and len(read) == units
    many = dataclasses.replace(dataset, piece_rows=100)  # at most five together
    monkeypatch.undo()
    (shard,) = shards(many, 1)
    assert global_order(batches_of([shard], 64, shuffle_seed=seed)) == together


def test_rows_that_were_had_are_not_read_again(tmp_path):
    folder = write_parquet(tmp_path / "data", [100, 100, 100])
    dataset = read_files(folder)
    (shard,) = shards(dataset, 1)
    shard.load_state_dict({"epoch": 0, "rows": 200})
    for name in ("0", "1"):
        (folder / f"{name}.parquet").unlink()
    assert [id for batch in shard.iter_batches(batch_size=30) for id in batch["id"].tolist()] == list(range(200, 300))
    shard.set_epoch(0)
    with pytest.raises(UnreadableFileError, match="0.parquet.*all nodes share"):
        next(shard.iter_batches())


def test_fewer_rows_than_ranks_that_are_left_are_refused_before_any_is_left_out(tmp_path):
    dataset = read_files(write_parquet(tmp_path / "data", [102]))
    each = shards(dataset, 4)
    for shard in each:
        shard.load_state_dict({"epoch": 0, "rows": 100})
        for iterate in (shard.iter_batches, shard.iter_torch_batches):
            with pytest.raises(TooFewRowsError, match="2 of the dataset's 102 rows are left of epoch 0, .*4 ranks.*go on with 2 ranks"):
                iterate(batch_size=10)
        assert shard.state_dict() == {"epoch": 0, "rows": 100}
    fewer = shards(dataset, 2)
    for shard in fewer:
        shard.load_state_dict(each[0].state_dict())
    assert batches_of(fewer, 10) == [([100], [101])]
    assert batches_of(each, 10, drop_last=True) == [] and {shard.epoch for shard in each} == {1}
    assert len(global_order(batches_of(each, 10))) == 102


def test_each_row_is_read_once_or_refused_wherever_an_epoch_stops_and_with_whatever_number_of_ranks_it_goes_on(tmp_path):
    dataset = read_files(write_parquet(tmp_path / "data", [23], group=5), window_rows=4)
    refused = 0
    for before, size in [(1, 3), (2, 1), (3, 2), (5, 1), (4, 3)]:
        for stop in range(1, 23 // (before * size) + 1):
            first = shards(dataset, before)
            going = [shard.iter_batches(batch_size=size, shuffle_seed=2) for shard in first]
            had = [id for _ in range(stop) for one in going for id in next(one)["id"].tolist()]
            (state,) = {json.dumps(shard.state_dict()) for shard in first}
            for after in (1, 2, 4, 7, 23):
                second = shards(dataset, after)
                for shard in second:
                    shard.load_state_dict(json.loads(state))
                is_over = second[0].epoch == 1
                try:
                    rest = global_order(batches_of(second, 2, shuffle_seed=2))
                except TooFewRowsError:
                    assert 0 < 23 - len(had) < after
                    refused += 1
                    continue
                assert sorted(rest if is_over else had + rest) == list(range(23))
    assert refused > 10


def test_fewer_rows_than_ranks_that_are_left_go_to_the_first_ranks_of_an_iteration_over_rows(tmp_path):
    each = shards(read_files(write_parquet(tmp_path / "data", [102])), 4)
    for shard in each:
        shard.load_state_dict({"epoch": 0, "rows": 100})
    assert [[row["id"] for row in shard.iter_rows()] for shard in each] == [[100], [101], [], []]
    assert {(shard.epoch, shard.state_dict()["rows"]) for shard in each} == {(1, 0)}
    assert [len(list(shard.iter_rows())) for shard in each] == [26, 26, 25, 25]


def test_a_state_of_another_seed_or_dataset_is_refused(folder, tmp_path):
    (shard,) = shards(read_files(folder), 1)
    next(shard.iter_batches(shuffle_seed=1))
    state = shard.state_dict()
    shard.load_state_dict(state)
    with pytest.raises(ValueError, match="taken with shuffle_seed=1, and this iteration has shuffle_seed=2"):
        shard.iter_batches(shuffle_seed=2)
    (other,) = shards(read_files(write_parquet(tmp_path / "other", [5])), 1)
    with pytest.raises(ValueError, match="2998 rows, and this one has 5"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="has an epoch and rows"):
        other.load_state_dict({"step": 1})


ROWS = 700


@pytest.fixture(scope="module")
def of_all_kinds():
    """A table with columns of many types, with and without nulls."""
    ids = list(range(ROWS))
    return pa.table({
        "id": ids,
        "small": pa.array([one % 100 for one in ids], pa.int8()),
        "flag": [one % 3 == 0 for one in ids],
        "maybe": [None if one % 5 == 0 else one * 0.5 for one in ids],
        "text": [None if one % 7 == 0 else f"text {one}" * (one % 4) for one in ids],
        "class": pa.array([f"class {one // 100}" for one in ids]).dictionary_encode(),
        "day": [datetime.date(2026, 1, 1) + datetime.timedelta(one) for one in ids],
        "when": pa.array([one * 1000 for one in ids], pa.timestamp("us")),
        "image": pa.array([[one, one + 1, one + 2] for one in ids], pa.list_(pa.float32(), 3)),
        "list": [[one] * 4 for one in ids],
        "ragged": [[one] * (one % 3) for one in ids],
        "nested": [{"a": one, "b": str(one)} for one in ids],
        "price": pa.array([Decimal(one) / 4 for one in ids], pa.decimal128(12, 2)),
    })


@pytest.mark.parametrize("written", ["parquet", "arrow", "compressed", "feather"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_are_what_was_written(of_all_kinds, tmp_path, written, ranks):
    for number in range(2):
        part = of_all_kinds.slice(number * 300, 300 if number == 0 else None)
        if written == "parquet":
            pq.write_table(part, tmp_path / f"{number}.parquet", row_group_size=64)
        elif written == "feather":
            pyarrow.feather.write_feather(part, tmp_path / f"{number}", chunksize=64)  # without an ending
        else:
            options = pa.ipc.IpcWriteOptions(compression="zstd" if written == "compressed" else None)
            with pa.ipc.new_file(tmp_path / f"{number}.arrow", part.schema, options=options) as out:
                out.write_table(part, max_chunksize=64)
    expected = of_all_kinds.to_pylist()
    dataset = read_files([tmp_path / path.name for path in sorted(tmp_path.iterdir())], window_rows=50)
    for seed in (None, 1):
        had = [row for shard in shards(dataset, ranks) for row in shard.iter_rows(shuffle_seed=seed)]
        assert sorted(had, key=lambda row: row["id"]) == expected


def test_batches_are_arrays_tensors_pandas_or_arrow(of_all_kinds, tmp_path):
    import torch

    pq.write_table(of_all_kinds, tmp_path / "rows.parquet", row_group_size=100)
    (shard,) = shards(read_files(tmp_path / "rows.parquet", columns=["image", "id", "text"]), 1)
    arrays = next(shard.iter_batches(batch_size=10))
    assert list(arrays) == ["image", "id", "text"] and arrays["image"].shape == (10, 3)
    assert arrays["image"].dtype == np.float32
    assert next(shard.iter_batches(batch_size=10, batch_format="pandas"))["text"][1] == "text 1"
    assert next(shard.iter_batches(batch_size=10, batch_format="pyarrow")).num_rows == 10
    with pytest.raises(TypeError, match="'text' cannot be a tensor.*collate_fn"):
        next(shard.iter_torch_batches())
    (shard,) = shards(read_files(tmp_path, columns=["image", "id"]), 1)
    batch = next(shard.iter_torch_batches(batch_size=10, dtypes={"id": torch.float64}))
    assert (batch["image"].shape, batch["id"].dtype) == ((10, 3), torch.float64)
    batch["image"] += 1
    with pytest.raises(KeyError, match="dtypes has 'idd', and the columns are 'image', 'id'"):
        next(shard.iter_torch_batches(dtypes={"idd": torch.float64}))
    with pytest.raises(ValueError, match="give no dtypes and no device with it"):
        shard.iter_torch_batches(collate_fn=dict, dtypes=torch.float32)
    with pytest.raises(NotImplementedError, match="use shuffle_seed="):
        shard.iter_batches(local_shuffle_buffer_size=10)


def test_a_partitioned_folder_and_a_pyarrow_dataset_have_their_columns(tmp_path):
    table = pa.table({"id": range(40), "year": [2020 + one // 20 for one in range(40)]})
    pa.dataset.write_dataset(table, tmp_path / "data", format="parquet", partitioning=["year"], partitioning_flavor="hive")
    (tmp_path / "data" / "_SUCCESS").touch()
    for given in (tmp_path / "data", pa.dataset.dataset(tmp_path / "data", partitioning="hive"), f"file://{tmp_path}/data"):
        rows = list(shards(read_files(given), 1)[0].iter_rows())
        assert rows == table.to_pylist()
    with pytest.raises(TypeError, match="not in files"):
        read_files(pa.dataset.dataset(table))
    with pytest.raises(TypeError, match="filter"):
        read_files(pa.dataset.dataset(tmp_path / "data", partitioning="hive").filter(pa.dataset.field("id") > 3))


def test_files_may_differ_in_what_says_nothing_of_their_values(tmp_path):
    strict = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("x", pa.list_(pa.field("element", pa.int64())))])
    loose = pa.schema([pa.field("x", pa.list_(pa.field("item", pa.int64()))), pa.field("id", pa.int64())], metadata={"by": "another"})
    pq.write_table(pa.table({"id": [0, 1], "x": [[1], [2]]}, schema=strict), tmp_path / "0.parquet")
    with pa.ipc.new_file(tmp_path / "1.arrow", loose) as out:
        out.write_table(pa.table({"x": [[3], None], "id": [2, None]}, schema=loose))
    (batch,) = shards(read_files(tmp_path), 1)[0].iter_batches(batch_size=4, batch_format="pyarrow")
    assert batch.to_pydict() == {"id": [0, 1, 2, None], "x": [[1], [2], [3], None]}
    assert len(list(shards(read_files(tmp_path), 1)[0].iter_rows(shuffle_seed=1))) == 4


def test_files_of_another_file_system_are_read(of_all_kinds):
    import fsspec.implementations.memory

    memory = pa.fs.PyFileSystem(pa.fs.FSSpecHandler(fsspec.implementations.memory.MemoryFileSystem()))
    memory.create_dir("bucket/rows")
    pq.write_table(of_all_kinds, "bucket/rows/a.parquet", filesystem=memory, row_group_size=100)
    with memory.open_output_stream("bucket/rows/b.arrow") as out, pa.ipc.new_file(out, of_all_kinds.schema) as file:
        file.write_table(of_all_kinds, max_chunksize=100)
    dataset = read_files("bucket/rows", filesystem=memory, window_rows=30)
    had = [row for shard in shards(dataset, 2) for row in shard.iter_rows(shuffle_seed=1)]
    assert sorted(had, key=lambda row: row["id"])[::2] == of_all_kinds.to_pylist()


def test_urls_that_fsspec_alone_opens_are_read(tmp_path):
    import fsspec

    pq.write_table(pa.table({"id": range(10)}), tmp_path / "rows.parquet")
    fsspec.filesystem("memory").pipe("streams/rows.parquet", (tmp_path / "rows.parquet").read_bytes())
    for url in ("memory://streams/rows.parquet", "memory://streams"):
        assert [row["id"] for row in shards(read_files(url), 1)[0].iter_rows()] == list(range(10))
    with pytest.raises(UnreadableFileError, match="nowhere://rows cannot be read: pyarrow: .* fsspec: "):
        read_files("nowhere://rows")


def test_what_is_wrong_with_files_is_said_before_training(tmp_path):
    good = write_parquet(tmp_path / "good", [10])

    def fails(error, match, given, **options):
        with pytest.raises(error, match=match):
            read_files(given, **options)

    fails(UnreadableFileError, "absent.parquet cannot be read: there is no such file", tmp_path / "absent.parquet")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.parquet").write_bytes((good / "0.parquet").read_bytes()[:-20])
    fails(UnreadableFileError, "broken/a.parquet cannot be read", tmp_path / "broken")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "notes").write_text("neither")
    fails(UnreadableFileError, "text/notes cannot be read: it is neither Parquet nor Arrow IPC", tmp_path / "text")
    (tmp_path / "empty").mkdir()
    fails(TooFewRowsError, "the folder .*/empty has no files", tmp_path / "empty")
    fails(TooFewRowsError, "has no rows: .*0.parquet", write_parquet(tmp_path / "none", [0, 0]))
    fails(MissingColumnError, "no column 'nmae'; did you mean 'name'", good, columns=["id", "nmae"])
    pq.write_table(pa.table({"id": ["1"], "x": [0.5], "name": ["a"]}), good / "1.parquet")
    fails(SchemaMismatchError, "'id' is int64 in .*0.parquet, and string in .*1.parquet", good)
    assert read_files(good, columns=["x"]).num_rows == 11
    pq.write_table(pa.table({"id": [1], "name": ["a"]}), good / "1.parquet")
    fails(SchemaMismatchError, "'x' is double in .*0.parquet, and missing in .*1.parquet", good)
    fails(ValueError, "lanes must be a positive integer", good, lanes=0)
    fails(TypeError, r"columns must be a list of names, not 'id': give \['id'\]", good, columns="id")
    fails(ValueError, "columns must be names, each once", good, columns=["id", "id"])
    fails(ValueError, "columns must be names, each once", good, columns=[])
    fails(TypeError, "paths must be a path", [])


def test_a_pattern_and_a_table_in_place_of_paths_are_named(tmp_path):
    pandas = pytest.importorskip("pandas")
    write_parquet(tmp_path / "data", [5])
    with pytest.raises(UnreadableFileError, match=r"\*\.parquet cannot be read: .*patterns are not expanded: give glob.glob"):
        read_files(tmp_path / "data" / "*.parquet")
    for table in (pandas.DataFrame({"id": [1]}), pa.table({"id": [1]})):
        with pytest.raises(TypeError, match="is in memory, and read_files takes paths: give it to the trainer"):
            read_files(table)


def test_links_are_followed_once_and_a_link_to_nothing_is_named(tmp_path):
    folder = write_parquet(tmp_path / "data", [10, 5])
    (tmp_path / "more").mkdir()
    (folder / "0.parquet").rename(tmp_path / "more/0.parquet")
    (folder / "linked").symlink_to(tmp_path / "more")
    (folder / "same").symlink_to(tmp_path / "more")
    (folder / "again.parquet").symlink_to(folder / "1.parquet")
    (tmp_path / "more/loop").symlink_to(folder)
    (folder / "_hidden").symlink_to("nowhere")
    dataset = read_files(folder)
    assert dataset.num_rows == 15 and repr(dataset) == "FileDataset(2 files, 15 rows, columns ['id', 'x', 'name'])"
    (folder / "b.parquet").symlink_to("nowhere")
    with pytest.raises(UnreadableFileError, match="b.parquet cannot be read: it is a link to nothing"):
        read_files(folder)


def test_a_trainer_says_so_too_and_starts_nothing(tmp_path):
    folder = write_parquet(tmp_path / "data", [3])
    with pytest.raises(TooFewRowsError, match="'train' has 3 rows, and there are 4 ranks"):
        TorchTrainer(print, scaling_config=ScalingConfig(num_workers=4), datasets={"train": folder}).fit()
    with pytest.raises(UnreadableFileError, match="no such file"):
        TorchTrainer(print, datasets={"train": str(tmp_path / "no.parquet")}).fit()
    with pytest.raises(TooFewRowsError, match="3 rows, and there are 4 ranks"):
        TorchDistributor(4, use_gpu=False).run_on_dataframe(print, folder)
    with pytest.raises(TooFewRowsError, match="'train' has 1 rows, and there are 2 ranks"):
        TorchTrainer(print, scaling_config=ScalingConfig(num_workers=2), datasets={"train": pa.table({"a": [1]})}).fit()
    with pytest.raises(NotImplementedError, match="a dataset in memory with .min, max. workers"):
        TorchTrainer(print, scaling_config=ScalingConfig(num_workers=(1, 2)), datasets={"train": pa.table({"a": [1]})})


def test_a_distributor_s_ranks_read_files(cluster, monkeypatch, folder):
    for name, value in cluster.items():
        monkeypatch.setenv(name, value)

    def main():
        from wingbeat.train import get_dataset_shard

        return [batch["id"].tolist() for batch in get_dataset_shard("train").iter_batches(batch_size=50, shuffle_seed=1)]

    each = TorchDistributor(2, local_mode=False, use_gpu=False).run_on_dataframe(main, folder, return_all=True)
    assert list(zip(*each)) == batches_of(shards(read_files(folder), 2), 50, shuffle_seed=1)


def test_a_damaged_row_group_is_an_error_of_the_rank_that_names_the_file(tmp_path):
    folder = write_parquet(tmp_path / "data", [2000], group=500)
    data = bytearray((folder / "0.parquet").read_bytes())
    begin = pq.ParquetFile(folder / "0.parquet").metadata.row_group(2).column(0).data_page_offset
    data[begin : begin + 300] = b"\xff" * 300
    (folder / "0.parquet").write_bytes(data)
    with pytest.raises(UnreadableFileError, match="0.parquet cannot be read: (?!it has changed)"):
        list(shards(read_files(folder), 1)[0].iter_batches())


@pytest.mark.parametrize("rows, group", [([1500, 1000], 150), ([500, 1000], 50), ([1000, 1000], 100), ([100, 1000], 100)])
@pytest.mark.parametrize("kind", ["parquet", "arrow", "memory"])
def test_a_file_that_changes_after_it_was_looked_into_is_named(tmp_path, rows, group, kind):
    import fsspec.implementations.memory

    memory = pa.fs.PyFileSystem(pa.fs.FSSpecHandler(fsspec.implementations.memory.MemoryFileSystem()))
    filesystem = memory if kind == "memory" else pa.fs.LocalFileSystem()
    root = "changing" if kind == "memory" else str(tmp_path)
    filesystem.create_dir(root)

    def write(number, rows, group, first):
        table = pa.table({"id": range(first, first + rows)})
        path = f"{root}/{number}.{'arrow' if kind == 'arrow' else 'parquet'}"
        with filesystem.open_output_stream(path) as out:
            if kind == "arrow":
                with pa.ipc.new_file(out, table.schema) as file:
                    file.write_table(table, max_chunksize=group)
            else:
                pq.write_table(table, out, row_group_size=group)
        return path

    paths = [write(number, 1000, 100, 1000 * number) for number in range(2)]
    dataset = read_files(paths, filesystem=filesystem)
    write(0, rows[0], group, 9000)
    if kind == "memory" and rows[0] == 1000:
        return  # of the same size, which is all that is known of it
    with pytest.raises(UnreadableFileError, match="0[.](parquet|arrow) cannot be read: it has changed since it was looked into"):
        list(shards(dataset, 1)[0].iter_batches())


def test_a_state_of_other_row_groups_or_files_is_refused(tmp_path):
    (shard,) = shards(read_files(write_parquet(tmp_path / "data", [1000])), 1)
    next(shard.iter_batches(shuffle_seed=1))
    state = json.loads(json.dumps(shard.state_dict()))
    (moved,) = shards(read_files(write_parquet(tmp_path / "moved", [1000])), 1)
    moved.load_state_dict(state)
    assert next(moved.iter_batches(shuffle_seed=1)) is not None
    for other in (write_parquet(tmp_path / "grouped", [1000], group=250), write_parquet(tmp_path / "split", [500, 500])):
        with pytest.raises(ValueError, match="taken with other files"):
            shards(read_files(other), 1)[0].load_state_dict(state)


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_state_counts_each_row_of_an_iteration_over_rows(folder, ranks):
    dataset = read_files(folder, window_rows=70)
    (whole,) = shards(dataset, 1)
    for seed, stop in [(None, 10), (3, 500), (3, 2998 // ranks)]:
        whole.set_epoch(0)
        expected = [row["id"] for row in whole.iter_rows(shuffle_seed=seed)]
        had, states = [], set()
        for shard in shards(dataset, ranks):
            rows = shard.iter_rows(shuffle_seed=seed)
            had += [next(rows)["id"] for _ in range(stop)]
            states.add(json.dumps(shard.state_dict()))
        state = json.loads(min(states))
        assert set(had) == set(expected[: stop * ranks])
        if stop == 2998 // ranks:
            continue
        assert len(states) == 1 and state["rows"] == stop * ranks
        (rest,) = shards(dataset, 1)
        rest.load_state_dict(state)
        assert [row["id"] for row in rest.iter_rows(shuffle_seed=seed)] == expected[stop * ranks :]


def test_the_epoch_is_that_of_the_batch_also_in_the_last_one(folder):
    (shard,) = shards(read_files(folder), 1)
    assert [shard.epoch for _ in shard.iter_batches(batch_size=1000)] == [0, 0, 0] and shard.epoch == 1
    first, second = (shard.iter_batches(batch_size=2998, shuffle_seed=1) for _ in range(2))
    assert next(first)["id"].tolist() != next(second)["id"].tolist()


def test_an_epoch_without_a_batch_is_named(folder):
    each = shards(read_files(folder), 2)
    with pytest.warns(RuntimeWarning, match="epoch 0 has no batch: its 2998 rows do not fill one of 1500 rows on each of the 2"):
        assert batches_of(each, 1500, drop_last=True) == []


def test_parts_of_files_and_the_schema_of_a_pyarrow_dataset_are_its_own(tmp_path):
    folder = write_parquet(tmp_path / "data", [1000, 300])
    whole = pa.dataset.dataset(folder)
    fragments = [part for fragment in whole.get_fragments() for part in fragment.split_by_row_group()]
    chosen = [fragments[number] for number in (1, 4, 11)]
    part = pa.dataset.FileSystemDataset(chosen, whole.schema, whole.format, whole.filesystem)
    dataset = read_files(part)
    assert dataset.num_rows == part.to_table().num_rows == 300
    assert [row["id"] for row in shards(dataset, 1)[0].iter_rows()] == part.to_table()["id"].to_pylist()
    cast = pa.dataset.dataset(folder, schema=pa.schema([("x", pa.float32()), ("id", pa.int32())]))
    (batch,) = shards(read_files(cast), 1)[0].iter_batches(batch_size=2000, batch_format="pyarrow")
    assert batch.combine_chunks().equals(cast.to_table().combine_chunks())
    with pytest.raises(MissingColumnError, match="no column 'more'"):
        read_files(pa.dataset.dataset(folder, schema=pa.schema([("id", pa.int64()), ("more", pa.int64())])))
    with pytest.raises(DatasetError, match="cannot be those of the pyarrow Dataset's schema"):
        read_files(pa.dataset.dataset(folder, schema=pa.schema([("id", pa.list_(pa.int64()))])))


def test_nulls_in_dictionaries_stay_nulls(tmp_path):
    from wingbeat.train._dataset import DatasetShard

    values = ["cat", None, "dog", "cat"]
    table = pa.table({"pet": pa.array(values).dictionary_encode(), "size": pa.array([1, None, 3, 1]).dictionary_encode()})
    with pa.ipc.new_file(tmp_path / "pets.arrow", table.schema) as out:
        out.write_table(table)
    for shard in (DatasetShard(table), *shards(read_files(tmp_path / "pets.arrow"), 1)):
        (batch,) = shard.iter_batches()
        assert batch["pet"].tolist() == values
        assert np.isnan(batch["size"][1]) and batch["size"][[0, 2, 3]].tolist() == [1, 3, 1]


def test_a_program_may_end_in_the_middle_of_an_iteration(folder, environment, write):
    program = write("leaves.py", """
        import sys
        from wingbeat.train import StreamingShard, read_files

        batches = StreamingShard(read_files(sys.argv[1])).iter_batches(batch_size=10, prefetch_batches=2)
        print(next(batches)["id"][0])
    """)
    # In one of five, reading was caught by the end of the interpreter.
    command, pipe = [sys.executable, program, folder], subprocess.PIPE
    programs = [subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) for _ in range(8)]
    try:
        for each in programs:
            said = each.communicate(timeout=DEADLINE_SECONDS)
            assert (each.returncode, *said) == (0, "0\n", "")
    finally:
        for each in programs:
            each.kill()
            each.wait()


@pytest.mark.parametrize("prefetch", [0, 1])
def test_the_next_rows_are_read_while_a_batch_is_in_use(tmp_path, monkeypatch, prefetch):
    import threading

    from wingbeat.train import _lane

    pq.write_table(pa.table({"id": range(4000)}), tmp_path / "rows.parquet", row_group_size=100)
    begun, pieces_of = [threading.Event() for _ in range(40)], _lane.pieces_of

    def noted(files, file, numbers, *arguments, **more):
        for number in numbers:
            begun[number].set()
        return pieces_of(files, file, numbers, *arguments, **more)

    monkeypatch.setattr(_lane, "pieces_of", noted)
    monkeypatch.setattr(_lane, "_IN_A_LANE", 0)  # a row group at a time
    (shard,) = shards(read_files(tmp_path / "rows.parquet", lanes=1, window_rows=100), 1)
    batches = shard.iter_batches(batch_size=100, shuffle_seed=1, prefetch_batches=prefetch)
    seen = len(set(next(batches)["id"] // 100))
    assert seen == 1, "a window is a row group"
    for count in range(2, 6):
        until = time.monotonic() + DEADLINE_SECONDS
        while sum(one.is_set() for one in begun) < count:  # without asking for more
            assert time.monotonic() < until, "nothing is read ahead"
            os.sched_yield()
        next(batches)
    assert sum(one.is_set() for one in begun) < 40
    batches.close()


def test_memory_is_bounded_by_lanes_and_windows_and_not_by_the_rows(tmp_path, environment, write):
    table = pa.table({f"x{number}": np.random.default_rng(number).random(500_000) for number in range(30)})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=10_000, compression="none", use_dictionary=False)
    del table
    program = write("reads.py", """
        import json
        import sys
        import pyarrow.parquet
        from wingbeat.train import StreamingShard, read_files

        def most():
            return next(int(line.split()[1]) >> 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))

        peaks, pool = [], pyarrow.default_memory_pool()
        for times in (2, 8):
            dataset, rows = read_files([sys.argv[1]] * times, window_rows=4096), 0
            for batch in StreamingShard(dataset).iter_batches(batch_size=1000, shuffle_seed=1):
                rows += len(batch["x0"])
            assert rows == times * 500_000
            peaks.append([pool.max_memory() >> 20, most()])
        print(json.dumps([dataset.lanes_with(1) * dataset.lane_bytes >> 20, *peaks]))
    """)
    done = subprocess.run(
        [sys.executable, program, tmp_path / "rows.parquet"], env=environment, capture_output=True, text=True, timeout=DEADLINE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    said, (allocated, resident), (allocated_then, resident_then) = json.loads(done.stdout)
    # What pyarrow has allocated is about what the dataset says, and the same for 916 MiB of rows as for 229.
    assert said < 100 and allocated < 1.5 * said and allocated_then < 1.25 * allocated, done.stdout
    # Whatever allocators keep of what was freed, the process does not hold the other rows.
    assert resident_then < resident + 687 / 2, done.stdout


def test_open_files_hold_no_rows_and_wide_row_groups_are_read_in_parts(tmp_path, monkeypatch):
    from wingbeat._files import _reading
    from wingbeat._files._contents import DataFile, inspect

    table = pa.table({"id": range(20_000), **{f"x{number}": np.random.default_rng(number).random(20_000) for number in range(9)}})
    table = table.append_column("name", pa.array([{"first": "a", "last": str(one)} for one in range(20_000)]))
    local = pa.fs.LocalFileSystem()
    memory = pa.fs.SubTreeFileSystem("/", local)  # is read as one elsewhere
    monkeypatch.setattr(_reading, "_TOGETHER_BYTES", 300_000)
    for filesystem in (local, memory):
        files, before = _reading.OpenFiles(filesystem), pa.total_allocated_bytes()
        for number in range(3):
            path = str(tmp_path / f"{number}.parquet")
            pq.write_table(table, path, row_group_size=10_000)
            about = inspect(filesystem, path)
            file = DataFile(path, about.kind, about.unit_rows, size=about.size, modified_ns=about.modified_ns)
            for unit in range(2):
                (read,) = _reading.rows_of(files, file, unit, table.schema, piece_rows=10_000)
                assert read.equals(table.slice(10_000 * unit, 10_000))
                del read
        until = time.monotonic() + DEADLINE_SECONDS
        while pa.total_allocated_bytes() - before > 200_000:  # a thread of pyarrow may be about to let go of what it has read
            assert time.monotonic() < until
            time.sleep(0.01)


def test_memory_is_used_again_once_no_array_over_it_is_left():
    from wingbeat.train._gather import Memory

    memory = Memory(1 << 20)
    like = [np.empty((1, 3), np.float32), None, np.empty(1, np.int64)]
    made = memory.columns(1000, like)
    assert [None if one is None else (one.shape, one.dtype) for one in made] == [((1000, 3), np.float32), None, ((1000,), np.int64)]
    place = made[0].ctypes.data
    kept = made[2][10:20].reshape(2, 5)[1:]
    kept[:] = 7
    del made
    other = memory.columns(1000, like)
    assert other[0].ctypes.data != place
    other[2][:] = 8
    assert kept.tolist() == [[7] * 5]
    del kept
    again = memory.columns(1000, like)
    assert again[0].ctypes.data == place and memory.columns(0, like)[0].shape == (0, 3)


@pytest.mark.parametrize("lanes, window, ranks, size", [(1, 7, 1, 5), (3, 30, 2, 64), (8, 100, 3, 1000), (2, 1, 4, 1), (8, 13, 1, 300)])
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_shuffled_rows_of_all_shapes_have_their_own_values(tmp_path, kind, lanes, window, ranks, size):
    for number, (begin, end, group) in enumerate([(0, 400, 50), (400, 407, 3), (407, 800, 400)]):
        ids = np.arange(begin, end)
        half = pa.array(ids * 0.5, mask=ids % 97 == 50)
        table = pa.table({"id": ids, "half": half, "text": ids.astype(str), "small": ids.astype(np.int16)})
        if kind == "parquet":
            pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=group)
        else:
            with pa.ipc.new_file(tmp_path / f"{number}.arrow", table.schema) as out:
                out.write_table(table, max_chunksize=group)
    dataset = dataclasses.replace(read_files(tmp_path, lanes=lanes, window_rows=window), piece_rows=100)
    seen = []
    for shard in shards(dataset, ranks):
        for batch in shard.iter_batches(batch_size=size, shuffle_seed=1):
            ids = batch["id"]
            assert list(batch) == ["id", "half", "text", "small"] and batch["text"].tolist() == ids.astype(str).tolist()
            assert batch["small"].dtype == np.int16 and batch["small"].tolist() == ids.tolist()
            np.testing.assert_array_equal(batch["half"], np.where(ids % 97 == 50, np.nan, ids * 0.5))
            seen += ids.tolist()
    assert sorted(seen) == list(range(800))


def test_an_epoch_uses_the_memory_of_the_one_before_which_is_gone_with_the_last_shard(tmp_path):
    from wingbeat.train._gather import Spare

    pq.write_table(pa.table({"id": np.arange(10_000)}), tmp_path / "rows.parquet", row_group_size=1000)
    shard, other = shards(read_files(tmp_path, window_rows=500), 2)
    spare = Spare.of_process()
    places = []
    for one in (shard, shard, other):
        assert sum(len(batch["id"]) for batch in one.iter_batches(shuffle_seed=1)) == 5000
        memory = spare.take(1)
        places.append(memory.ctypes.data)
        spare.give_back(memory)
    assert len(set(places)) == 1
    kept = weakref.ref(memory)
    del memory, spare, one, shard, other
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("is_left", [False, True])
def test_rows_that_are_kept_keep_no_memory_that_waits_to_be_used_again(tmp_path, monkeypatch, is_left):
    from wingbeat.train import _gather

    pieces = []
    array = _gather.Memory.array

    def counted(memory, size):
        made = array(memory, size)
        pieces.append(weakref.ref(made))
        pieces.extend(weakref.ref(one) for one in memory._free)
        return made

    monkeypatch.setattr(_gather.Memory, "array", counted)
    pq.write_table(pa.table({"id": np.arange(100_000)}), tmp_path / "rows.parquet", row_group_size=10_000)
    batches = shards(read_files(tmp_path / "rows.parquet", window_rows=20_000), 1)[0].iter_batches(batch_size=1000, shuffle_seed=1)
    kept = next(batches)["id"][:2]
    for _ in [] if is_left else batches:
        pass
    batches.close()
    del batches
    gc.collect()
    assert len({id(one) for one in (piece() for piece in pieces) if one is not None}) == 1 and len(kept) == 2


def test_text_that_polars_writes_is_gathered(tmp_path):
    polars = pytest.importorskip("polars")
    polars.DataFrame({"id": range(100), "text": [f"text number {one}" for one in range(100)]}).write_ipc(tmp_path / "rows.arrow")
    dataset = read_files(tmp_path, window_rows=30)
    for seed in (None, 1):
        rows = [row for shard in shards(dataset, 2) for row in shard.iter_rows(shuffle_seed=seed)]
        assert sorted((row["id"], row["text"]) for row in rows) == [(one, f"text number {one}") for one in range(100)]


def test_a_damaged_record_batch_is_an_error_that_names_the_file(tmp_path):
    table = pa.table({"text": [f"text {one}" for one in range(1000)]})
    with pa.ipc.new_file(tmp_path / "rows.arrow", table.schema) as out:
        out.write_table(table)
    data = bytearray((tmp_path / "rows.arrow").read_bytes())
    offset = data.index(np.array([0, 6, 12, 18], "<i4").tobytes())
    data[offset + 8 : offset + 12] = (0x70000000).to_bytes(4, "little")
    (tmp_path / "rows.arrow").write_bytes(data)
    with pytest.raises(UnreadableFileError, match="rows.arrow cannot be read: (?!it has changed)"):
        list(shards(read_files(tmp_path), 1)[0].iter_batches(shuffle_seed=1))


def test_a_file_outside_of_the_partitions_is_named(tmp_path):
    table = pa.table({"id": range(10), "year": [2020] * 10})
    pa.dataset.write_dataset(table, tmp_path / "data", format="parquet", partitioning=["year"], partitioning_flavor="hive")
    pq.write_table(table.select(["id"]), tmp_path / "data" / "z.parquet")
    with pytest.raises(SchemaMismatchError, match="'year' is in the names of folders in .*, and missing in .*z.parquet"):
        read_files(tmp_path / "data")


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("size", [7, 64, 100, 333])
def test_arrays_of_numbers_may_be_written_and_batches_span_row_groups(tmp_path, size, seed):
    table = pa.table({"id": range(1000), "x": np.arange(1000, dtype=np.float32), "of": [[one, -one] for one in range(1000)]})
    table = table.append_column("pair", pa.FixedSizeListArray.from_arrays(pa.array(np.arange(2000.0)), 2))
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=100)
    (shard,) = shards(read_files(tmp_path / "rows.parquet", window_rows=90), 1)
    ids = []
    for batch in shard.iter_batches(batch_size=size, shuffle_seed=seed):
        assert batch["x"].dtype == np.float32 and (batch["x"] == batch["id"]).all() and (batch["of"][:, 1] == -batch["x"]).all()
        assert list(batch) == ["id", "x", "of", "pair"] and (batch["pair"][:, 1] == 2 * batch["id"] + 1).all()
        ids += batch["id"].tolist()
        for array in batch.values():
            array *= 0
    assert (ids if seed is None else sorted(ids)) == list(range(1000))


@pytest.mark.parametrize("shuffle", [{}, {"shuffle_seed": 1}, {"local_shuffle_buffer_size": 1, "local_shuffle_seed": 1}])
@pytest.mark.parametrize("size", [None, 7])
def test_arrays_of_a_table_may_be_written_and_the_table_stays(tmp_path, monkeypatch, size, shuffle):
    from wingbeat import _sending
    from wingbeat.train import get_dataset_shard

    table = pa.table({"id": range(20), "of": [[one, -one] for one in range(20)], "n": pa.array([None, *range(19)], pa.int32())})
    table = table.append_column("pair", pa.FixedSizeListArray.from_arrays(pa.array(np.arange(40.0)), 2))
    _sending.write_parts(table, str(tmp_path), 1)
    monkeypatch.setenv("WINGBEAT_SHARD_train", str(tmp_path / "0.arrow"))
    shard, seen = get_dataset_shard(), []
    for kind in (shard.iter_batches, lambda **more: shard.iter_torch_batches(collate_fn=lambda rows: rows, **more)):
        batches = list(kind(batch_size=size, **shuffle))
        seen.append(sorted(one for batch in batches for one in batch["id"].tolist()))
        if size is None and not shuffle:  # all rows, where they lie
            assert not batches[0]["id"].flags.writeable
            continue
        for batch in batches:
            for array in batch.values():
                array *= 0
    assert seen == [list(range(20))] * 2 and shard.table.equals(table)
    assert not any(batch["id"].any() for batch in batches) or (size is None and not shuffle)


def test_rows_of_an_arrow_file_in_their_order_are_not_copied_and_cannot_be_written(tmp_path):
    table = pa.table({"id": range(1000)})
    with pa.ipc.new_file(tmp_path / "rows.arrow", table.schema) as out:
        out.write_table(table)
    (shard,) = shards(read_files(tmp_path / "rows.arrow"), 1)
    batch = next(shard.iter_batches(batch_size=10))
    with pytest.raises(ValueError, match="read-only"):
        batch["id"][0] = 1  # the file is mapped: to write there would kill the process


@pytest.mark.parametrize("seed", [None, 1])
def test_nulls_anywhere_in_parquet_decide_the_type_of_all_batches(tmp_path, seed):
    def write(path, number, is_null, **options):
        values = [None if is_null else one for one in range(100)]
        columns = {"n": pa.array(values, pa.int32()), "flag": pa.array([None if is_null else one > 3 for one in range(100)], pa.bool_())}
        columns["of"] = pa.array(values, pa.int64()).dictionary_encode()
        table = pa.table({"id": range(100 * number, 100 * number + 100), **columns, "x": [1.0] * 100})
        pq.write_table(table, path, row_group_size=50, **options)

    for number in range(4):
        write(tmp_path / f"{number}.parquet", number, number == 2)
    dataset = read_files(tmp_path)
    assert dataset.with_nulls == ("n", "flag", "of") and read_files(tmp_path, columns=["id", "x"]).with_nulls == ()
    for kind in ("numpy", "pandas"):
        batches = [batch for shard in shards(dataset, 2) for batch in shard.iter_batches(batch_size=10, batch_format=kind, shuffle_seed=seed)]
        types = {(str(batch["id"].dtype), str(batch["n"].dtype), str(batch["flag"].dtype), str(batch["x"].dtype)) for batch in batches}
        assert types == {("int64", "float64", "object", "float64")}
        rows = sorted((int(row), n, flag) for batch in batches for row, n, flag in zip(batch["id"], batch["n"], batch["flag"]))
        assert [n for _, n, _ in rows[:100]] == list(range(100)) and all(np.isnan(n) for _, n, _ in rows[200:300])
        assert [flag for _, _, flag in rows[1:6]] == [False, False, False, True, True] and {flag for _, _, flag in rows[200:300]} == {None}
        assert {str(batch["of"].dtype) for batch in batches} == {"float64"}  # pyarrow reads dictionaries of text alone as such
    # A file that does not say so.
    write(tmp_path / "2.parquet", 2, True, write_statistics=False)
    assert read_files(tmp_path).with_nulls == ()


@pytest.mark.parametrize("seed", [None, 1])
def test_nulls_of_folders_and_of_columns_that_are_cast_decide_the_type_too(tmp_path, seed):
    table = pa.table({"id": range(300), "part": pa.array([None] * 100 + [1] * 100 + [2] * 100, pa.int32())})
    by = pa.dataset.partitioning(pa.schema([("part", pa.int32())]), flavor="hive")
    pa.dataset.write_dataset(table, tmp_path / "parts", format="parquet", partitioning=by)
    (tmp_path / "cast").mkdir()
    for number, values in enumerate(([1.0, None] * 50, [1.0, 2.0] * 50)):
        pq.write_table(pa.table({"y": values}), tmp_path / "cast" / f"{number}.parquet")
    cast = pa.dataset.dataset(tmp_path / "cast", schema=pa.schema([("y", pa.int64())]))
    for dataset, name in ((read_files(tmp_path / "parts"), "part"), (read_files(cast), "y")):
        batches = list(shards(dataset, 1)[0].iter_batches(batch_size=50, shuffle_seed=seed))
        assert dataset.with_nulls == (name,) and {str(batch[name].dtype) for batch in batches} == {"float64"}


@pytest.mark.parametrize("seed", [None, 1])
def test_columns_that_are_in_no_file_may_be_read_alone(tmp_path, seed):
    table = pa.table({"id": range(300), "part": [1] * 100 + [2] * 200})
    pa.dataset.write_dataset(table, tmp_path / "data", format="parquet", partitioning=["part"], partitioning_flavor="hive")
    (shard,) = shards(read_files(tmp_path / "data", columns=["part"]), 1)
    read = np.concatenate([batch["part"] for batch in shard.iter_batches(batch_size=7, shuffle_seed=seed)])
    assert sorted(read) == table["part"].to_pylist()


def test_columns_of_folders_whose_type_is_not_known_are_named(tmp_path):
    (file := tmp_path / "both" / "id=5" / "0.parquet").parent.mkdir(parents=True)
    pq.write_table(pa.table({"id": [5, 5], "x": [1, 2]}), file)
    with pytest.raises(DatasetError, match=f"is no dataset: .*{file} itself has 'id' .int64., too; give a pyarrow.dataset.Dataset"):
        read_files(tmp_path / "both")
    (file := tmp_path / "null" / "p=__HIVE_DEFAULT_PARTITION__" / "0.parquet").parent.mkdir(parents=True)
    pq.write_table(pa.table({"x": [1, 2]}), file)
    with pytest.raises(DatasetError, match=f"{tmp_path}/null has columns in names of folders, and is no dataset: .*'p'.*; give a pyarrow.dataset.Dataset"):
        read_files(tmp_path / "null")
    for folder, name, value in (("both", "id", 5), ("null", "p", None)):
        by = pa.dataset.partitioning(pa.schema([(name, pa.int64())]), flavor="hive")
        (shard,) = shards(read_files(pa.dataset.dataset(tmp_path / folder, partitioning=by)), 1)
        assert [row[name] for row in shard.iter_rows()] == [value] * 2


def test_nulls_of_a_table_decide_the_type_on_all_ranks(tmp_path, monkeypatch):
    from wingbeat import _sending
    from wingbeat.train import get_dataset_shard

    table = pa.table({"id": range(8), "n": [1, 2, 3, 4, None, 6, 7, 8], "flag": [True] * 7 + [None]}).replace_schema_metadata({"a": "b"})
    _sending.write_parts(table, str(tmp_path), 4)
    for rank in range(4):
        monkeypatch.setenv("WINGBEAT_SHARD_train", str(tmp_path / f"{rank}.arrow"))
        shard = get_dataset_shard()
        assert shard.table.equals(table.slice(2 * rank, 2), check_metadata=True)
        for kind in ("numpy", "pandas"):
            for batch in shard.iter_batches(batch_size=1, batch_format=kind):
                assert [str(batch[name].dtype) for name in table.column_names] == ["int64", "float64", "object"]


def test_types_of_pandas_that_hold_nulls_stay(tmp_path, monkeypatch):
    pandas = pytest.importorskip("pandas")
    from wingbeat import _sending
    from wingbeat.train import get_dataset_shard

    large = 2**60 + 1
    frame = pandas.DataFrame(
        {
            "id": pandas.array([large, None, 3, 4], dtype="Int64"),
            "flag": pandas.array([True, None, False, True], dtype="boolean"),
            "arrow": pandas.array([1, None, 3, 4], dtype="int64[pyarrow]"),
            "kind": pandas.Categorical([1, None, 1, 2]),
            "n": [1, 2, 3, 4],
        }
    )
    _sending.write_parts(_sending.table_of(frame), str(tmp_path), 2)
    for rank in range(2):
        monkeypatch.setenv("WINGBEAT_SHARD_train", str(tmp_path / f"{rank}.arrow"))
        (batch,) = get_dataset_shard().iter_batches(batch_format="pandas")
        assert list(map(str, batch.dtypes)) == ["Int64", "boolean", "int64[pyarrow]", "category", "int64"]
        assert rank or batch["id"].tolist() == [large, pandas.NA]
    indexed = pa.Table.from_pandas(frame.set_index("id"))
    (tmp_path / "indexed").mkdir()
    _sending.write_parts(_sending.table_of(indexed), str(tmp_path / "indexed"), 2)
    monkeypatch.setenv("WINGBEAT_SHARD_train", str(tmp_path / "indexed/1.arrow"))
    (batch,) = get_dataset_shard().iter_batches(batch_format="pandas")
    assert batch.index.name == "id" and batch["n"].tolist() == [3, 4]


def test_the_index_of_a_dataframe_is_no_column():
    pandas = pytest.importorskip("pandas")
    from wingbeat import _sending

    frame = pandas.DataFrame({"x": [1.0, 2.0, 3.0], "y": [0, 1, 0]})
    for rows in (frame, frame.sample(frac=1, random_state=1), frame[frame.y == 0], frame.set_index(pandas.Index([7, 8, 9], name="id"))):
        assert _sending.table_of(rows).column_names == ["x", "y"]


def test_a_shard_of_a_table_is_shuffled_anew_in_each_epoch_however_it_is_asked_for(tmp_path, monkeypatch):
    from wingbeat import _sending
    from wingbeat.train import get_dataset_shard

    _sending.write_parts(pa.table({"id": range(50)}), str(tmp_path), 1)
    monkeypatch.setenv("WINGBEAT_SHARD_train", str(tmp_path / "0.arrow"))

    def epoch():
        return [row for batch in get_dataset_shard().iter_batches(batch_size=7, shuffle_seed=1) for row in batch["id"].tolist()]

    orders = [epoch() for _ in range(3)]
    assert orders[0] != orders[1] != orders[2] != orders[0] and all(sorted(order) == list(range(50)) for order in orders)
    get_dataset_shard().set_epoch(1)
    assert [epoch(), epoch()] == orders[1:]
    with pytest.raises(ValueError, match="not negative"):
        get_dataset_shard().set_epoch(-1)


def test_a_damaged_footer_is_an_error_that_names_the_file(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"id": range(30), "named": ["a"] * 30}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"named", b"nam\xffd"))
    with pytest.raises(UnreadableFileError, match="rows.parquet"):
        read_files(path)


def test_no_byte_of_a_damaged_footer_ends_the_process(tmp_path, environment, write):
    ids = range(60)
    table = pa.table({"id": ids, "even": [one % 2 == 0 for one in ids], "x": [one / 2 for one in ids]}).replace_schema_metadata()
    pq.write_table(table, tmp_path / "whole.parquet", store_schema=False)
    program = write("damage.py", """
        import sys
        from wingbeat._files import _reading
        from wingbeat.ml import MlError
        from wingbeat.ml._parquet import open_files
        from wingbeat.train import DatasetError, StreamingShard, UnreadableFileError, read_files

        _reading._TOGETHER_BYTES = 300  # some columns at a time, as of large row groups

        def by_ml(path):
            source = open_files([path])
            return sum(batch.data.num_rows for batch in source.batches(source.column_names))

        def by_train(path, columns=None):
            shard = StreamingShard(read_files(path, columns=columns), 0, 1)
            return sum(batch.num_rows for batch in shard.iter_batches(batch_size=7, batch_format="pyarrow"))

        folder, number, of = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
        path = f"{folder}/damaged-{number}.parquet"
        data = open(f"{folder}/whole.parquet", "rb").read()
        begin, outcomes = len(data) - 8 - int.from_bytes(data[-8:-4], "little"), []
        for at in range(begin + number, len(data), of):
            for value in {data[at] ^ 2, 0} - {data[at]}:
                with open(path, "wb") as file:
                    file.write(data[:at] + bytes([value]) + data[at + 1 :])
                for read in (by_train, by_ml, lambda path: by_train(path, ["x"])):
                    try:
                        outcomes.append(read(path))
                    except (DatasetError, MlError) as error:
                        assert path in str(error), error
                        outcomes.append(error)
        assert 60 in outcomes and any(isinstance(one, UnreadableFileError) for one in outcomes)
    """)
    parts = [
        subprocess.Popen([sys.executable, program, tmp_path, str(number), "2"], env=environment, stderr=subprocess.PIPE, text=True)
        for number in range(2)
    ]
    for part in parts:
        said = part.communicate(timeout=DEADLINE_SECONDS)[1]
        assert part.returncode == 0, said


def test_a_damaged_page_is_found_by_its_checksum_where_there_is_one(tmp_path):
    table = pa.table({"id": range(4000)})
    for rows, piece in ((4000, None), (1000, None), (4000, 100)):
        path = tmp_path / "rows.parquet"
        options = {"use_dictionary": False, "compression": "none", "write_page_checksum": True}
        pq.write_table(table, path, row_group_size=rows, **options)
        assert sum(map(len, (batch["id"] for batch in shards(read_files(path), 1)[0].iter_batches()))) == 4000
        data = bytearray(path.read_bytes())
        dataset = read_files(path)
        data[data.index((777).to_bytes(8, "little") + (778).to_bytes(8, "little"))] ^= 1  # a number, and another one
        path.write_bytes(data)
        os.utime(path, ns=(dataset.files[0].modified_ns,) * 2)  # as a disk damages it
        if piece is not None:  # as of a row group that is too large to be decoded at once
            dataset = dataclasses.replace(dataset, piece_rows=piece, window_rows=piece)
        with pytest.raises(UnreadableFileError, match="rows.parquet cannot be read: .*CRC"):
            list(shards(dataset, 1)[0].iter_batches())


def test_a_unit_is_found_in_its_file_also_beside_files_without_rows(tmp_path):
    from wingbeat.train._lane import _file_of

    dataset = read_files(write_parquet(tmp_path / "data", [0, 250, 0, 0, 120, 1, 0], group=50))
    units = [(file.path, number) for file in dataset.files for number in range(len(file.unit_rows))]
    found = [_file_of(dataset, unit) for unit in range(len(dataset.unit_rows))]
    assert [(file.path, number) for file, number in found] == units and len(units) >= 9
    rows = [id for batch in shards(dataset, 1)[0].iter_batches() for id in batch["id"].tolist()]
    assert rows == list(range(371))


@pytest.mark.parametrize("seed", [None, 1])
def test_text_of_polars_inside_of_other_columns_and_categories_are_read(tmp_path, seed):
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame(
        {
            "id": range(60),
            "tags": [[f"tag {one}", "other"] for one in range(60)],
            "about": [{"name": f"name {one}", "of": [{"text": str(one)}]} for one in range(60)],
            "kind": [f"kind {one % 7}" for one in range(60)],
        },
        schema_overrides={"kind": polars.Categorical},
    )
    frame.write_ipc(tmp_path / "rows.arrow")
    dataset = read_files(tmp_path, window_rows=10)
    rows = [row for shard in shards(dataset, 2) for row in shard.iter_rows(shuffle_seed=seed)]
    assert sorted(rows, key=lambda row: row["id"]) == frame.to_dicts()
    for kind in ("numpy", "pandas"):
        kinds = {}
        for batch in shards(dataset, 1)[0].iter_batches(batch_size=16, batch_format=kind, shuffle_seed=seed):
            kinds.update(zip(batch["id"], batch["kind"]))
        assert kinds == dict(enumerate(frame["kind"].to_list()))


def test_runs_are_decoded(tmp_path):
    from pyarrow.compute import run_end_encode

    table = pa.table({"id": range(60), "runs": run_end_encode(pa.array([one // 20 for one in range(60)]))})
    with pa.ipc.new_file(tmp_path / "rows.arrow", table.schema) as out:
        out.write_table(table)
    rows = list(shards(read_files(tmp_path, window_rows=10), 1)[0].iter_rows(shuffle_seed=1))
    assert sorted((row["id"], row["runs"]) for row in rows) == [(one, one // 20) for one in range(60)]


def test_categories_of_many_files_have_room_together(tmp_path):
    pandas = pytest.importorskip("pandas")
    for number in range(3):
        ids = range(100 * number, 100 * number + 100)
        frame = pandas.DataFrame({"id": ids, "word": pandas.Categorical([f"word {one}" for one in ids])})
        frame.to_parquet(tmp_path / f"{number}.parquet", row_group_size=20)
    assert read_files(tmp_path).schema.field("word").type == pa.dictionary(pa.int32(), pa.string())
    rows = list(shards(read_files(tmp_path), 1)[0].iter_rows(shuffle_seed=1))
    assert sorted((row["id"], row["word"]) for row in rows) == [(one, f"word {one}") for one in range(300)]


@pytest.mark.parametrize("rows, most", [(100, 1 << 20), (300, 1 << 20), (300, 1)])
def test_a_column_may_be_called_as_a_field_of_another(tmp_path, monkeypatch, rows, most):
    from wingbeat._files import _reading

    monkeypatch.setattr(_reading, "_TOGETHER_BYTES", most)
    table = pa.table({"a": [{"b": one, "c": 0} for one in range(rows)], "a.b": range(rows), "id": range(rows)})
    pq.write_table(table, tmp_path / "rows.parquet")
    for columns in (["a.b"], ["a"], ["id", "a.b"], ["a.b", "a"], None):
        (shard,) = shards(read_files(tmp_path, columns=columns), 1)
        read = list(shard.iter_rows())
        assert read == table.select(columns or table.column_names).to_pylist()
        assert list(read[0]) == (columns or table.column_names)


def test_relative_paths_are_those_of_the_program(tmp_path, monkeypatch):
    write_parquet(tmp_path / "data", [100])
    monkeypatch.chdir(tmp_path)
    made = [read_files(pa.dataset.dataset("data")), read_files("data", filesystem=pa.fs.LocalFileSystem()), read_files("data")]
    monkeypatch.chdir("/")
    for dataset in made:
        assert dataset.files[0].path == str(tmp_path / "data" / "0.parquet")
        assert sum(len(batch["id"]) for batch in shards(dataset, 1)[0].iter_batches()) == 100


def test_two_columns_of_one_name_are_named_with_their_file(tmp_path):
    table = pa.Table.from_arrays([pa.array([1, 2]), pa.array([3, 4]), pa.array([5, 6])], ["a", "a", "b"])
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DatasetError, match="rows.parquet has 2 columns of the name 'a': rename them"):
        read_files(tmp_path)
    (batch,) = shards(read_files(tmp_path, columns=["b"]), 1)[0].iter_batches()
    assert batch["b"].tolist() == [5, 6]
