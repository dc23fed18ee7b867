"""Scalers, the summarizer and the assembler: beside scikit-learn and numpy, from every kind of input."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn import preprocessing

from wingbeat.ml import (
    DatasetError,
    EmptyDataset,
    ExistingColumn,
    InvalidFeatures,
    InvalidParameter,
    MissingColumn,
    Pipeline,
    SchemaMismatch,
    TooFewRows,
    UnreadableFile,
    UnsupportedDataset,
)
from wingbeat.ml._source import open_source
from wingbeat.ml.feature import ArrayAssembler, MaxAbsScaler, StandardScaler
from wingbeat.ml.summarizer import summarize_dataframe

ROWS = np.random.default_rng(0).normal([0, 5, 1e8, 3], [1, 100, 0.01, 0], (1000, 4))


@pytest.fixture(scope="module")
def table():
    return pa.table({"id": range(1000), "features": list(ROWS)})


@pytest.fixture(scope="module")
def folder(table, tmp_path_factory):
    """Three files, one of them in a folder below, and what is no data."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "more").mkdir()
    pq.write_table(table.slice(0, 300), folder / "a.parquet", row_group_size=70)
    pq.write_table(table.slice(300, 1), folder / "b.parquet")
    pq.write_table(table.slice(301), folder / "more/c.parquet", row_group_size=400)
    (folder / "_SUCCESS").write_text("")
    (folder / ".d.parquet").write_text("")
    return folder


def matrix(column):
    return np.stack(column.to_numpy() if hasattr(column, "to_numpy") else column)


def close(one, other):
    return np.allclose(one, other, rtol=1e-9, atol=1e-9)


def test_the_standard_scaler_is_scikit_learn_s_with_the_deviation_of_a_sample(table):
    model = StandardScaler(inputCol="features", outputCol="scaled").fit(table)
    other = preprocessing.StandardScaler().fit(ROWS)
    assert close(model.mean_values, other.mean_) and model.n_samples_seen == 1000
    # Spark divides by n - 1, scikit-learn by n.
    assert close(model.std_values[:3], np.sqrt(other.var_[:3] * 1000 / 999))
    assert model.std_values[3] == 0 and model.scale_values[3] == 1  # a constant feature
    scaled = matrix(model.transform(table)["scaled"])
    assert close(scaled[:, [0, 1, 3]], other.transform(ROWS)[:, [0, 1, 3]] * np.sqrt(999 / 1000))
    # Of 1e8 plus noise of 0.01, a mean in float64 is known to 1e-8 only, and scikit-learn's to 1e-7.
    noise = ROWS[:, 2] - 1e8
    assert np.allclose(scaled[:, 2], (noise - noise.mean()) / noise.std(ddof=1), atol=1e-6)


def test_the_max_abs_scaler_is_scikit_learn_s(table):
    model = MaxAbsScaler(inputCol="features", outputCol="scaled").fit(table)
    other = preprocessing.MaxAbsScaler().fit(ROWS)
    assert np.array_equal(model.max_abs_values, other.max_abs_)
    assert close(matrix(model.transform(table)["scaled"]), other.transform(ROWS))


def test_merged_statistics_are_those_of_all_rows(table, folder, cluster, monkeypatch):
    for name, value in cluster.items():
        monkeypatch.setenv(name, value)
    metrics = ["min", "max", "sum", "mean", "std", "count"]
    expected = {
        "min": ROWS.min(0), "max": ROWS.max(0), "sum": ROWS.sum(0), "mean": ROWS.mean(0), "std": ROWS.std(0, ddof=1), "count": 1000,
    }
    by_ranks = {"localBytes": 0, "numWorkers": 3}
    for dataset, options in [(table, {}), (folder, {}), (folder, by_ranks), (folder / "a.parquet", {}), (table, by_ranks)]:
        found = summarize_dataframe(dataset, "features", metrics, **options)
        if dataset == folder / "a.parquet":
            assert found["count"] == 300 and close(found["mean"], ROWS[:300].mean(0))
            continue
        for metric in metrics:
            # Of the third feature, which is 1e8 plus noise of 0.01, numpy's own deviation has 12 digits.
            assert np.allclose(found[metric], expected[metric], rtol=1e-11, atol=1e-12), metric


def test_a_smaller_cluster_than_this_machine_reads_with_the_ranks_that_it_has(folder, own_cluster, monkeypatch):
    from wingbeat.ml import InvalidParameter, _shards

    own_cluster.worker(cpus=1)
    for name, value in own_cluster.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(_shards, "local_cpus", lambda: 4)
    scaler = StandardScaler(inputCol="features", outputCol="scaled", localBytes=0)
    assert close(scaler.fit(str(folder)).mean_values, ROWS.mean(0))
    with pytest.raises(InvalidParameter, match="numWorkers is 2, and the cluster has no room .* can never be placed"):
        scaler.setNumWorkers(2).fit(str(folder))


