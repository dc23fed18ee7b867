"""Saving and loading: what pyspark has written, and what it would read."""

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from wingbeat.ml import MlError, Pipeline, PipelineModel
from wingbeat.ml.classification import LogisticRegression, LogisticRegressionModel
from wingbeat.ml.evaluation import MulticlassClassificationEvaluator, RegressionEvaluator
from wingbeat.ml.feature import ArrayAssembler, MaxAbsScaler, MaxAbsScalerModel, StandardScaler, StandardScalerModel
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
    for name, value, text in [("type", "other", "was not saved by"), ("class", "os.path", "does not have"), ("class", "no.such.C", "imported")]:
        metadata = json.loads((tmp_path / "classifier/metadata.json").read_text())
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other/metadata.json").write_text(json.dumps({**metadata, name: value}))
        with pytest.raises(MlError, match=text):
            LogisticRegressionModel.loadFromLocal(tmp_path / "other")


@pytest.mark.parametrize("name, kind", [("pipeline", PipelineModel), ("validator", CrossValidatorModel)])
def test_models_that_pyspark_4_0_1_has_saved_predict_as_they_do_there(name, kind):
    folder = Path(__file__).parent / "spark_models"
    expected = json.loads((folder / "expected.json").read_text())
    rows = pa.table({"features": expected["features"], "label": expected["label"]})
    found = kind.loadFromLocal(folder / name).transform(rows)
    assert found["prediction"].to_pylist() == expected[name]["prediction"]
    assert np.allclose(np.stack(found["probability"].to_numpy()), expected[name]["probability"], atol=1e-6)
