"""Pipelines and cross-validation: what is fitted to what, which rows are in which fold, and trials that fail."""

import signal
import subprocess
import sys
import threading

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import DEADLINE_SECONDS
from sklearn.datasets import load_breast_cancer

from wingbeat.ml import (
    EmptyDataset,
    ExistingColumn,
    InvalidFolds,
    InvalidLabels,
    InvalidParameter,
    MissingColumn,
    MlError,
    Model,
    Pipeline,
    PipelineModel,
    TooFewRows,
    TrialFailed,
    UnknownParameter,
    _shards,
    _trials,
)
from wingbeat.ml.base import Estimator
from wingbeat.ml.classification import LogisticRegression
from wingbeat.ml.evaluation import BinaryClassificationEvaluator, MulticlassClassificationEvaluator, RegressionEvaluator
from wingbeat.ml.feature import ArrayAssembler, MaxAbsScaler, StandardScaler
from wingbeat.ml.param import Param
from wingbeat.ml.tuning import CrossValidator, ParamGridBuilder


@pytest.fixture(scope="module")
def table():
    found = load_breast_cancer()
    return pa.table({"features": list(found.data), "label": found.target})


def pipeline():
    scaler = StandardScaler(inputCol="features", outputCol="scaled")
    return Pipeline(stages=[scaler, LogisticRegression(featuresCol="scaled", maxIter=10, learningRate=0.01)])


def test_a_pipeline_fits_each_stage_to_what_the_others_make(table):
    model = pipeline().fit(table)
    predicted = model.transform(table)
    assert predicted.column_names == ["features", "label", "scaled", "prediction", "probability"]
    assert MulticlassClassificationEvaluator().evaluate(predicted) > 0.97
    assert isinstance(model, PipelineModel) and len(model.stages) == 2


def test_names_in_a_param_map_are_those_of_the_object_itself(table):
    classifier = LogisticRegression(maxIter=1)
    evaluator = MulticlassClassificationEvaluator()
    validator = CrossValidator(estimator=classifier, evaluator=evaluator, estimatorParamMaps=[{}])
    copied = validator.copy({"numFolds": 2, classifier.maxIter: 3})
    assert copied.getNumFolds() == 2 and copied.getEstimator().getMaxIter() == 3
    model = validator.fit(table.slice(0, 60), {"numFolds": 2})
    assert len(model.foldMetrics) == 2
    assert model.copy({"numFolds": 4}).getNumFolds() == 4
    scaler = StandardScaler(inputCol="features", outputCol="scaled")
    pipeline = Pipeline(stages=[classifier]).copy({"stages": [scaler], scaler.outputCol: "other"})
    assert [stage.getOutputCol() for stage in pipeline.getStages()] == ["other"]
    with pytest.raises(UnknownParameter, match="no parameter 'maxIter'"):
        validator.copy({"maxIter": 3})


def test_estimators_models_and_evaluators_can_be_pickled(table):
    import pickle

    model = pipeline().fit(table)
    classifier = LogisticRegression(maxIter=3)
    evaluators = [BinaryClassificationEvaluator(), MulticlassClassificationEvaluator(), RegressionEvaluator()]
    maps = ParamGridBuilder().addGrid(classifier.maxIter, [1, 2]).build()
    validator = CrossValidator(estimator=classifier, evaluator=evaluators[1], estimatorParamMaps=maps)
    assembler = ArrayAssembler(inputCols=["a"], outputCol="b", featureSizes=[1])
    for one in [model, pipeline(), validator, assembler, MaxAbsScaler(inputCol="a", outputCol="b"), *evaluators]:
        again = pickle.loads(pickle.dumps(one))
        assert again.uid == one.uid and again.explainParams() == one.explainParams()
    assert pickle.loads(pickle.dumps(model)).transform(table).equals(model.transform(table))
    with pytest.raises(InvalidParameter, match="-1 is not at least 0"):
        pickle.loads(pickle.dumps(classifier)).setMaxIter(-1)


def test_a_pipeline_over_files_is_that_over_a_table_also_on_ranks(table, tmp_path, cluster, monkeypatch):
    for name, value in cluster.items():
        monkeypatch.setenv(name, value)
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=100)
    one, two = pipeline(), pipeline()
    two.getStages()[1].setNumTrainWorkers(2).setLocalBytes(0)
    expected = one.fit(table)
    found = two.fit(str(tmp_path))
    assert np.abs(found.stages[1].coefficientMatrix - expected.stages[1].coefficientMatrix).max() < 1e-6
    out = tmp_path / "out.parquet"
    found.transform(tmp_path / "rows.parquet", output=out)
    assert BinaryClassificationEvaluator().evaluate(out) > 0.99