def test_the_variance_of_large_numbers_keeps_its_digits():
    """Where Spark's sum of squares has none left."""
    rows = 1e9 + np.tile([[1.0], [2.0], [3.0], [4.0]], (50_000, 1))
    found = summarize_dataframe(pa.table({"x": list(rows)}), "x", ["std"])
    assert found["std"][0] == pytest.approx(np.sqrt(1.25 * 200_000 / 199_999), rel=1e-12)


def test_transform_gives_back_the_kind_that_it_got(table, folder, tmp_path):
    polars = pytest.importorskip("polars")
    model = StandardScaler(inputCol="features", outputCol="scaled").fit(table)
    expected = matrix(model.transform(table)["scaled"])
    frame = table.to_pandas().set_index(pd.Index(range(5, 1005), name="place"))
    scaled = model.transform(frame)
    assert isinstance(scaled, pd.DataFrame) and scaled.index.equals(frame.index) and "scaled" not in frame
    assert np.array_equal(matrix(scaled["scaled"]), expected)
    scaled = model.transform(polars.from_arrow(table))
    assert isinstance(scaled, polars.DataFrame) and np.array_equal(matrix(scaled["scaled"]), expected)
    scaled = model.transform(folder)
    assert scaled.schema.types == [pa.int64(), pa.list_(pa.float64()), pa.list_(pa.float64())]
    assert scaled["id"].to_pylist() == list(range(1000)) and np.array_equal(matrix(scaled["scaled"]), expected)
    out = tmp_path / "out.parquet"
    assert model.transform(str(folder), output=out) == out
    assert pq.read_table(out).equals(scaled) and list(tmp_path.iterdir()) == [out]


def test_an_output_appears_once_it_is_whole_also_in_an_object_store():
    import fsspec

    store = fsspec.filesystem("memory")
    rows = pa.table({"features": [[1.0]] * 5000 + [[2.0, 3.0]]})
    with store.open("/outputs/rows.parquet", "wb") as out:
        pq.write_table(rows.slice(0, 5000), out)
    model = MaxAbsScaler(inputCol="features", outputCol="scaled").fit("memory://outputs/rows.parquet")
    for path in ("memory://outputs/rows.parquet", "memory://outputs/new.parquet"):
        with pytest.raises(InvalidFeatures):
            model.transform(rows, output=path)
    assert [store.isfile(f"/outputs/{name}.parquet") for name in ("rows", "new")] == [True, False]
    model.transform("memory://outputs/rows.parquet", output="memory://outputs/rows.parquet")
    assert store.ls("/outputs", detail=False) == ["/outputs/rows.parquet"]
    with store.open("/outputs/rows.parquet") as file:
        assert pq.read_table(file).column_names == ["features", "scaled"]
    store.rm("/outputs", recursive=True)


def test_an_output_is_copied_where_a_store_cannot_rename_it(monkeypatch):
    import fsspec

    def refuse(*args, **kwargs):
        raise OSError("EntityTooLarge")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "mv", refuse)
    rows = pa.table({"features": [[1.0], [2.0]]})
    MaxAbsScaler(inputCol="features", outputCol="scaled").fit(rows).transform(rows, output="memory://copied/rows.parquet")
    store = fsspec.filesystem("memory")
    assert store.ls("/copied", detail=False) == ["/copied/rows.parquet"]
    assert summarize_dataframe("memory://copied", "scaled", ["max"])["max"] == [1]
    store.rm("/copied", recursive=True)


def test_columns_that_are_never_null_stay_so(tmp_path):
    schema = pa.schema([pa.field("id", pa.int64(), False), pa.field("features", pa.list_(pa.float64()), False)])
    rows = pa.table([[1, 2], [[1.0], [4.0]]], schema=schema)
    pq.write_table(rows, tmp_path / "rows.parquet")
    model = MaxAbsScaler(inputCol="features", outputCol="scaled").fit(rows)
    for found in (model.transform(rows), model.transform(tmp_path / "rows.parquet")):
        assert found["scaled"].to_pylist() == [[0.25], [1]]
        assert [field.nullable for field in found.schema] == [False, False, True]


