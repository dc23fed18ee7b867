"""`LogisticRegression` of wingbeat.ml: seconds of each fit of 400 rows in 200 epochs, with the number of bytes up to which it trains
in this process as the argument: 0 has it start two ranks."""

import sys
import time

import numpy as np
import pyarrow as pa

from wingbeat.ml.classification import LogisticRegression


def main():
    local_bytes = int(sys.argv[1])
    # As in ../peers/pyspark_estimators.py.
    features = np.random.default_rng(0).normal(size=(400, 10))
    labels = (features[:, 0] + features[:, 1] > 0).astype(int)
    table = pa.table({"features": list(features), "label": labels})
    estimator = LogisticRegression(
        maxIter=200, learningRate=0.01, numTrainWorkers=2, tol=0.0, useGpu=False, localBytes=local_bytes
    )
    for _ in range(6):
        begun = time.perf_counter()
        model = estimator.fit(table)
        print("seconds", time.perf_counter() - begun, flush=True)
    predicted = model.transform(table)["prediction"].to_numpy()
    assert (predicted == labels).mean() > 0.9, (predicted == labels).mean()


if __name__ == "__main__":
    main()