def test_a_pipeline_s_copy_sets_parameters_of_stages(table):
    original = pipeline()
    classifier = original.getStages()[1]
    assert len(original.fit(table, {classifier.maxIter: 2}).stages[1].objectiveHistory) == 2
    assert classifier.getMaxIter() == 10


def test_a_pipeline_without_stages_changes_nothing_and_wrong_stages_are_named(table):
    assert Pipeline(stages=[]).fit(table).transform(table).equals(table)
    with pytest.raises(TypeError, match="a stage of a pipeline is an estimator or a transformer, and not a int"):
        Pipeline(stages=[3]).fit(table)
    scalers = [MaxAbsScaler(inputCol="features", outputCol="scaled") for _ in range(2)]
    with pytest.raises(ExistingColumn, match="'scaled'"):
        Pipeline(stages=scalers).fit(table).transform(table)
    with pytest.raises(MissingColumn, match="no column 'scald'; did you mean 'scaled'?"):
        Pipeline(stages=[scalers[0], LogisticRegression(featuresCol="scald")]).fit(table)
    assembled = ArrayAssembler(inputCols=["label", "features"], outputCol="both", featureSizes=[1, 30])
    model = Pipeline(stages=[assembled, MaxAbsScaler(inputCol="both", outputCol="scaled")]).fit(table.to_pandas())
    assert len(model.stages[1].max_abs_values) == 31


def test_maps_may_replace_stages_and_estimators(table):
    original = pipeline()
    replaced = [original.getStages()[0], LogisticRegression(featuresCol="scaled", maxIter=3)]
    params = {original.stages: replaced, replaced[1].learningRate: 0.5}
    assert len(original.fit(table, params).stages[1].objectiveHistory) == 3
    validator = CrossValidator(estimator=original, evaluator=BinaryClassificationEvaluator(), estimatorParamMaps=[params], numFolds=2)
    assert len(validator.fit(table).bestModel.stages[1].objectiveHistory) == 3
    assert validator.copy({validator.estimator: replaced[1]}).getEstimator().uid == replaced[1].uid


def test_names_in_maps_mean_the_object_itself_and_none_of_its_parts(table):
    original = pipeline()
    validator = CrossValidator(estimator=original, evaluator=BinaryClassificationEvaluator(), estimatorParamMaps=[{}])
    assert validator.copy({"numFolds": 2}).getNumFolds() == 2
    assert np.shape(validator.fit(table, {"numFolds": 2, original.getStages()[1].maxIter: 1}).foldMetrics) == (2, 1)
    assert original.copy({"stages": original.getStages()[:1]}).getStages()[0].uid == original.getStages()[0].uid
    with pytest.raises(UnknownParameter, match="CrossValidator has no parameter 'maxIter'"):
        validator.copy({"maxIter": 1})


def test_parameters_that_would_have_no_effect_are_named(table):
    original, other = pipeline(), LogisticRegression()
    validator = CrossValidator(estimator=original, evaluator=BinaryClassificationEvaluator(), estimatorParamMaps=[{}, {other.maxIter: 1}])
    with pytest.raises(UnknownParameter, match=rf"estimatorParamMaps\[1\] has the parameter {other.uid}__maxIter"):
        validator.fit(table)
    twice = original.getStages()[0].copy({original.getStages()[0].outputCol: "again"})
    original.setStages([*original.getStages(), twice])
    with pytest.raises(MlError, match="two parts with the uid"):
        validator.setEstimatorParamMaps([{}]).fit(table)


def test_the_grid_has_all_combinations():
    one = LogisticRegression()
    maps = ParamGridBuilder().baseOn({one.seed: 1}, (one.tol, 0)).addGrid(one.maxIter, [1, 5]).addGrid(one.momentum, [0, 0.5]).build()
    assert maps == [{one.seed: 1, one.tol: 0.0, one.maxIter: i, one.momentum: m} for i in (1, 5) for m in (0.0, 0.5)]
    with pytest.raises(TypeError, match="'maxIter' is not a parameter"):
        ParamGridBuilder().addGrid("maxIter", [1])


