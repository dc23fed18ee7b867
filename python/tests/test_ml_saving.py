"""Saving and loading: what pyspark has written, and what it would read."""

import inspect
import json
import os
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from wingbeat.ml import InvalidParameter, MlError, Pipeline, PipelineModel, _sklearn
from wingbeat.ml.classification import LogisticRegression, LogisticRegressionModel
from wingbeat.ml.evaluation import BinaryClassificationEvaluator, MulticlassClassificationEvaluator, RegressionEvaluator
from wingbeat.ml.feature import ArrayAssembler, MaxAbsScaler, MaxAbsScalerModel, StandardScaler, StandardScalerModel
from wingbeat.ml.param import Param
from wingbeat.ml.tuning import CrossValidator, CrossValidatorModel, ParamGridBuilder

ROWS = np.random.default_rng(0).normal(size=(40, 3))


@pytest.fixture(scope="module")
def table():
    return pa.table({"features": list(ROWS), "label": (ROWS[:, 0] > 0).astype(int)})


def stages():
    return [
        MaxAbsScaler(inputCol="features", outputCol="largest"),
        StandardScaler(inputCol="largest", outputCol="scaled", localBytes=5),
        ArrayAssembler(inputCols=["scaled", "label"], outputCol="joined", featureSizes=[3, 1]),
        LogisticRegression(featuresCol="joined", maxIter=2, localBytes=10_000_000),
    ]


def only_spark_s(folder):
    """Leaves what Spark would have written."""
    for name in os.listdir(folder):
        if name.endswith(".safetensors"):
            os.remove(folder / name)
    metadata = json.loads((folder / "metadata.json").read_text())
    metadata.pop("wingbeatParamMap"), metadata.pop("wingbeatVersion")
    (folder / "metadata.json").write_text(json.dumps(metadata))


@pytest.mark.parametrize("is_spark", [False, True], ids=["ours", "Spark's files only"])
def test_models_come_back_as_they_were(table, tmp_path, is_spark):
    model = Pipeline(stages=stages()).fit(table)
    model.saveToLocal(tmp_path / "model")
    if is_spark:
        only_spark_s(tmp_path / "model")
    loaded = PipelineModel.loadFromLocal(tmp_path / "model")
    assert loaded.uid == model.uid and [stage.uid for stage in loaded.stages] == [stage.uid for stage in model.stages]
    assert [type(stage) for stage in loaded.stages] == [MaxAbsScalerModel, StandardScalerModel, ArrayAssembler, LogisticRegressionModel]
    expected, found = model.transform(table), loaded.transform(table)
    assert found.column_names == expected.column_names
    for name in ("scaled", "probability"):
        assert np.allclose(np.stack(found[name].to_numpy()), np.stack(expected[name].to_numpy()), rtol=1e-12)
    assert (loaded.stages[3].numFeatures, loaded.stages[3].numClasses, loaded.stages[1].n_samples_seen) == (4, 2, 40)


# What pyspark.ml.connect 4.0.1 takes, and what it has by default.
OF_SPARK = {
    StandardScaler: {"inputCol": None, "outputCol": None},
    MaxAbsScaler: {"inputCol": None, "outputCol": None},
    ArrayAssembler: {"inputCols": None, "outputCol": None, "featureSizes": None, "handleInvalid": "error"},
    LogisticRegression: {
        "featuresCol": "features", "labelCol": "label", "predictionCol": "prediction", "probabilityCol": "probability", "maxIter": 100,
        "tol": 1e-6, "numTrainWorkers": 1, "batchSize": 32, "learningRate": 0.001, "momentum": 0.9, "seed": 0,
    },
    RegressionEvaluator: {"metricName": "rmse", "labelCol": "label", "predictionCol": "prediction"},
    BinaryClassificationEvaluator: {"metricName": "areaUnderROC", "labelCol": "label", "probabilityCol": "probability"},
    MulticlassClassificationEvaluator: {"metricName": "accuracy", "labelCol": "label", "predictionCol": "prediction"},
    CrossValidator: {
        "estimator": None, "estimatorParamMaps": None, "evaluator": None, "numFolds": 3, "seed": None, "parallelism": 1, "foldCol": "",
    },
    Pipeline: {"stages": None},
}
# Wingbeat's own, which come after those.
OWN = {"localBytes", "numWorkers", "useGpu", "skipFailedTrials", "collectSubModels", "fitIntercept", "weightCol"}