def test_data_sets_are_read_from_urls_and_lists_of_paths(folder, table):
    import fsspec

    count = lambda dataset: summarize_dataframe(dataset, "features", ["count"])["count"]  # noqa: E731
    assert count(f"file://{folder}") == 1000
    assert count([str(folder / "a.parquet"), folder / "b.parquet"]) == 301
    with fsspec.open("memory://here/rows.parquet", "wb") as out:
        pq.write_table(table, out)
    assert count("memory://here") == 1000


def test_columns_may_be_of_any_numbers_and_any_arrays():
    expected = np.arange(8.0).reshape(4, 2)
    for values in (
        pa.array(expected.tolist(), pa.list_(pa.int8())),
        pa.array(expected.tolist(), pa.large_list(pa.float32())),
        pa.array(expected.tolist(), pa.list_(pa.float64(), 2)),
        pa.FixedShapeTensorArray.from_numpy_ndarray(expected),
    ):
        found = summarize_dataframe(pa.table({"x": values}).slice(1), "x", ["mean"])
        assert np.array_equal(found["mean"], expected[1:].mean(0)), values.type
    turned = pa.fixed_shape_tensor(pa.float64(), [2, 2], permutation=[1, 0])
    values = pa.ExtensionArray.from_storage(turned, pa.array([[1.0, 2.0, 3.0, 4.0]], pa.list_(pa.float64(), 4)))
    with pytest.raises(InvalidFeatures, match=r"stored in the order \[1, 0\]"):
        summarize_dataframe(pa.table({"x": values}), "x", ["mean"])


def test_the_assembler_joins_numbers_and_arrays():
    data = pa.table({"a": [[2.0, 3.5], [-3.0, None]], "b": pa.array([3, None]), "c": [True, False]})
    assembler = ArrayAssembler(inputCols=["a", "b", "c"], outputCol="out", featureSizes=[2, 1, 1])
    with pytest.raises(InvalidFeatures, match="column 'a', row 1: element 1 is null or NaN"):
        assembler.transform(data)
    kept = matrix(assembler.setHandleInvalid("keep").transform(data)["out"])
    assert np.array_equal(kept, [[2, 3.5, 3, 1], [-3, np.nan, np.nan, 0]], equal_nan=True)
    assert matrix(assembler.transform(data.slice(0, 1).to_pandas())["out"]).tolist() == [[2, 3.5, 3, 1]]
    nulls = pa.table({"a": pa.array([None, [1.0, 2.0]]), "b": [1, 2], "c": [1, 2]})
    assert np.isnan(matrix(assembler.transform(nulls)["out"])[0, :2]).all()
    with pytest.raises(InvalidFeatures, match="row 0: the array has 2 elements, and needs 3"):
        assembler.setFeatureSizes([3, 1, 1]).transform(data)
    with pytest.raises(InvalidFeatures, match="column 'b' holds numbers, and its featureSize is 2"):
        assembler.setFeatureSizes([2, 2, 1]).transform(data)
    with pytest.raises(InvalidParameter, match="3 inputCols, and 2 featureSizes"):
        assembler.setFeatureSizes([2, 1]).transform(data)
    with pytest.raises(InvalidParameter, match="invalid handleInvalid: 'keeps' is not one of 'error', 'keep'; did you mean 'keep'?"):
        assembler.setHandleInvalid("keeps")


