"""Logistic regression: what it learns, on how many ranks, from what, and what it says of bad input."""

import os
import re
import threading

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import DEADLINE_SECONDS

from wingbeat.ml import (
    EmptyDataset,
    ExistingColumn,
    InvalidFeatures,
    InvalidLabels,
    InvalidParameter,
    InvalidWeights,
    MissingColumn,
    OneClass,
    SchemaMismatch,
    TooManyRanks,
    TrainingDiverged,
    UnknownParameter,
    UnreadableFile,
    _sgd,
    _shards,
    _threads,
)
from wingbeat.ml._source import open_source
from wingbeat.ml.classification import LogisticRegression
from wingbeat.torch import TrainingError

RANKS = {"localBytes": 0}


def blobs(rows=400, features=6, classes=3, seed=0):
    """Rows around a center for each class."""
    random = np.random.default_rng(seed)
    labels = np.sort(random.integers(classes, size=rows))
    points = random.normal(size=(rows, features)) + 2 * np.eye(classes, features)[labels]
    return pa.table({"features": pa.array(list(points)), "label": labels})


@pytest.fixture(scope="module")
def table():
    return blobs()


@pytest.fixture(autouse=True)
def on_the_cluster(request, monkeypatch):
    """Ranks start on a cluster where a test has one: there they are warm."""
    if "cluster" in request.fixturenames:
        for name, value in request.getfixturevalue("cluster").items():
            monkeypatch.setenv(name, value)


def accuracy(model, table):
    predicted = model.transform(table)
    return np.mean(predicted["prediction"].to_numpy() == predicted["label"].to_numpy())


def test_it_learns_in_this_process_where_data_are_few(table, monkeypatch):
    monkeypatch.setenv("WINGBEAT_BIN", "/nonexistent")  # no rank can start
    model = LogisticRegression(maxIter=20, learningRate=0.05, numTrainWorkers=2).fit(table)
    assert accuracy(model, table) > 0.85
    assert (model.numFeatures, model.numClasses) == (6, 3)
    assert model.coefficientMatrix.shape == (3, 6) and model.interceptVector.shape == (3,)
    assert model.objectiveHistory[-1] < model.objectiveHistory[0]


def test_the_model_is_the_same_on_any_number_of_ranks_and_from_any_input(table, tmp_path, cluster):
    random = np.random.default_rng(1)
    weighted = table.append_column("weight", pa.array(random.uniform(0.1, 5, table.num_rows)))
    pq.write_table(weighted.slice(0, 150), tmp_path / "a.parquet", row_group_size=40)
    pq.write_table(weighted.slice(150), tmp_path / "b.parquet", row_group_size=100)
    estimator = LogisticRegression(maxIter=5, learningRate=0.05, batchSize=30, weightCol="weight", seed=3)
    alone = estimator.fit(weighted)
    for ranks, dataset in [(2, weighted), (3, str(tmp_path)), (4, weighted.to_pandas())]:
        model = estimator.fit(dataset, {estimator.numTrainWorkers: ranks, estimator.localBytes: 0})
        assert np.abs(model.coefficientMatrix - alone.coefficientMatrix).max() < 1e-6, ranks
        assert model.objectiveHistory == pytest.approx(alone.objectiveHistory, rel=1e-9)
    other = estimator.fit(weighted, {estimator.seed: 4})
    assert np.abs(other.coefficientMatrix - alone.coefficientMatrix).max() > 1e-3


def test_tables_that_are_too_large_to_be_pickled_reach_the_ranks(table, cluster, monkeypatch):
    monkeypatch.setattr("wingbeat.ml._examples.MEMORY_BYTES", 10_000)
    small = pa.array((10 * np.stack(table["features"].to_numpy())).astype(int).tolist(), pa.list_(pa.int8()))
    grows = table.set_column(0, "features", small)  # small integers take more as float32
    assert grows.nbytes < 10_000 < 4 * table.num_rows * 9
    estimator = LogisticRegression(maxIter=3, learningRate=0.001)
    for dataset in (table, grows):
        expected = estimator.fit(dataset)
        found = estimator.fit(dataset, {estimator.numTrainWorkers: 2, estimator.localBytes: 0})
        assert np.abs(found.coefficientMatrix - expected.coefficientMatrix).max() < 1e-6