@pytest.mark.parametrize("kind", OF_SPARK, ids=lambda kind: kind.__name__)
def test_classes_have_spark_s_parameters_with_spark_s_defaults(kind):
    taken = {name: one.default for name, one in inspect.signature(kind).parameters.items()}
    expected = OF_SPARK[kind]
    assert {name: taken[name] for name in expected} == expected and set(taken) - set(expected) <= OWN
    assert list(taken)[: len(expected)] == list(expected)
    for name in expected:
        upper = name[0].upper() + name[1:]
        assert callable(getattr(kind, f"get{upper}")) and isinstance(getattr(kind, name), Param), name


def test_the_folder_has_spark_s_layout(table, tmp_path):
    """The files and keys that `pyspark/ml/connect/io_utils.py` of Spark 4.0.1 reads."""
    Pipeline(stages=stages()).fit(table).saveToLocal(tmp_path / "model")
    assert sorted(os.listdir(tmp_path / "model")) == [
        "metadata.json",
        "pipeline_stage_0.MaxAbsScalerModel.safetensors",
        "pipeline_stage_0.MaxAbsScalerModel.sklearn.pkl",
        "pipeline_stage_1.StandardScalerModel.safetensors",
        "pipeline_stage_1.StandardScalerModel.sklearn.pkl",
        "pipeline_stage_3.LogisticRegressionModel.safetensors",
        "pipeline_stage_3.LogisticRegressionModel.torch",
    ]
    metadata = json.loads((tmp_path / "model/metadata.json").read_text())
    assert metadata["class"] == "pyspark.ml.connect.pipeline.PipelineModel" and metadata["type"] == "spark_connect"
    scaler, classifier = metadata["stages"][1], metadata["stages"][3]
    assert scaler["core_model_path"] == "pipeline_stage_1.StandardScalerModel.sklearn.pkl"
    assert scaler["paramMap"] == {"inputCol": "largest", "outputCol": "scaled"}
    assert classifier["extra"] == {"num_features": 4, "num_classes": 2}
    assert set(classifier["defaultParamMap"]) == {
        "featuresCol", "labelCol", "predictionCol", "probabilityCol", "maxIter", "tol", "fitIntercept", "numTrainWorkers", "batchSize",
        "learningRate", "momentum", "seed",
    }  # fmt: skip
    with open(tmp_path / "model" / scaler["core_model_path"], "rb") as file:
        found = pickle.load(file)
    assert type(found).__name__ == "StandardScaler" and found.n_samples_seen_ == 40 and found.n_features_in_ == 3


def test_estimators_and_evaluators_are_saved_with_wingbeat_s_own_parameters(tmp_path):
    pipeline = Pipeline(stages=stages())
    pipeline.saveToLocal(tmp_path / "pipeline")
    loaded = Pipeline.loadFromLocal(tmp_path / "pipeline")
    assert loaded.getStages()[1].getLocalBytes() == 5 and loaded.getStages()[2].getFeatureSizes() == [3, 1]
    assert not loaded.getStages()[3].isSet("weightCol") and loaded.getStages()[3].getMaxIter() == 2
    RegressionEvaluator(metricName="r2").saveToLocal(tmp_path / "evaluator")
    assert RegressionEvaluator.loadFromLocal(tmp_path / "evaluator").getMetricName() == "r2"


def test_cross_validators_are_saved_with_their_maps_and_metrics(table, tmp_path):
    classifier = LogisticRegression(maxIter=1)
    estimator = Pipeline(stages=[classifier])
    grid = ParamGridBuilder().addGrid(classifier.learningRate, [0.1, 0.2]).build()
    validator = CrossValidator(
        estimator=estimator, evaluator=MulticlassClassificationEvaluator(), estimatorParamMaps=grid, collectSubModels=True
    )
    model = validator.fit(table)
    model.saveToLocal(tmp_path / "model")
    validator.saveToLocal(tmp_path / "validator")
    loaded = CrossValidatorModel.loadFromLocal(tmp_path / "model")
    assert (loaded.avgMetrics, loaded.stdMetrics) == (model.avgMetrics, model.stdMetrics)
    assert loaded.transform(table).equals(model.transform(table))
    again = CrossValidator.loadFromLocal(tmp_path / "validator")
    assert again.getEstimatorParamMaps() == grid and again.getCollectSubModels()
    assert again.fit(table).avgMetrics == model.avgMetrics


def test_what_is_there_is_replaced_only_if_asked(table, tmp_path):
    model = StandardScaler(inputCol="features", outputCol="scaled").fit(table)
    model.saveToLocal(tmp_path / "model")
    with pytest.raises(FileExistsError, match="pass overwrite=True"):
        model.saveToLocal(tmp_path / "model")
    model.setOutputCol("other").saveToLocal(tmp_path / "model", overwrite=True)
    assert StandardScalerModel.loadFromLocal(tmp_path / "model").getOutputCol() == "other"
    assert os.listdir(tmp_path) == ["model"]


