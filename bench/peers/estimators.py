"""`LogisticRegression` of pyspark.ml.connect and of wingbeat.ml, in turn, in one program: 400 rows, 2 ranks, 200 epochs.

    PYTHONPATH=python WINGBEAT_ADDRESS=… python bench/peers/estimators.py

Spark's session is up before. It needs Java 17, pyspark 4.0.1 with torcheval, grpcio, grpcio-status and
googleapis-common-protos, pandas 2, and torch. With WINGBEAT_ADDRESS, ranks are forked on a running cluster.
"""

import statistics
import time

import numpy as np
import pyarrow as pa
from pyspark.ml.connect.classification import LogisticRegression as SparkLogisticRegression
from pyspark.sql import SparkSession

from wingbeat.ml.classification import LogisticRegression

ROUNDS = 3
SETTINGS = {"maxIter": 200, "learningRate": 0.01, "numTrainWorkers": 2, "tol": 0.0}


def main():
    session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    random = np.random.default_rng(0)
    features = random.normal(size=(400, 10))
    labels = (features[:, 0] + features[:, 1] > 0).astype(int)
    table = pa.table({"features": list(features), "label": labels})
    rows = [(row.tolist(), int(label)) for row, label in zip(features, labels)]
    frame = session.createDataFrame(rows, schema="features: array<double>, label: long").cache()
    frame.count()

    fits = {
        "pyspark": lambda: SparkLogisticRegression(**SETTINGS).fit(frame),
        "wingbeat": lambda: LogisticRegression(**SETTINGS).fit(table),
        "wingbeat, localBytes=0": lambda: LogisticRegression(localBytes=0, useGpu=False, **SETTINGS).fit(table),
    }
    seconds = {name: [] for name in fits}
    for _ in range(ROUNDS):
        for name, fit in fits.items():
            begin = time.perf_counter()
            fit()
            seconds[name].append(time.perf_counter() - begin)
    for name, times in seconds.items():
        print(f"{name}: median {statistics.median(times):.3f} s of", ", ".join(f"{one:.3f}" for one in times))


if __name__ == "__main__":
    main()