@pytest.mark.parametrize("parallelism", [1, 3])
def test_cross_validation_chooses_the_best_map_and_fits_it_to_all_rows(table, parallelism):
    estimator = pipeline()
    classifier = estimator.getStages()[1]
    grid = ParamGridBuilder().addGrid(classifier.learningRate, [1e-9, 0.01]).build()
    validator = CrossValidator(
        estimator=estimator, evaluator=BinaryClassificationEvaluator(), estimatorParamMaps=grid, parallelism=parallelism, seed=1,
        collectSubModels=True,
    )
    model = validator.fit(table)
    assert model.avgMetrics[1] > 0.99 > model.avgMetrics[0] and len(model.stdMetrics) == 2
    assert np.allclose(model.avgMetrics, np.mean(model.foldMetrics, axis=0)) and np.shape(model.foldMetrics) == (3, 2)
    assert [len(row) for row in model.subModels] == [2, 2, 2]
    alone = estimator.fit(table, grid[1])
    assert np.array_equal(model.bestModel.stages[1].coefficientMatrix, alone.stages[1].coefficientMatrix)
    assert BinaryClassificationEvaluator().evaluate(model.transform(table)) > 0.99


class Remembers(Estimator):
    """Fits nothing. Remembers which rows it has seen, and fails if it is told to."""

    fails: Param = Param("undefined", "fails", "whether it fails")
    seen: list = []
    together = threading.Barrier(1)

    def _fit(self, source):
        self.together.wait(DEADLINE_SECONDS)
        rows = source.table(["id"])["id"].to_pylist()
        if self.getOrDefault(self.fails):
            raise ArithmeticError("as it was told")
        self.seen.append(rows)
        return Predicts()._resetUid(self.uid)


class Predicts(Model):
    def _input_columns(self):
        return ["id"]

    def _output_columns(self):
        return [("prediction", "bigint")]

    def _compute(self, batch):
        return {"prediction": batch.data["id"]}


def remembering(maps=1, barrier=1, **options):
    estimator = Remembers()._setDefault(fails=False)
    Remembers.seen, Remembers.together = [], threading.Barrier(barrier)
    grid = [{estimator.fails: number == 1} for number in range(maps)]
    return CrossValidator(estimator=estimator, evaluator=RegressionEvaluator(), estimatorParamMaps=grid, **options)


def numbered(rows, folds=None):
    columns = {"id": range(rows), "label": [1.0] * rows}
    return pa.table({**columns, **({} if folds is None else {"fold": folds})})


@pytest.mark.parametrize("rows, folds", [(10, 3), (9, 4), (2, 2), (1000, 5)])
def test_each_row_is_in_the_training_rows_of_all_folds_but_one(rows, folds):
    remembering(numFolds=folds).fit(numbered(rows).to_pandas())
    *trained, best = Remembers.seen
    left_out = [set(range(rows)) - set(one) for one in trained]
    assert best == list(range(rows)) and len(trained) == folds
    assert sorted(row for one in left_out for row in one) == list(range(rows))
    assert max(map(len, left_out)) - min(map(len, left_out)) <= 1


def test_folds_depend_on_the_seed():
    def folds(seed):
        remembering(seed=seed).fit(numbered(50))
        return Remembers.seen

    assert folds(1) == folds(1) != folds(2)


def test_folds_may_be_given():
    remembering(foldCol="fold", numFolds=2).fit(numbered(4, [0, 1, 1, 0]))
    assert Remembers.seen == [[1, 2], [0, 3], [0, 1, 2, 3]]
    with pytest.raises(InvalidFolds, match="^column 'fold', row 2: the fold is 2, and has to be 0 to 1"):
        remembering(foldCol="fold", numFolds=2).fit(numbered(4, [0, 1, 2, 0]))
    with pytest.raises(MissingColumn):
        remembering(foldCol="folds").fit(numbered(4))
    with pytest.raises(TooFewRows, match="2 rows cannot make 3 folds"):
        remembering().fit(numbered(2))
    with pytest.raises(InvalidParameter, match="no estimatorParamMaps"):
        remembering(maps=0).fit(numbered(5))