def test_the_first_parameters_and_steps_are_those_of_torch(table):
    """One batch is all rows, so that torch's own layer, loss and optimizer make the same steps."""
    import torch

    model = LogisticRegression(maxIter=4, learningRate=0.1, momentum=0.8, batchSize=400, seed=7).fit(table)
    torch.manual_seed(7)
    layer = torch.nn.Linear(6, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.8)
    inputs = torch.tensor(np.stack(table["features"].to_numpy()), dtype=torch.float32)
    for _ in range(4):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(layer(inputs), torch.tensor(table["label"].to_numpy())).backward()
        optimizer.step()
    assert np.abs(model.coefficientMatrix - layer.weight.detach().numpy()).max() < 1e-5
    assert np.abs(model.interceptVector - layer.bias.detach().numpy()).max() < 1e-5


def test_a_row_of_weight_2_counts_as_two_rows_and_weights_may_have_any_scale(table):
    random = np.random.default_rng(0)
    counts = random.integers(0, 3, table.num_rows)
    repeated = table.take(pa.array(np.repeat(np.arange(table.num_rows), counts)))
    weighted = table.append_column("count", pa.array(counts * 10.0))
    settings = {"maxIter": 10, "learningRate": 0.05, "batchSize": 10_000}  # one batch, so that the order is nothing
    one = LogisticRegression(**settings).fit(repeated)
    other = LogisticRegression(weightCol="count", **settings).fit(weighted)
    assert np.abs(one.coefficientMatrix - other.coefficientMatrix).max() < 1e-6


def test_training_stops_where_the_loss_changes_by_less_than_tol(table):
    whole = {"maxIter": 500, "learningRate": 0.5, "batchSize": 400, "momentum": 0.0}
    stopped = LogisticRegression(tol=1e-4, **whole).fit(table).objectiveHistory
    last, before, earlier = stopped[-1], stopped[-2], stopped[-3]
    assert len(stopped) < 200 and abs(last - before) < 1e-4 and abs(before - earlier) < 1e-4
    assert len(LogisticRegression(tol=0, **{**whole, "maxIter": 210}).fit(table).objectiveHistory) == 210


def test_without_an_intercept_and_without_probabilities(table):
    model = LogisticRegression(fitIntercept=False, probabilityCol="", maxIter=3).fit(table)
    assert list(model.interceptVector) == [0, 0, 0]
    assert model.transform(table).column_names == ["features", "label", "prediction"]
    with pytest.raises(ExistingColumn, match="LogisticRegressionModel would write the column 'out' twice"):
        model.transform(table, {model.predictionCol: "out", model.probabilityCol: "out"})


def test_a_process_s_random_numbers_and_threads_stay_as_they_would_be(table):
    import torch

    threads = torch.get_num_threads()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    LogisticRegression(maxIter=1).fit(table)
    assert torch.equal(torch.rand(3), expected) and torch.get_num_threads() == threads


