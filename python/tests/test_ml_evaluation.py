"""Evaluators, beside scikit-learn's metrics."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn import metrics

from wingbeat.ml import EmptyDataset, InvalidFeatures, InvalidLabels, InvalidParameter, MissingColumn, OneClass, TooFewRows
from wingbeat.ml.evaluation import (
    BinaryClassificationEvaluator,
    MulticlassClassificationEvaluator,
    RegressionEvaluator,
)

RANDOM = np.random.default_rng(0)


def test_regression_is_scikit_learn_s():
    labels = 1e6 + RANDOM.normal(size=200_000)  # several batches
    data = pa.table({"label": labels, "prediction": labels + RANDOM.normal(size=len(labels))})
    pair = data["label"].to_numpy(), data["prediction"].to_numpy()
    evaluate = lambda name: RegressionEvaluator(metricName=name).evaluate(data)  # noqa: E731
    assert evaluate("mse") == pytest.approx(metrics.mean_squared_error(*pair), rel=1e-9)
    assert evaluate("rmse") == pytest.approx(metrics.mean_squared_error(*pair) ** 0.5, rel=1e-9)
    assert evaluate("r2") == pytest.approx(metrics.r2_score(*pair), rel=1e-9)
    assert RegressionEvaluator().getMetricName() == "rmse" and not RegressionEvaluator().isLargerBetter()
    assert RegressionEvaluator(metricName="r2").isLargerBetter()
    # Spark's documentation
    assert RegressionEvaluator(metricName="mse").evaluate(pa.table({"label": [1.0, -1.0], "prediction": [2.0, -1.5]})) == 0.625


@pytest.mark.parametrize("digits", [1, 3, 17])
def test_areas_are_scikit_learn_s_also_with_ties(digits):
    labels = RANDOM.integers(2, size=150_000)
    scores = np.round(RANDOM.normal(size=len(labels)) + labels, digits)
    data = pa.table({"label": labels, "probability": scores})
    assert BinaryClassificationEvaluator().evaluate(data) == pytest.approx(metrics.roc_auc_score(labels, scores), abs=1e-12)
    found = BinaryClassificationEvaluator(metricName="areaUnderPR").evaluate(data)
    assert found == pytest.approx(metrics.average_precision_score(labels, scores), abs=1e-12)


def test_the_area_of_spark_s_documentation_and_of_arrays_of_probabilities():
    scores = np.array([0.6, 0.55, 0.1, 0.6, 0.4])
    labels = [1, 0, 0, 1, 1]
    evaluator = BinaryClassificationEvaluator(metricName="areaUnderPR")
    assert evaluator.evaluate(pa.table({"label": labels, "probability": scores})) == pytest.approx(0.9166666865, abs=1e-7)
    both = pa.table({"label": labels, "probability": list(np.stack([1 - scores, scores], 1))})
    assert evaluator.evaluate(both.to_pandas()) == pytest.approx(0.9166666865, abs=1e-7)


def test_accuracy():
    data = pa.table({"label": [1, 0, 2, 1, 2], "prediction": [1.0, 0.0, 2.0, 0.0, 1.0]})
    assert MulticlassClassificationEvaluator().evaluate(data) == 0.6
    assert MulticlassClassificationEvaluator(labelCol="prediction").evaluate(data) == 1.0


def test_ranks_find_what_one_process_finds(cluster, monkeypatch, tmp_path):
    for name, value in cluster.items():
        monkeypatch.setenv(name, value)
    labels = RANDOM.integers(2, size=1000)
    scores = np.round(RANDOM.normal(size=1000) + labels, 1)
    data = pa.table({"label": labels, "probability": scores, "prediction": scores})
    pq.write_table(data, tmp_path / "rows.parquet", row_group_size=90)
    for evaluator in (BinaryClassificationEvaluator(), RegressionEvaluator(metricName="r2")):
        alone = evaluator.evaluate(tmp_path / "rows.parquet")
        options = {evaluator.localBytes: 0, evaluator.numWorkers: 2}
        assert evaluator.evaluate(tmp_path / "rows.parquet", options) == pytest.approx(alone, rel=1e-12)


def test_bad_input_is_named():
    regression, binary = RegressionEvaluator(), BinaryClassificationEvaluator()
    with pytest.raises(InvalidParameter, match="invalid metricName: 'rms' is not one of 'rmse', 'mse', 'r2'; did you mean 'rmse'?"):
        RegressionEvaluator(metricName="rms")
    with pytest.raises(MissingColumn, match="no column 'prediction'"):
        regression.evaluate(pa.table({"label": [1.0], "predicted": [1.0]}))
    with pytest.raises(EmptyDataset):
        regression.evaluate(pa.table({"label": pa.array([], pa.float64()), "prediction": pa.array([], pa.float64())}))
    with pytest.raises(InvalidLabels, match="column 'label', row 1: the label is null or NaN"):
        regression.evaluate(pa.table({"label": [1.0, None], "prediction": [1.0, 1.0]}))
    with pytest.raises(InvalidFeatures, match="column 'prediction', row 1: the value is null or NaN"):
        regression.evaluate(pa.table({"label": [1.0, 1.0], "prediction": [1.0, float("nan")]}))
    with pytest.raises(TooFewRows):
        regression.setMetricName("r2").evaluate(pa.table({"label": [1.0], "prediction": [1.0]}))
    with pytest.raises(OneClass, match="all rows have the label 1"):
        binary.evaluate(pa.table({"label": [1, 1], "probability": [0.1, 0.2]}))
    with pytest.raises(InvalidLabels, match="row 1: the label is 2, and has to be 0 or 1"):
        binary.evaluate(pa.table({"label": [1, 2], "probability": [0.1, 0.2]}))
    with pytest.raises(InvalidFeatures, match="arrays of 3 probabilities"):
        binary.evaluate(pa.table({"label": [1, 0], "probability": [[0.1, 0.2, 0.7]] * 2}))