@pytest.mark.parametrize("outer, inner", [(3, 3), (2, 3), (4, 2)])
def test_folds_inside_of_a_fold_divide_its_rows(outer, inner):
    within = remembering(numFolds=inner)
    around = CrossValidator(estimator=within, evaluator=RegressionEvaluator(), estimatorParamMaps=[{}], numFolds=outer)
    around.fit(numbered(25))
    runs = [Remembers.seen[begin : begin + inner + 1] for begin in range(0, len(Remembers.seen), inner + 1)]
    assert len(runs) == outer + 1
    for *trained, whole in runs:
        left_out = [set(whole) - set(one) for one in trained]
        assert sorted(row for one in left_out for row in one) == whole
        assert max(map(len, left_out)) - min(map(len, left_out)) <= 1


def test_trials_run_at_the_same_time(monkeypatch):
    """Each waits for all three: one after the other, they would wait forever."""
    validator = remembering(barrier=3, parallelism=3)
    run = _trials.run

    def run_and_let_the_rest_run_alone(*args, **kwargs):
        outcomes = run(*args, **kwargs)
        Remembers.together = threading.Barrier(1)
        return outcomes

    monkeypatch.setattr(_trials, "run", run_and_let_the_rest_run_alone)
    validator.fit(numbered(9))
    assert len(Remembers.seen) == 4


@pytest.mark.parametrize("parallelism", [1, 2])
def test_a_failing_trial_is_named_and_is_not_fatal_if_asked(parallelism):
    with pytest.raises(TrialFailed, match="fold 0 with fails=True failed: ArithmeticError: as it was told") as raised:
        remembering(maps=2, parallelism=parallelism).fit(numbered(9))
    assert isinstance(raised.value.__cause__, ArithmeticError)
    assert (raised.value.fold, raised.value.params) == (0, {"fails": True})
    model = remembering(maps=2, parallelism=parallelism, skipFailedTrials=True, collectSubModels=True).fit(numbered(9))
    assert [failure.fold for failure in model.failures] == [0, 1, 2]
    assert np.isnan(model.avgMetrics[1]) and not np.isnan(model.avgMetrics[0])
    assert [row[1] for row in model.subModels] == [None, None, None]
    only = remembering(skipFailedTrials=True)
    with pytest.raises(TrialFailed):
        only.setEstimatorParamMaps([{only.getEstimator().fails: True}]).fit(numbered(9))


def test_a_trial_is_shown_with_its_parameters_once(monkeypatch):
    shown, run = [], _trials.run

    def run_and_show(trials, *args, **more):
        shown.extend(f"{trial.trial_id} ({trial.parameters})" for trial in trials)
        return run(trials, *args, **more)

    monkeypatch.setattr(_trials, "run", run_and_show)
    remembering(maps=2, skipFailedTrials=True).fit(numbered(9))
    assert shown[:3] == ["fold 0 (fails=False)", "fold 0 (fails=True)", "fold 1 (fails=False)"]


def test_a_fold_without_rows_is_named():
    with pytest.raises(TrialFailed, match="no rows") as raised:
        CrossValidator(
            estimator=LogisticRegression(maxIter=1), evaluator=BinaryClassificationEvaluator(), estimatorParamMaps=[{}], foldCol="fold"
        ).fit(pd.DataFrame({"features": [[1.0], [2.0]] * 3, "label": [0, 1] * 3, "fold": [0, 0, 0, 0, 1, 1]}))
    assert isinstance(raised.value.__cause__, EmptyDataset) and raised.value.fold == 2


def test_a_bad_fold_is_an_error_of_no_trial():
    with pytest.raises(InvalidFolds, match="null or NaN") as raised:
        remembering(foldCol="fold").fit(numbered(3, [0, 1, None]))
    assert raised.value.row == 2
    with pytest.raises(InvalidFolds, match="holds string, and no numbers"):
        remembering(foldCol="fold").fit(numbered(3, ["0", "1", "2"]))


def test_progress_names_the_trial_and_writes_whole_lines(table, monkeypatch):
    from wingbeat.ml import _progress

    written = []

    class Written:
        write = written.append
        isatty = staticmethod(lambda: False)
        flush = staticmethod(lambda: None)

    monkeypatch.setattr(_progress, "_EVERY_S", 0)
    monkeypatch.setattr(sys, "stderr", Written)
    classifier = LogisticRegression(maxIter=2)
    maps = [{classifier.learningRate: rate} for rate in (1e-6, 1e-7)]
    CrossValidator(
        estimator=classifier, evaluator=MulticlassClassificationEvaluator(), estimatorParamMaps=maps, parallelism=2, numFolds=2
    ).fit(table)
    lines = [line for line in written if line.startswith("LogisticRegression")]
    assert all(line.endswith("\n") and line.count("\n") == 1 for line in lines)
    names = {line.partition(": ")[0] for line in lines}
    assert names == {
        "LogisticRegression",
        *(f"LogisticRegression (fold {fold} with learningRate={rate})" for fold in (0, 1) for rate in (1e-6, 1e-7)),
    }


