"""Trains classifiers on scikit-learn's digits and breast_cancer with `wingbeat.ml`, the interface of `pyspark.ml.connect`.

    pip install './python[ml]' scikit-learn
    python examples/estimators.py --workers 2 --model digits-model
"""

import argparse
import shutil
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.model_selection import train_test_split

from wingbeat.ml.classification import LogisticRegression
from wingbeat.ml.evaluation import BinaryClassificationEvaluator, MulticlassClassificationEvaluator
from wingbeat.ml.feature import StandardScaler
from wingbeat.ml.pipeline import Pipeline, PipelineModel
from wingbeat.ml.tuning import CrossValidator, ParamGridBuilder


def main():
    options = parse_arguments()
    folder = Path(tempfile.mkdtemp())
    try:
        digits(folder, options)
        breast_cancer()
    finally:
        shutil.rmtree(folder)


def parse_arguments():
    parser = argparse.ArgumentParser(description="Trains classifiers with wingbeat.ml.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--model", default="digits-model", help="a folder to save the model of the digits in")
    return parser.parse_args()


def digits(folder, options):
    """From Parquet files, on ranks: as one would with files that are larger than memory."""
    train, test = split(load_digits())
    pq.write_table(train, folder / "train.parquet", row_group_size=300)
    pq.write_table(test, folder / "test.parquet")

    scaler = StandardScaler(inputCol="features", outputCol="scaled")
    classifier = LogisticRegression(
        featuresCol="scaled",
        maxIter=30,
        learningRate=0.01,
        numTrainWorkers=options.workers,
        localBytes=0,  # so few rows would be trained on in this process otherwise
    )
    model = Pipeline(stages=[scaler, classifier]).fit(folder / "train.parquet")
    model.saveToLocal(options.model, overwrite=True)

    predicted = PipelineModel.loadFromLocal(options.model).transform(folder / "test.parquet")
    print(f"digits: accuracy {MulticlassClassificationEvaluator().evaluate(predicted):.3f}, saved in {options.model}")


def breast_cancer():
    """From a pandas DataFrame, with the learning rate chosen by cross-validation."""
    train, test = (table.to_pandas() for table in split(load_breast_cancer()))
    classifier = LogisticRegression(featuresCol="scaled", maxIter=20)
    pipeline = Pipeline(stages=[StandardScaler(inputCol="features", outputCol="scaled"), classifier])
    validator = CrossValidator(
        estimator=pipeline,
        estimatorParamMaps=ParamGridBuilder().addGrid(classifier.learningRate, [0.0001, 0.01]).build(),
        evaluator=BinaryClassificationEvaluator(),
        numFolds=3,
        seed=0,
        parallelism=2,
    )
    model = validator.fit(train)
    best = model.bestModel.stages[-1]
    print(f"breast_cancer: areas {model.avgMetrics}, best: learningRate={best.getLearningRate()}")
    print(f"breast_cancer: accuracy {MulticlassClassificationEvaluator().evaluate(model.transform(test)):.3f}")


def split(data):
    """Tables to train on and to test with."""
    parts = train_test_split(data.data, data.target, test_size=0.3, random_state=0, stratify=data.target)
    return [pa.table({"features": list(parts[i]), "label": parts[2 + i]}) for i in (0, 1)]


if __name__ == "__main__":
    main()
