"""`LogisticRegression` of pyspark.ml.connect: seconds of each fit of 400 rows on 2 ranks in 200 epochs, after Spark's own start."""

import time

import numpy as np
from pyspark.ml.connect.classification import LogisticRegression
from pyspark.sql import SparkSession


def main():
    session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    # As in ../scripts/estimators.py.
    features = np.random.default_rng(0).normal(size=(400, 10))
    labels = (features[:, 0] + features[:, 1] > 0).astype(int)
    rows = [(row.tolist(), int(label)) for row, label in zip(features, labels)]
    frame = session.createDataFrame(rows, schema="features: array<double>, label: long").cache()
    assert frame.count() == 400
    for _ in range(3):
        begun = time.perf_counter()
        LogisticRegression(maxIter=200, learningRate=0.01, numTrainWorkers=2, tol=0.0).fit(frame)
        print("seconds", time.perf_counter() - begun, flush=True)


if __name__ == "__main__":
    main()