def test_each_thread_keeps_its_number_of_torch_s_threads():
    """Two are inside at the same time, and the one that came first leaves first."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    here, there, found = _threads.few(1), threading.Barrier(2, timeout=DEADLINE_SECONDS), []

    def other():
        with _threads.few(1):
            there.wait()
            there.wait()
        found.append(torch.get_num_threads())

    thread = threading.Thread(target=other)
    try:
        with here:
            thread.start()
            there.wait()
            assert torch.get_num_threads() == 1
        there.wait()
        thread.join()
        assert (torch.get_num_threads(), found) == (3, [3])
    finally:
        torch.set_num_threads(threads)


def bad(labels=(0, 1, 0, 1), features=((1.0, 2.0),) * 4, **more):
    return pa.table({"features": pa.array(features), "label": pa.array(labels), **{k: pa.array(v) for k, v in more.items()}})


@pytest.mark.parametrize(
    "dataset, error, text",
    [
        (bad([1, 2, 1, 2]), InvalidLabels, "the labels in column 'label' are 1, 2, and have to be 0 to 1: subtract 1"),
        (bad([0, 1, 3, 1]), InvalidLabels, "are 0, 1, 3, and have to be 0 to 2: 2 is missing"),
        (bad([0, 1, -1, 1]), InvalidLabels, "are -1, 0, 1, and have to be 0 to 2"),
        (bad([0, 1, 0.5, 1]), InvalidLabels, "are 0, 0.5, 1, and have to be 0 to 2: labels are integers"),
        (bad([0, 1, None, 1]), InvalidLabels, "column 'label', row 2: the label is null or NaN"),
        (bad([0.0, float("nan"), 0.0, 1.0]), InvalidLabels, "row 1: the label is null or NaN"),
        (bad(["a", "b", "a", "b"]), InvalidLabels, "holds string: map them to 0, 1, 2 and so on"),
        (bad([1, 1, 1, 1]), OneClass, "all rows have the label 1"),
        (bad([-1, -1, -1, -1]), InvalidLabels, "are -1, and have to be 0, 1, 2 and so on"),
        (bad().slice(0, 0), EmptyDataset, "no rows"),
        (bad(features=([1.0, 2.0], None, [1.0, 2.0], [3.0, 4.0])), InvalidFeatures, "row 1: the array is null"),
        (bad(features=([1.0, 2.0], [1.0, None], [1.0, 2.0], [3.0, 4.0])), InvalidFeatures, "row 1: element 1 is null or NaN"),
        (bad(features=([1.0, 2.0], [float("inf"), 1.0]) * 2), InvalidFeatures, "row 1: element 0 is infinite"),
        (bad(features=([1.0, 2.0], [1e300, 1.0]) * 2), InvalidFeatures, "row 1: element 0 is too large for float32"),
        (bad(features=([1.0, 2.0], [1.0]) * 2), InvalidFeatures, "row 1: the array has 1 elements, and needs 2"),
        (bad(features=pa.array([[]] * 4, pa.list_(pa.float64()))), InvalidFeatures, "the arrays in column 'features' are empty"),
        (bad(features=(1.0, 2.0, 3.0, 4.0)), InvalidFeatures, "assemble it with ArrayAssembler"),
        (bad().rename_columns(["feature", "label"]), MissingColumn, "no column 'features'; did you mean 'feature'?"),
    ],
)
def test_bad_input_is_named_before_training(dataset, error, text):
    with pytest.raises(error) as raised:
        LogisticRegression().fit(dataset)
    assert text in str(raised.value)


@pytest.mark.parametrize("weights, text", [([1.0, -1, 1, 1], "row 1: the weight is -1"), ([0.0] * 4, "are 0"), ([1e-50] * 4, "are 0 as float32"), ([None, 1, 1, 1], "row 0")])
def test_bad_weights_are_named(weights, text):
    with pytest.raises(InvalidWeights, match=text):
        LogisticRegression(weightCol="w").fit(bad(w=weights))


def test_a_label_that_a_whole_batch_has_is_not_taken_for_that_of_all_rows():
    labels = np.repeat([-1, 1], 70_000)
    with pytest.raises(InvalidLabels, match="map them to 0, 1, 2 and so on") as raised:
        LogisticRegression().fit(pa.table({"features": np.ones((140_000, 1)).tolist(), "label": labels}))
    assert not isinstance(raised.value, OneClass)


def test_more_ranks_than_rows_are_refused_where_ranks_would_start():
    estimator = LogisticRegression(numTrainWorkers=5, maxIter=1)
    with pytest.raises(TooManyRanks, match="5 ranks cannot train on 4 rows"):
        estimator.copy({estimator.localBytes: 0, estimator.useGpu: False}).fit(bad())
    assert estimator.fit(bad()).numClasses == 2


def test_a_last_step_that_goes_too_far_is_noticed():
    rows = bad(features=((1.0, 2.0), (2.0, 1.0)) * 2)
    with pytest.raises(TrainingDiverged, match="a coefficient is beyond the range of float32 in epoch 1"):
        LogisticRegression(maxIter=1, learningRate=1e39).fit(rows)
    with pytest.raises(InvalidParameter, match="inf is not less than inf"):
        LogisticRegression(learningRate=float("inf"))


def test_a_rank_s_bad_row_is_the_same_error_as_in_this_process(cluster, tmp_path, capfd):
    rows = blobs(100)
    labels = rows["label"].to_pylist()
    labels[70] = None
    pq.write_table(rows.set_column(1, "label", pa.array(labels)), tmp_path / "rows.parquet", row_group_size=25)
    with pytest.raises(InvalidLabels, match="row 70") as raised:
        LogisticRegression(numTrainWorkers=2, **RANKS).fit(tmp_path / "rows.parquet")
    assert (raised.value.column, raised.value.row) == ("label", 70)
    pq.write_table(rows.set_column(1, "label", pa.array([0] * 100)), tmp_path / "rows.parquet", row_group_size=25)
    with pytest.raises(OneClass):
        LogisticRegression(numTrainWorkers=2, **RANKS).fit(tmp_path / "rows.parquet")
    pq.write_table(rows, tmp_path / "rows.parquet", row_group_size=25)
    for given in (rows, tmp_path / "rows.parquet"):
        with pytest.raises(TrainingDiverged):
            LogisticRegression(numTrainWorkers=2, learningRate=1e300, **RANKS).fit(given)
    assert "Traceback" not in capfd.readouterr().err


def test_a_table_s_bad_row_is_found_before_ranks_start(monkeypatch):
    monkeypatch.setenv("WINGBEAT_BIN", "/nonexistent")
    with pytest.raises(OneClass):
        LogisticRegression(numTrainWorkers=2, useGpu=False, **RANKS).fit(bad([0, 0, 0, 0]))


def test_files_that_cannot_be_read_are_named(table, tmp_path):
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(UnreadableFile, match="cannot read .*b.parquet as Parquet") as raised:
        LogisticRegression().fit(tmp_path)
    assert raised.value.file == str(tmp_path / "b.parquet")
    pq.write_table(table.rename_columns(["features", "labels"]), tmp_path / "b.parquet")
    with pytest.raises(SchemaMismatch, match="b.parquet has no column 'label'; the first file"):
        LogisticRegression().fit(tmp_path)
    with pytest.raises(UnreadableFile, match="there is no such file or folder"):
        LogisticRegression().fit(tmp_path / "none.parquet")
    os.remove(tmp_path / "b.parquet")
    source = open_source(tmp_path)
    pq.write_table(table.slice(1), tmp_path / "a.parquet")
    with pytest.raises(UnreadableFile, match="a.parquet as Parquet: it has changed since it was looked into"):
        source.table()
    pq.write_table(table, tmp_path / "a.parquet")
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[4:60] = bytes(56)  # the footer is whole
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(UnreadableFile, match="a.parquet"):
        LogisticRegression(maxIter=1).fit(tmp_path)


def test_parameters_that_are_unknown_or_invalid_are_named():
    with pytest.raises(UnknownParameter, match="LogisticRegression has no parameter 'maxIters'; did you mean 'maxIter'?"):
        LogisticRegression(maxIters=3)
    with pytest.raises(InvalidParameter, match="invalid maxIter: -1 is not at least 0"):
        LogisticRegression(maxIter=-1)
    with pytest.raises(InvalidParameter, match="invalid momentum: 1.0 is not less than 1"):
        LogisticRegression().setMomentum(1.0)
    with pytest.raises(TypeError, match="invalid batchSize: 2.5 is not an integer"):
        LogisticRegression(batchSize=2.5)
    with pytest.raises(TypeError, match="keyword arguments only"):
        LogisticRegression("features")


def test_a_gpu_that_is_not_there_is_named(table, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InvalidParameter, match="torch finds no GPU"):
        LogisticRegression(useGpu=True).fit(table)


def test_a_loss_that_grows_without_bound_is_an_error():
    with pytest.raises(TrainingDiverged, match="use a learningRate below 1e\\+308, or scale the features"):
        LogisticRegression(learningRate=1e308).fit(blobs(50))


def test_pandas_and_polars_give_the_same_model(table):
    polars = pytest.importorskip("polars")
    estimator = LogisticRegression(maxIter=2)
    expected = estimator.fit(table).coefficientMatrix
    for dataset in (table.to_pandas(), polars.from_arrow(table), pd.DataFrame({"label": table["label"], "features": [*table["features"].to_pylist()]})):
        assert np.array_equal(estimator.fit(dataset).coefficientMatrix, expected)


def test_a_training_that_takes_long_says_how_far_it_is(table, monkeypatch, capfd):
    monkeypatch.setattr("wingbeat.ml._progress._EVERY_S", 0.0)
    LogisticRegression(maxIter=2).fit(table)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "LogisticRegression: epoch 1 of 2, 100 % of its rows"
    assert re.fullmatch(r"LogisticRegression: epoch 2 of 2, 100 % of its rows, loss [01]\.\d+", lines[1])


def test_without_a_cluster_ranks_start_here_and_without_a_socket_gloo_sums(table, environment, tmp_path, monkeypatch):
    folder = tmp_path / ("x" * 120)  # a path that is too long for a socket
    folder.mkdir()
    for name, value in {**environment, "TMPDIR": str(folder)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WINGBEAT_ADDRESS", raising=False)
    estimator = LogisticRegression(maxIter=2, numTrainWorkers=2)
    expected = estimator.fit(table)
    found = estimator.fit(table, {estimator.localBytes: 0})
    assert np.abs(found.coefficientMatrix - expected.coefficientMatrix).max() < 1e-6
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("end, error, text", [("killed", TrainingError, "rank 1 .* was killed by signal 9"), ("raises", KeyError, "mine")])
def test_a_rank_that_ends_in_the_middle_is_the_one_that_the_error_names(cluster, end, error, text):
    """The other waits for its part of a sum."""

    def train():
        import signal

        import torch

        with _sgd._joined() as group:
            add = group.summing(8)
            add(torch.ones(1, dtype=torch.float64))
            if group.rank == 1 and end == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if group.rank == 1:
                raise KeyError("mine")
            add(torch.ones(1, dtype=torch.float64))

    with pytest.raises(error, match=text):
        _shards.on_ranks(train, (), 2)