def test_models_are_saved_in_object_stores(table):
    model = StandardScaler(inputCol="features", outputCol="scaled").fit(table)
    model.save("memory://models/scaler")
    with pytest.raises(FileExistsError):
        model.save("memory://models/scaler")
    model.save("memory://models/scaler", overwrite=True)
    assert np.array_equal(StandardScalerModel.load("memory://models/scaler").mean_values, model.mean_values)


def test_a_scaler_s_file_gives_numpy_nothing_but_numbers(table, tmp_path):
    StandardScaler(inputCol="features", outputCol="scaled").fit(table).saveToLocal(tmp_path / "model")
    only_spark_s(tmp_path / "model")
    file = tmp_path / "model/StandardScalerModel.sklearn.pkl"

    def text(value):
        return b"X" + len(value).to_bytes(4, "little") + value.encode()

    def array(kind, state):
        dtype = b"cnumpy\ndtype\n" + text(kind) + b"\x89\x88\x87R" + state
        made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
        return made + b"(K\x01K\x01\x85" + dtype + b"\x89C\x08" + b"A" * 8 + b"tb"

    cleared = b"(K\x03" + text("|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    for kind in ("O8", "V8", "S8"):
        scaler = b"csklearn.preprocessing._data\nStandardScaler\n)\x81}(" + text("var_") + array(kind, cleared) + b"ub."
        file.write_bytes(b"\x80\x04" + scaler)
        with pytest.raises(MlError, match="and no numbers; it is not loaded"):
            StandardScalerModel.loadFromLocal(tmp_path / "model")
    for changed in (b"cnumpy\ndtype\n}" + text("x") + b"K\x01sb.", b"csklearn.preprocessing._data\nStandardScaler\n}b.", b"K\x01.", b""):
        file.write_bytes(b"\x80\x04" + changed)
        with pytest.raises(MlError):
            StandardScalerModel.loadFromLocal(tmp_path / "model")


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_scalers_of_scikit_learn_are_read_from_any_pickle(tmp_path, protocol):
    from sklearn.preprocessing import MaxAbsScaler, StandardScaler

    rows = np.random.default_rng(0).normal(size=(50, 3))
    standard, largest = StandardScaler().fit(rows), MaxAbsScaler().fit(rows)
    for scaler in (standard, largest):
        (tmp_path / type(scaler).__name__).write_bytes(pickle.dumps(scaler, protocol))
    read = _sklearn.read_standard(tmp_path / "StandardScaler")
    assert np.array_equal(read["mean"], standard.mean_) and np.array_equal(read["scale"], standard.scale_) and read["count"] == [50]
    assert np.array_equal(_sklearn.read_max_abs(tmp_path / "MaxAbsScaler")["max_abs"], largest.max_abs_)


def test_a_file_of_another_kind_is_refused_and_runs_no_code(table, tmp_path):
    with pytest.raises(FileNotFoundError):
        PipelineModel.loadFromLocal(tmp_path)
    model = StandardScaler(inputCol="features", outputCol="scaled").fit(table)
    model.saveToLocal(tmp_path / "model")
    with pytest.raises(MlError, match="holds a StandardScalerModel, and no PipelineModel"):
        PipelineModel.loadFromLocal(tmp_path / "model")
    only_spark_s(tmp_path / "model")
    with open(tmp_path / "model/StandardScalerModel.sklearn.pkl", "wb") as out:
        pickle.dump(os.getcwd, out)
    with pytest.raises(MlError, match="names posix.getcwd, which no scaler does"):
        StandardScalerModel.loadFromLocal(tmp_path / "model")
    classifier = LogisticRegression(maxIter=1).fit(table)
    classifier.saveToLocal(tmp_path / "classifier")
    only_spark_s(tmp_path / "classifier")
    (tmp_path / "classifier/LogisticRegressionModel.torch").write_bytes(pickle.dumps(os.getcwd, protocol=2))
    with pytest.raises(MlError, match="holds no logistic regression of Spark"):
        LogisticRegressionModel.loadFromLocal(tmp_path / "classifier")
    for name, value, text in [("type", "other", "was not saved by"), ("class", "os.path", "does not have"), ("class", "no.such.C", "import its module")]:
        metadata = json.loads((tmp_path / "classifier/metadata.json").read_text())
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other/metadata.json").write_text(json.dumps({**metadata, name: value}))
        with pytest.raises(MlError, match=text):
            LogisticRegressionModel.loadFromLocal(tmp_path / "other")


def damage(name, change):
    """Changes a file of a saved object."""

    def damaged(folder):
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return damaged


def without(key):
    def change(data):
        metadata = json.loads(data)
        del metadata[key]
        return json.dumps(metadata).encode()

    return damage("metadata.json", change)


@pytest.mark.parametrize(
    "damaged, match",
    [
        (without("class"), "it has no 'class'"),
        (without("uid"), "it has no 'uid'"),
        (damage("metadata.json", lambda data: b"[]"), "no object of JSON"),
        (damage("metadata.json", lambda data: data[:9]), "JSONDecodeError"),
        (damage("LogisticRegressionModel.safetensors", lambda data: data[:5]), "LogisticRegressionModel.safetensors is damaged"),
        (damage("metadata.json", lambda data: data.replace(b'"num_features": 3', b'"num_features": 4')), "2 classes of 4 features"),
    ],
)
@pytest.mark.parametrize("is_stored", [False, True])
def test_errors_of_damaged_objects_name_the_folder(table, tmp_path, damaged, match, is_stored):
    LogisticRegression(maxIter=1).fit(table).saveToLocal(tmp_path / "model")
    damaged(tmp_path / "model")
    load = LogisticRegressionModel.load if is_stored else LogisticRegressionModel.loadFromLocal
    with pytest.raises(MlError, match=f"model cannot be loaded: .*{match}"):
        load(str(tmp_path / "model"))


def test_a_torch_file_with_something_else_is_named(table, tmp_path):
    import torch

    LogisticRegression(maxIter=1).fit(table).saveToLocal(tmp_path / "model")
    only_spark_s(tmp_path / "model")
    torch.save(torch.zeros(2), tmp_path / "model/LogisticRegressionModel.torch")
    with pytest.raises(MlError, match="LogisticRegressionModel.torch .*no logistic regression of Spark, but a Tensor"):
        LogisticRegressionModel.loadFromLocal(tmp_path / "model")


def test_loading_imports_no_module_that_a_file_names(table, tmp_path, monkeypatch):
    """In a notebook, a folder of the current one is a package, and so is a folder that a model was unpacked to."""
    StandardScaler(inputCol="features", outputCol="scaled").fit(table).saveToLocal(tmp_path / "model")
    metadata = json.loads((tmp_path / "model/metadata.json").read_text())
    (tmp_path / "model/metadata.json").write_text(json.dumps({**metadata, "class": "model.evil.X"}))
    (tmp_path / "model/evil.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MlError, match="does not have"):
        StandardScalerModel.loadFromLocal("model")
    assert "model.evil" not in sys.modules and not (tmp_path / "ran").exists()


class Own(StandardScaler):
    """A class of a user."""


def test_classes_that_the_program_has_imported_are_loaded(tmp_path):
    Own(inputCol="features", outputCol="scaled").saveToLocal(tmp_path / "own")
    assert type(StandardScaler.loadFromLocal(tmp_path / "own")) is Own


@pytest.mark.parametrize("save", ["save", "saveToLocal"])
def test_only_saved_objects_are_replaced(tmp_path, monkeypatch, save):
    scaler = StandardScaler(inputCol="features", outputCol="scaled")
    (tmp_path / "work/inner").mkdir(parents=True)
    (tmp_path / "work/thesis").write_text("years")
    monkeypatch.chdir(tmp_path / "work")
    for path in ("", ".", "..", "/"):
        with pytest.raises(ValueError, match="cannot save in"):
            getattr(scaler, save)(path, overwrite=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/metadata.json").write_text("[]")
    for path, text in [("../other", "no saved object"), ("thesis", "is no folder")]:
        with pytest.raises(FileExistsError, match=text):
            getattr(scaler, save)(path, overwrite=True)
    getattr(scaler, save)("inner", overwrite=True)
    assert sorted(os.listdir()) == ["inner", "thesis"] and StandardScaler.loadFromLocal("inner").uid == scaler.uid


def test_only_saved_objects_are_replaced_in_object_stores():
    import fsspec

    scaler = StandardScaler(inputCol="features", outputCol="scaled")
    store = fsspec.filesystem("memory")
    store.pipe_file("/bucket/thesis", b"years")
    for path, kind in [("memory://", ValueError), ("memory://bucket", FileExistsError), ("memory://bucket/thesis", FileExistsError)]:
        with pytest.raises(kind):
            scaler.save(path, overwrite=True)
    assert store.cat_file("/bucket/thesis") == b"years"
    store.rm("/bucket", recursive=True)


class Unsavable(StandardScaler):
    def _extra(self):
        return {"a": object()}


@pytest.mark.parametrize("root", ["memory://unsavable", None], ids=["object store", "here"])
def test_what_cannot_be_written_replaces_nothing(tmp_path, root):
    path = f"{root or tmp_path}/model"
    scaler = StandardScaler(inputCol="features", outputCol="scaled")
    scaler.save(path)
    with pytest.raises(TypeError):
        Unsavable(inputCol="features", outputCol="scaled").save(path, overwrite=True)
    assert StandardScaler.load(path).uid == scaler.uid


def test_a_folder_that_appears_while_an_object_is_saved_stays(tmp_path):
    class Slow(StandardScaler):
        def _extra(self):
            (tmp_path / "model").mkdir()
            (tmp_path / "model/of another").touch()

    with pytest.raises(FileExistsError, match="made by another"):
        Slow(inputCol="features", outputCol="scaled").saveToLocal(tmp_path / "model")
    assert os.listdir(tmp_path / "model") == ["of another"] and os.listdir(tmp_path) == ["model"]


def test_the_old_object_is_back_if_the_new_one_cannot_take_its_place(tmp_path, monkeypatch):
    scaler = StandardScaler(inputCol="features", outputCol="scaled")
    scaler.saveToLocal(tmp_path / "model")
    rename = os.rename

    def fails(source, target):
        if os.path.basename(source) == "made":
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(KeyboardInterrupt):
        StandardScaler(inputCol="features", outputCol="scaled").saveToLocal(tmp_path / "model", overwrite=True)
    assert StandardScaler.loadFromLocal(tmp_path / "model").uid == scaler.uid and os.listdir(tmp_path) == ["model"]


def test_numpy_numbers_in_param_maps_are_saved(tmp_path):
    classifier = LogisticRegression()
    maps = [{classifier.maxIter: np.int64(3), classifier.tol: np.float32(0.5)}]
    validator = CrossValidator(estimator=classifier, evaluator=RegressionEvaluator(), estimatorParamMaps=maps)
    validator.saveToLocal(tmp_path / "validator")
    assert CrossValidator.loadFromLocal(tmp_path / "validator").getEstimatorParamMaps() == maps
    with pytest.raises(TypeError, match="the key 'maxIter' is not a parameter"):
        validator.setEstimatorParamMaps([{"maxIter": 3}])


def test_spark_s_files_are_loaded_by_several_threads(table, tmp_path):
    LogisticRegression(maxIter=1).fit(table).saveToLocal(tmp_path / "model")
    only_spark_s(tmp_path / "model")
    with ThreadPoolExecutor(8) as threads:
        assert len(list(threads.map(LogisticRegressionModel.loadFromLocal, [tmp_path / "model"] * 64))) == 64


@pytest.mark.parametrize("name, kind", [("pipeline", PipelineModel), ("validator", CrossValidatorModel)])
def test_models_that_pyspark_4_0_1_has_saved_predict_as_they_do_there(name, kind):
    folder = Path(__file__).parent / "spark_models"
    expected = json.loads((folder / "expected.json").read_text())
    rows = pa.table({"features": expected["features"], "label": expected["label"]})
    found = kind.loadFromLocal(folder / name).transform(rows)
    assert found["prediction"].to_pylist() == expected[name]["prediction"]
    assert np.allclose(np.stack(found["probability"].to_numpy()), expected[name]["probability"], atol=1e-6)


def test_estimators_models_and_evaluators_can_be_pickled(table):
    pipeline = Pipeline(stages=stages())
    validator = CrossValidator(
        estimator=pipeline, evaluator=MulticlassClassificationEvaluator(), estimatorParamMaps=[{pipeline.getStages()[-1].maxIter: 2}]
    )
    model = validator.fit(table)
    for one in (validator, pipeline, model, RegressionEvaluator(metricName="mse"), *pipeline.getStages(), *model.bestModel.stages):
        copy = pickle.loads(pickle.dumps(one))
        assert copy.uid == one.uid and copy.explainParams().count("\n") == one.explainParams().count("\n")
    copy = pickle.loads(pickle.dumps(model))
    assert copy.transform(table).equals(model.transform(table))
    with pytest.raises(InvalidParameter, match="invalid maxIter: -1"):
        pickle.loads(pickle.dumps(LogisticRegression())).setMaxIter(-1)