def test_trials_start_ranks_of_their_own_at_the_same_time(table, cluster, monkeypatch):
    for name, value in cluster.items():
        monkeypatch.setenv(name, value)
    classifier = LogisticRegression(featuresCol="scaled", maxIter=2, learningRate=0.01)
    estimator = Pipeline(stages=[StandardScaler(inputCol="features", outputCol="scaled"), classifier])
    validator = CrossValidator(estimator=estimator, evaluator=BinaryClassificationEvaluator(), estimatorParamMaps=[{}], numFolds=2)
    here = validator.fit(table)
    classifier.setLocalBytes(0).setNumTrainWorkers(2)
    on_ranks = validator.setParallelism(2).fit(table)
    assert on_ranks.avgMetrics == pytest.approx(here.avgMetrics, abs=1e-9)


def test_trials_that_start_no_ranks_are_ranks_of_the_cluster_themselves(table, cluster, monkeypatch, tmp_path, capfd):
    estimator = pipeline()
    grid = ParamGridBuilder().addGrid(estimator.getStages()[1].learningRate, [1e-9, 0.01]).build()
    validator = CrossValidator(
        estimator=estimator, evaluator=BinaryClassificationEvaluator(), estimatorParamMaps=grid, parallelism=2, numFolds=2,
        collectSubModels=True, seed=1,
    )
    here = validator.fit(table)
    for name, value in cluster.items():
        monkeypatch.setenv(name, value)
    ranks, on_ranks = [], _shards.on_ranks
    monkeypatch.setattr(_shards, "on_ranks", lambda function, args, count, **more: ranks.append(count) or on_ranks(function, args, count, **more))
    pq.write_table(table, tmp_path / "rows.parquet")
    for rows in (table, table.to_pandas(), tmp_path):
        there = validator.fit(rows)
        assert ranks == [1] * 4 and np.allclose(there.foldMetrics, here.foldMetrics, atol=1e-9)
        pairs = zip(sum(there.subModels, []), sum(here.subModels, []), strict=True)
        assert all(np.allclose(one.stages[1].coefficientMatrix, two.stages[1].coefficientMatrix, atol=1e-6) for one, two in pairs)
        ranks.clear()
    labelled = table.set_column(1, "label", [pa.array([0.5] * len(table))])
    with pytest.raises(TrialFailed, match="fold 0 with learningRate=1e-09 failed: InvalidLabels") as raised:
        validator.fit(labelled)
    assert isinstance(raised.value.__cause__, InvalidLabels) and "Traceback" not in capfd.readouterr().err
    validator.setParallelism(1).fit(table)
    remembering(parallelism=2).fit(numbered(9))
    assert len(ranks) in (2, 3) and len(Remembers.seen) == 4, "of the failing one, and none for one after the other, or a class of the user's"


def test_ctrl_c_ends_the_ranks_of_all_trials(cluster, write):
    program = write(
        "program.py",
        """
        import time
        import pyarrow as pa
        from wingbeat.ml import _shards
        from wingbeat.ml.base import Estimator
        from wingbeat.ml.evaluation import RegressionEvaluator
        from wingbeat.ml.tuning import CrossValidator

        def wait():
            print("waits", flush=True)
            while True:  # a signal just before `pause` would be missed
                time.sleep(0.01)

        class Waits(Estimator):
            def _fit(self, source):
                return _shards.on_ranks(wait, (), 1)

        if __name__ == "__main__":
            rows = pa.table({"label": [1.0, 2.0]})
            CrossValidator(
                estimator=Waits(), evaluator=RegressionEvaluator(), estimatorParamMaps=[{}], numFolds=2, parallelism=2
            ).fit(rows)
        """,
    )
    done = subprocess.Popen([sys.executable, program], env=cluster, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with done:
        assert [next(line for line in done.stdout if "waits" in line) for _ in range(2)]
        done.send_signal(signal.SIGINT)
        errors = done.communicate(timeout=DEADLINE_SECONDS)[1]
    assert done.returncode == -signal.SIGINT and "KeyboardInterrupt" in errors
