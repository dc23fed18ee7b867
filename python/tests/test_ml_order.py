"""The order of training, and rows that are larger than memory."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from wingbeat.ml import MlError, _examples, _stored
from wingbeat.ml._examples import Columns, Examples
from wingbeat.ml._order import Order
from wingbeat.ml._source import open_source
from wingbeat.ml.classification import LogisticRegression


def epoch(order, number, rows=1000):
    chunks = list(order.chunks(number, rows))
    assert all(len(chunk) == rows for chunk in chunks[:-1])
    return np.concatenate(chunks)


@pytest.mark.parametrize("rows, row_bytes", [(1, 100), (12_345, 100), (16_007, 100_000), (3, 1 << 30), (40_000, 5000), (20, 4 << 20)])
def test_each_row_is_in_an_epoch_once_and_the_order_is_that_of_the_seed_and_the_epoch(rows, row_bytes):
    order = Order(rows, row_bytes, seed=5)
    first = epoch(order, 0)
    assert np.array_equal(np.sort(first), np.arange(rows))
    assert np.array_equal(epoch(Order(rows, row_bytes, seed=5), 0, rows=7), first)
    if rows > 3:
        assert not np.array_equal(epoch(order, 1), first) and not np.array_equal(epoch(Order(rows, row_bytes, seed=6), 0), first)


def test_a_batch_of_a_large_data_set_has_rows_of_all_of_it_and_reads_little_of_it_at_once():
    rows, row_bytes = 1_000_000, 1000
    order = Order(rows, row_bytes, seed=0)
    for chunk in list(order.chunks(0, 10_000))[:20]:
        assert np.histogram(chunk, bins=8, range=(0, rows))[0].min() > 1000
        blocks = np.unique(chunk // (256 * 1024 // row_bytes))
        assert len(blocks) * 256 * 1024 < 100 << 20


@pytest.fixture
def sorted_rows(tmp_path):
    """Rows in the order of their labels: nothing is learned from them in that order."""
    random = np.random.default_rng(0)
    labels = np.sort(random.integers(2, size=3000))
    features = random.normal(size=(3000, 20)) + labels[:, None]
    table = pa.table({"features": list(features), "label": labels})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=500)
    return table


def test_rows_beyond_memory_are_the_same_from_disk(sorted_rows, tmp_path, monkeypatch):
    columns = Columns("features", "label", None)
    held = Examples(open_source(sorted_rows), columns, 100, 2500, True)
    monkeypatch.setattr(_examples, "MEMORY_BYTES", 1000)
    monkeypatch.setattr(_stored, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(_stored, "KEPT_BYTES", 5000)
    stored = Examples(open_source(tmp_path / "rows.parquet"), columns, 100, 2500, True)
    numbers = np.random.default_rng(0).permutation(2400)
    for _ in range(2):
        assert np.array_equal(stored.read(numbers), held.read(numbers))
    assert stored.facts == held.facts and stored.facts.rows == 2400
    alone = LogisticRegression(maxIter=2).fit(tmp_path / "rows.parquet")
    monkeypatch.undo()
    assert np.array_equal(alone.coefficientMatrix, LogisticRegression(maxIter=2).fit(sorted_rows).coefficientMatrix)


def test_a_full_disk_is_named(sorted_rows, monkeypatch):
    monkeypatch.setattr(_examples, "MEMORY_BYTES", 1000)
    monkeypatch.setattr(_stored.tempfile, "TemporaryFile", lambda **options: open("/dev/full", "wb", buffering=0))  # noqa: SIM115
    with pytest.raises(MlError, match="cannot keep rows in .* No space left on device; set TMPDIR to a folder with room"):
        LogisticRegression(maxIter=1).fit(sorted_rows)


def test_training_on_files_needs_as_much_memory_for_more_rows(python, environment, tmp_path):
    """37 MiB of rows, and then 298 MiB: the same file eight times."""
    path = tmp_path / "rows.parquet"
    random = np.random.default_rng(0)
    labels = random.integers(2, size=50_000)
    values = (random.normal(size=(50_000, 98)) + labels[:, None]).ravel()
    features = pa.ListArray.from_arrays(pa.array(np.arange(0, 98 * 50_001, 98), pa.int32()), values)
    pq.write_table(pa.table({"features": features, "label": labels}), path, row_group_size=25_000)
    done = python(
        f"""
        import pyarrow
        from wingbeat.ml.classification import LogisticRegression
        from wingbeat.ml.feature import StandardScaler

        def most():
            return next(int(line.split()[1]) >> 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))

        peaks, pool = [], pyarrow.default_memory_pool()
        for paths in ([{str(path)!r}], [{str(path)!r}] * 8):
            StandardScaler(inputCol="features", outputCol="scaled").fit(paths)
            model = LogisticRegression(maxIter=1, batchSize=1000, localBytes=1 << 40).fit(paths)
            model.transform(paths, output={str(tmp_path / "out.parquet")!r})
            peaks += [most(), pool.max_memory() >> 20]
        print(*peaks, model.objectiveHistory[0])
        """,
        environment,
    )
    resident, allocated, resident_then, allocated_then, loss = map(float, done.stdout.split())
    # Held whole, the other rows would take 261 MiB as they are read, and as much again as they are transformed.
    assert allocated_then < allocated + 20, done.stdout
    assert resident_then < resident + 130, done.stdout
    assert loss < 0.5