def test_bad_input_is_named(table, tmp_path):
    scaler = StandardScaler(inputCol="features", outputCol="scaled")
    with pytest.raises(MissingColumn, match="no column 'feature'; did you mean 'features'?") as raised:
        scaler.fit(table, {scaler.inputCol: "feature"})
    assert (raised.value.column, raised.value.nearest) == ("feature", "features")
    with pytest.raises(ExistingColumn, match="would write the column 'id', which the data set has already"):
        scaler.fit(table).transform(table, {scaler.outputCol: "id"})
    again = Pipeline(stages=[scaler, MaxAbsScaler(inputCol="features", outputCol="scaled")])
    with pytest.raises(ExistingColumn, match="the column 'scaled', which StandardScalerModel writes already"):
        again.fit(table).transform(table)
    with pytest.raises(EmptyDataset):
        scaler.fit(table.slice(0, 0))
    with pytest.raises(TooFewRows, match="needs two rows"):
        scaler.fit(table.slice(0, 1))
    with pytest.raises(InvalidFeatures, match="row 1: element 0 is null or NaN"):
        scaler.fit(pa.table({"features": [[1.0], [float("nan")]]}))
    with pytest.raises(InvalidFeatures, match="the std of feature 1 is beyond the range of float64"):
        scaler.fit(pa.table({"features": [[1.0, 1e200], [2.0, -1e200]]}))
    with pytest.raises(InvalidFeatures, match="holds string, and no arrays"):
        scaler.fit(pa.table({"features": ["a"]}))
    with pytest.raises(DatasetError, match="holds values of several kinds"):
        scaler.fit(pd.DataFrame({"features": [[1.0], "a"]}))
    with pytest.raises(InvalidParameter, match="needs inputCol"):
        StandardScaler().fit(table)
    with pytest.raises(UnsupportedDataset, match="this is a builtins.int"):
        scaler.fit(3)
    with pytest.raises(UnreadableFile, match="no file whose name ends with .parquet"):
        scaler.fit(tmp_path)
    with pytest.raises(UnreadableFile, match="cannot open nowhere://rows.parquet"):
        scaler.fit("nowhere://rows.parquet")
    (tmp_path / "twice").mkdir()
    for number in range(2):
        pq.write_table(pa.Table.from_arrays([pa.array([1.0, 2.0])] * 2, ["x", "x"]), tmp_path / "twice" / f"{number}.parquet")
        for call in (lambda: scaler.fit(tmp_path / "twice", {scaler.inputCol: "x"}), lambda: open_source(tmp_path / "twice").table()):
            with pytest.raises(DatasetError, match="0.parquet.* has 2 columns of the name 'x': rename them"):
                call()
    pq.write_table(table, tmp_path / "a.parquet")
    pq.write_table(table.cast(pa.schema([("id", pa.int32()), table.schema.field("features")])), tmp_path / "b.parquet")
    with pytest.raises(SchemaMismatch, match="b.parquet has the column 'id' of type int32; the first file, .*a.parquet, has"):
        scaler.fit(tmp_path)


def test_a_row_of_several_files_is_named_with_its_file(tmp_path):
    for name, rows in (("a", [[1.0], [2.0]]), ("b", [[1.0], [None], [3.0]])):
        pq.write_table(pa.table({"features": rows}), tmp_path / f"{name}.parquet")
    for estimator in (
        StandardScaler(inputCol="features", outputCol="scaled"),
        Pipeline(stages=[ArrayAssembler(inputCols=["features"], outputCol="both", featureSizes=[1])]),
    ):
        with pytest.raises(InvalidFeatures, match=r"column 'features', row 3 \(row 1 of .*b.parquet\): ") as raised:
            model = estimator.fit(tmp_path)
            model.transform(tmp_path)
        assert raised.value.row == 3
    with pytest.raises(InvalidFeatures, match="column 'features', row 1: "):
        StandardScaler(inputCol="features", outputCol="scaled").fit(tmp_path / "b.parquet")


def test_models_of_scalers_keep_what_is_no_number(table):
    model = StandardScaler(inputCol="features", outputCol="scaled").fit(pa.table({"features": [[0.0, 0.0], [2.0, 2.0]]}))
    rows = pa.table({"features": [[None, float("inf")], [float("nan"), 1.0]]})
    assert np.array_equal(matrix(model.transform(rows)["scaled"]), [[np.nan, np.inf], [np.nan, 0]], equal_nan=True)
    with pytest.raises(InvalidFeatures, match="row 1: the array is null"):
        model.transform(pa.table({"features": [[1.0, 2.0], None]}))


def test_fit_takes_a_param_map_and_leaves_the_estimator_as_it_is(table):
    scaler = MaxAbsScaler(outputCol="scaled")
    assert scaler.fit(table, {scaler.inputCol: "features"}).getInputCol() == "features"
    assert scaler.fit(table, {"inputCol": "features"}).getInputCol() == "features"
    assert not scaler.isDefined(scaler.inputCol)
    assert scaler.copy({scaler.outputCol: "other"}).getOutputCol() == "other" and scaler.getOutputCol() == "scaled"
    with pytest.raises(TypeError, match="params must be a param map"):
        scaler.fit(table, [{}])
    assert "outputCol: output column (default: " in scaler.explainParams()


def test_what_is_no_table_or_has_two_columns_of_a_name_is_named(table):
    polars = pytest.importorskip("polars")
    model = StandardScaler(inputCol="features", outputCol="scaled").fit(table)
    for series in (polars.Series("features", [[1.0, 2.0, 3.0]]), pd.Series([1.0])):
        with pytest.raises(UnsupportedDataset, match=r"Series: call .to_frame\(\)"):
            model.transform(series)
    frame = table.to_pandas()[["features"]]
    with pytest.raises(DatasetError, match="2 columns of the name 'features'"):
        model.transform(pd.concat([frame, frame], axis=1))
    with pytest.raises(DatasetError, match="2 columns of the name 'features'"):
        model.transform(pa.Table.from_arrays([table["features"]] * 2, ["features", "features"]))
