"""The example, and accuracies beside scikit-learn's."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from conftest import DEADLINE_SECONDS
from sklearn import linear_model, pipeline, preprocessing
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.model_selection import train_test_split

from wingbeat.ml import Pipeline
from wingbeat.ml.classification import LogisticRegression
from wingbeat.ml.evaluation import BinaryClassificationEvaluator, MulticlassClassificationEvaluator
from wingbeat.ml.feature import StandardScaler

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/estimators.py"


@pytest.mark.parametrize("load", [load_digits, load_breast_cancer])
def test_accuracy_is_scikit_learn_s(load):
    found = load()
    parts = train_test_split(found.data, found.target, test_size=0.3, random_state=0, stratify=found.target)
    train, test = (pa.table({"features": list(parts[i]), "label": parts[2 + i]}) for i in (0, 1))
    classifier = LogisticRegression(featuresCol="scaled", maxIter=60, learningRate=0.01)
    scaler = StandardScaler(inputCol="features", outputCol="scaled")
    predicted = Pipeline(stages=[scaler, classifier]).fit(train).transform(test)
    accuracy = MulticlassClassificationEvaluator().evaluate(predicted)
    other = pipeline.make_pipeline(preprocessing.StandardScaler(), linear_model.LogisticRegression(max_iter=2000)).fit(parts[0], parts[2])
    expected = other.score(parts[1], parts[3])
    # Two standard errors of an accuracy that is measured on so many rows.
    noise = 2 * np.sqrt(expected * (1 - expected) / len(parts[1]))
    assert accuracy > expected - noise and accuracy > 0.95
    if load is load_breast_cancer:
        assert BinaryClassificationEvaluator().evaluate(predicted) > 0.985


def test_the_example_runs_and_says_how_good_its_models_are(cluster, tmp_path):
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--workers", "2", "--model", str(tmp_path / "model")],
        env=cluster, capture_output=True, text=True, timeout=DEADLINE_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    accuracies = [float(number) for number in re.findall(r"accuracy (0\.\d+)", done.stdout)]
    assert len(accuracies) == 2 and min(accuracies) > 0.94, done.stdout
    assert (tmp_path / "model/metadata.json").exists() and "best: learningRate=" in done.stdout


def test_the_notebook_s_cells_run_one_after_the_other(cluster, python):
    done = python(
        f"""
        import ast, io, json, sys

        from wingbeat.ml import _progress

        # As in a notebook, where it is a cell's output and no file. A training says how far it is also if it is short.
        shown, _progress._EVERY_S = io.StringIO(), 0.0
        sys.stderr, stderr = shown, sys.stderr
        names = {{}}
        for cell in json.load(open({str(EXAMPLE.with_suffix(".ipynb"))!r}))["cells"]:
            if cell["cell_type"] == "code":
                *first, last = ast.parse("".join(cell["source"])).body
                exec(compile(ast.Module(first, []), "cell", "exec"), names)
                is_shown = isinstance(last, ast.Expr)
                if is_shown:
                    print(eval(compile(ast.Expression(last.value), "cell", "eval"), names))
                else:
                    exec(compile(ast.Module([last], []), "cell", "exec"), names)
        sys.stderr = stderr
        stderr.write(shown.getvalue())
        """,
        cluster,
    )
    accuracy, *losses, areas = done.stdout.splitlines()
    assert float(accuracy) > 0.95 and losses[-1].startswith("Name: loss") and len(json.loads(areas)) == 2
    assert re.search(r"^LogisticRegression.*: epoch \d+ of \d+, \d+ % of its rows, loss", done.stderr, re.MULTILINE), done.stderr
