"""What `wingbeat.train` has of Ray Train's interface, and what it refuses: without a run."""

import os
import pickle
import tempfile

import pytest

from wingbeat import train, tune
from wingbeat.train import Checkpoint, CheckpointConfig, FailureConfig, Result, RunConfig, ScalingConfig, _storage
from wingbeat.train.torch import TorchConfig, TorchTrainer, get_device, prepare_data_loader, prepare_model


@pytest.fixture(autouse=True)
def _outside_of_a_run(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WINGBEAT_RANK_SOCKET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WINGBEAT_CHECKPOINT", "")
    monkeypatch.setattr("wingbeat.train._report._reported_here", None)


def loop():
    pass


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: ScalingConfig(2, label_selector=[{"zone": "a"}, {"zone": "b"}]), "label_selector"),
        (lambda: ScalingConfig(trainer_resources={"CPU": 1}), "trainer_resources"),
        (lambda: ScalingConfig((1, 2), placement_strategy="STRICT_PACK"), "STRICT_PACK"),
        (lambda: ScalingConfig(use_tpu=True), "use_tpu"),
        (lambda: FailureConfig(controller_failure_limit=1), "controller_failure_limit"),
        (lambda: RunConfig(callbacks=[object()]), "callbacks"),
        (lambda: RunConfig(storage_filesystem=object()), "storage_filesystem"),
        (lambda: RunConfig(worker_runtime_env={"pip": ["x"]}), "pip"),
        (lambda: TorchConfig(init_method="tcp"), "rendezvous"),
        (lambda: TorchTrainer(loop, dataset_config=object()), "dataset_config"),
        (lambda: TorchTrainer(loop, validation_config=object()), "validation_config"),
        (lambda: TorchTrainer(loop, metadata={}), "metadata"),
        (lambda: TorchTrainer(loop, resume_from_checkpoint=object()), "name and storage_path"),
        (lambda: TorchTrainer(loop, datasets={"x": []}, scaling_config=ScalingConfig((1, 2))), "dataset"),
        (lambda: TorchTrainer.restore("path"), "RunConfig"),
        (lambda: TorchTrainer.can_restore("path"), "RunConfig"),
        (lambda: TorchTrainer(loop, run_config=RunConfig(storage_path="s3://b?region=x")).fit(), "environment"),
        (lambda: TorchTrainer(loop, run_config=RunConfig(storage_path="s3://b#x")).fit(), "environment"),
        (lambda: train.report({}, checkpoint_dir_name="x"), "checkpoint_000001"),
        (lambda: train.report({}, checkpoint_upload_fn=print), "checkpoint_upload_fn"),
        (lambda: train.report({}, validation=True), "validation"),
        (lambda: train.report({}, checkpoint_upload_mode=train.CheckpointUploadMode.NO_UPLOAD), "NO_UPLOAD"),
        (lambda: train.report({}, checkpoint=Checkpoint("s3://bucket/x")), "not on this machine"),
    ],
)
def test_what_is_not_supported_is_refused_with_what_to_do_instead(make, text):
    with pytest.raises(NotImplementedError, match="not supported: ") as raised:
        make()
    assert text in str(raised.value)


@pytest.mark.parametrize(
    "make, error",
    [
        (lambda: ScalingConfig(0), ValueError),
        (lambda: ScalingConfig(True), ValueError),
        (lambda: ScalingConfig((3, 2)), ValueError),
        (lambda: ScalingConfig(use_gpu=True, resources_per_worker={"GPU": 0}), ValueError),
        (lambda: ScalingConfig(resources_per_worker={"GPU": 1}), ValueError),
        (lambda: ScalingConfig(resources_per_worker={"CPU": -1}), ValueError),
        (lambda: ScalingConfig(placement_strategy="NEAR"), ValueError),
        (lambda: ScalingConfig(label_selector={"zone": "a b"}), ValueError),
        (lambda: ScalingConfig(label_selector={"zone": "in()"}), ValueError),
        (lambda: ScalingConfig(label_selector={"zone, disk": "a"}), ValueError),
        (lambda: ScalingConfig(label_selector="zone=a"), ValueError),
        (lambda: ScalingConfig(accelerator_type="NVIDIA H200"), ValueError),
        (lambda: ScalingConfig(accelerator_type="H200", label_selector={"accelerator-type": "H100"}), ValueError),
        (lambda: ScalingConfig(resources_per_worker={"a=b": 1}), ValueError),
        (lambda: FailureConfig(-2), ValueError),
        (lambda: CheckpointConfig(0), ValueError),
        (lambda: CheckpointConfig(checkpoint_score_order="most"), ValueError),
        (lambda: RunConfig(name="a/b"), ValueError),
        (lambda: RunConfig(name="a\nb"), ValueError),
        (lambda: RunConfig(name=5), TypeError),
        (lambda: RunConfig(hang_timeout_s=0), ValueError),
        (lambda: RunConfig(hang_timeout_s=0.0001), ValueError),
        (lambda: RunConfig(worker_runtime_env={"env_vars": {"A=B": 1}}), ValueError),
        (lambda: train.report([1]), TypeError),
        (lambda: train.report({"loss": 10**400}), TypeError),
        (lambda: TorchConfig(backend="mpi"), ValueError),
        (lambda: TorchTrainer("loop"), TypeError),
        (lambda: TorchTrainer(lambda a, b: None), TypeError),
        (lambda: TorchTrainer(loop, train_loop_config={"x": 1}), ValueError),
        (lambda: TorchTrainer(loop, train_loop_config=[]), TypeError),
        (lambda: TorchTrainer(loop, datasets={"x": [1]}).fit(), TypeError),
        (lambda: prepare_model(None, parallel_strategy="none"), ValueError),
    ],
)
def test_what_makes_no_sense_is_an_error_before_anything_runs(make, error):
    with pytest.raises(error):
        make()


def test_configurations_are_options_of_the_command():
    assert ScalingConfig((2, 4), use_gpu=True, resources_per_worker={"CPU": 3}).options() == [
        "--workers", "2:4", "--cpus-per-worker", "3", "--gpus-per-worker", "1",
    ]
    assert ScalingConfig(3, placement_strategy="STRICT_SPREAD").options()[:4] == ["--nodes", "3", "--workers", "1"]
    assert ScalingConfig(3, placement_strategy="STRICT_PACK").options()[:4] == ["--nodes", "1", "--workers", "3"]
    assert FailureConfig(-1).options() == ["--max-failures", "4294967294"]
    assert ScalingConfig(2, placement_strategy="SPREAD").options()[:3] == ["--workers", "2", "--spread"]
    assert ScalingConfig(2, resources_per_worker={"memory": 1e9, "license": 0.5}).options()[6:] == [
        "--memory-per-worker", "1000000000", "--resource-per-worker", "license=0.5",
    ]
    assert CheckpointConfig(2).options() == ["--keep", "2"]
    assert CheckpointConfig(3, "loss", "min").options() == ["--keep", "1", "--keep-best", "loss:min", "--keep-best-count", "3"]
    assert CheckpointConfig(None, "loss").options() == ["--keep", "4294967294", "--keep-best", "loss:max"]


def test_label_selectors_are_rules_of_the_command():
    selector = {"zone": "a", "disk": "!slow", "accelerator-type": "in(NVIDIA-H100, NVIDIA-H200)", "rack": "!in(7)"}
    rules = "zone=a, disk!=slow, accelerator-type in (NVIDIA-H100, NVIDIA-H200), rack not in (7)"
    assert ScalingConfig(2, label_selector=selector).options()[-2:] == ["--labels", rules]
    assert ScalingConfig(2, label_selector=[selector, selector]).options()[-2:] == ["--labels", rules]
    assert "--labels" not in ScalingConfig(2, label_selector={}).options()
    assert ScalingConfig(2, accelerator_type="NVIDIA-H200").options()[-2:] == ["--labels", "accelerator-type=NVIDIA-H200"]
    both = ScalingConfig(2, accelerator_type="NVIDIA-H200", label_selector={"zone": "a"})
    assert both.options()[-2:] == ["--labels", "zone=a, accelerator-type=NVIDIA-H200"]


def test_names_of_ray_s_that_are_absent_say_what_to_do():
    with pytest.raises(AttributeError, match="SIGTERM"):
        _ = train.get_preemption_info
    with pytest.raises(AttributeError, match="torch.amp"):
        _ = train.torch.accelerate
    assert train.TrainContext is train.Context and set(train.__all__) <= set(dir(train)) | set(train._HOMES)


def test_a_checkpoint_is_a_directory_with_metadata(tmp_path):
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "model").write_text("1")
    (tmp_path / "made" / ".wingbeat-complete.json").write_text("{}")
    checkpoint = Checkpoint.from_directory(tmp_path / "made")
    assert os.fspath(checkpoint) == checkpoint.path == str(tmp_path / "made")
    checkpoint.set_metadata({"a": 1})
    checkpoint.update_metadata({"b": [2]})
    assert checkpoint.get_metadata() == {"a": 1, "b": [2]}
    with checkpoint.as_directory() as folder:
        assert folder == checkpoint.path
    copy = checkpoint.to_directory(tmp_path / "copy")
    assert sorted(os.listdir(copy)) == [".metadata.json", "model"]
    pyarrow_fs = pytest.importorskip("pyarrow.fs")
    elsewhere = Checkpoint(str(tmp_path / "made"), pyarrow_fs.LocalFileSystem())
    with elsewhere.as_directory() as folder:
        assert folder != checkpoint.path and sorted(os.listdir(folder)) == [".metadata.json", "model"]
    assert not os.path.exists(folder)
    with pytest.raises(FileNotFoundError), Checkpoint("nowhere").as_directory():
        pass


def test_the_best_checkpoint_is_found_by_its_metric():
    kept = [(Checkpoint(str(number)), {"loss": loss}) for number, loss in enumerate((2.0, float("nan"), 1.0, 1.0))]
    result = Result({}, kept[-1][0], "path", best_checkpoints=[*kept, (Checkpoint("none"), {})])
    assert result.get_best_checkpoint("loss", "min").path == "3"
    assert result.get_best_checkpoint("loss", "max").path == "0"
    assert result.get_best_checkpoint("accuracy", "max") is None
    assert list(result.metrics_dataframe["loss"][[0, 3]]) == [2.0, 1.0]
    error = pickle.loads(pickle.dumps(train.WorkerTrainingFailedError("why", {1: ValueError("x")})))
    assert str(error) == "why" and str(error.worker_failures[1]) == "x"


def test_outside_of_a_run_models_and_loaders_are_as_they_were():
    import torch
    from torch.utils.data import DataLoader

    model, loader = torch.nn.Linear(1, 1), DataLoader(range(4))
    assert prepare_model(model) is model and prepare_data_loader(loader) is loader
    assert get_device() == torch.device("cpu")


def test_a_loader_is_split_among_ranks_and_else_stays_as_it_was(monkeypatch):
    import torch
    from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, SubsetRandomSampler

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    loader = prepare_data_loader(DataLoader(range(8), batch_size=2, drop_last=True, collate_fn=list))
    assert list(loader) == [[1, 3], [5, 7]]
    assert prepare_data_loader(loader) is loader, "it is split already"
    shuffled = prepare_data_loader(DataLoader(range(8), shuffle=True, generator=torch.Generator()))
    assert shuffled.sampler.shuffle and shuffled.generator is not None
    assert prepare_data_loader(shuffled, add_dist_sampler=False) is shuffled
    with pytest.raises(ValueError, match="batch_sampler of its own"):
        prepare_data_loader(DataLoader(range(8), batch_sampler=BatchSampler(SequentialSampler(range(8)), 2, False)))
    monkeypatch.setenv("RANK", "0")
    with pytest.warns(UserWarning, match="SubsetRandomSampler"):
        prepare_data_loader(DataLoader(range(8), sampler=SubsetRandomSampler(range(4))))


def test_batches_are_moved_whatever_holds_their_tensors():
    import collections

    import torch

    from wingbeat.train._prepare import moved

    pair = collections.namedtuple("pair", "x y")
    tensor, meta = torch.ones(1), torch.device("meta")
    batch = moved({"a": [tensor], "b": (tensor, "text"), "c": pair(tensor, 1)}, meta)
    assert [batch["a"][0].device, batch["b"][0].device, batch["c"].x.device] == [meta] * 3
    assert batch["b"][1] == "text" and batch["c"].y == 1


@pytest.fixture
def copies(monkeypatch):
    """The streams in which batches are copied and computed with, where there is no GPU."""
    import contextlib

    import torch

    class Stream:
        def __init__(self):
            self.waited = []

        def wait_stream(self, other):
            self.waited.append(other)

    side, current = Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return side, current


def test_a_batch_that_is_none_does_not_end_the_epoch(copies):
    import torch

    from wingbeat.train import _prepare

    def whole(rows):
        return rows[0] if rows[0] % 2 else None

    loader = _prepare._OnDevice(torch.utils.data.DataLoader(range(4), collate_fn=whole), torch.device("cpu"), True)
    assert list(loader) == [None, 1, None, 3]


def test_copies_ahead_wait_for_batches_whose_tensors_cannot_be_seen(copies, monkeypatch):
    import torch

    from wingbeat.train import _prepare

    class Graph:
        def to(self, device):
            return self

    side, current = copies
    monkeypatch.setattr(_prepare, "_in_use", lambda batch, stream: None)
    for batch, waits in ((torch.zeros(1), 0), ({"x": [torch.zeros(1)], "name": "a"}, 0), ((Graph(), torch.zeros(1)), 3)):
        side.waited.clear()
        loader = _prepare._OnDevice(torch.utils.data.DataLoader([batch] * 3, collate_fn=lambda batches: batches[0]), torch.device("cpu"), True)
        assert len(list(loader)) == 3 and side.waited == [current] * waits


def test_no_rank_leaves_the_process_group_before_all_have_joined(monkeypatch):
    import types

    import torch.distributed as dist

    from wingbeat.train import _process_group

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    store, late, left = dist.HashStore(), [2, 0], []
    store.set("wingbeat/joined/1", "")

    def sleep(_):  # meanwhile, another joins
        store.set(f"wingbeat/joined/{late.pop()}", "")

    monkeypatch.setattr(_process_group, "time", types.SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: left.append(list(late)))
    _process_group.leave(store)
    assert left == [[]] and store.check(["wingbeat/left/1"])


def test_gpus_of_a_node_are_shared_in_the_order_of_ranks(monkeypatch):
    import torch

    from wingbeat.train.torch import get_devices

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for gpus, ranks, rank, expected in [(2, 2, 1, [1]), (4, 2, 1, [2, 3]), (1, 2, 1, [0]), (2, 4, 2, [1])]:
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert [device.index for device in get_devices()] == expected
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(RuntimeError, match="unevenly"):
        get_devices()


def test_a_rank_that_sees_only_its_own_gpus_has_all_of_them(monkeypatch):
    import torch

    from wingbeat.train.torch import get_devices

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WINGBEAT_LAYOUT", "virtual")
    for gpus in (1, 2, 3):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert [device.index for device in get_devices()] == list(range(gpus))


def test_a_copy_of_a_checkpoint_is_not_named_as_what_ranks_remove(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "made").mkdir()
    copy = Checkpoint.from_directory(tmp_path / "made").to_directory()
    assert os.path.dirname(copy) == str(tmp_path)
    # `COPY` in train/src/storage/mod.rs.
    assert not os.path.basename(copy).startswith("wingbeat-checkpoint-")


def test_names_that_urls_cannot_have_as_they_are_have_folders_of_their_own():
    folders = [_storage.folder_of(RunConfig(storage_path="s3://b/runs/"), name) for name in ("lr#1", "lr#2", "50%", "a b")]
    assert folders == ["s3://b/runs/lr%231", "s3://b/runs/lr%232", "s3://b/runs/50%25", "s3://b/runs/a%20b"]
    assert _storage.folder_of(RunConfig(storage_path="/runs"), "lr#1") == "/runs/lr#1"


@pytest.mark.parametrize("fit", [lambda: TorchTrainer(loop).fit(), lambda: tune.Tuner(loop).fit()])
def test_a_home_that_cannot_be_written_is_an_error_that_says_what_to_do(fit, tmp_path, monkeypatch):
    (tmp_path / "home").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    with pytest.raises(OSError, match=r"RunConfig\(storage_path=…\)"):
        fit()


def test_a_job_has_what_can_be_shown_of_the_name_of_its_function(monkeypatch):
    from wingbeat.torch import TorchDistributor

    class Told(Exception):
        pass

    def tell(distributor, options):
        raise Told(*options)

    monkeypatch.setattr(TorchDistributor, "_launcher", tell)
    names = {"train": "train", "two\nlines\u200b": "two�lines�", "n" * 300: "n" * 256, "é" * 200 + "x": "é" * 127 + "x", 5: "5"}
    for name, shown in names.items():
        function = type("Function", (), {"__name__": name, "__call__": loop})()
        with pytest.raises(Told, match=f"^--job-name={shown}$"):
            TorchDistributor(1, True, False).run(function)


def test_namespaces_and_priorities_are_options_of_the_command():
    from wingbeat.torch import DeepspeedTorchDistributor, TorchDistributor

    for config in (RunConfig, tune.RunConfig):
        assert config(namespace="team", priority=-3).options()[-2:] == ["--namespace=team", "--priority=-3"]
        assert not [one for one in config().options() if "namespace" in one or "priority" in one]
    for kind, place in ((TorchDistributor, (1, True, False)), (DeepspeedTorchDistributor, (1, 1, True, False))):
        options = kind(*place, namespace="team", priority=2)._launcher(["--job-name=x"]).options
        assert {"--namespace=team", "--priority=2", "--job-name=x"} <= set(options)
        assert not [one for one in kind(*place)._launcher().options if "namespace" in one or "priority" in one]
    for make in (RunConfig, tune.RunConfig, lambda **given: TorchDistributor(1, True, False, **given)):
        with pytest.raises(TypeError, match="a namespace is a str"):
            make(namespace=3)
        with pytest.raises(ValueError, match="a namespace is a name"):
            make(namespace="")
        with pytest.raises(ValueError, match="an integer of 32 bits"):
            make(priority=2**31)
        with pytest.raises(ValueError, match="an integer of 32 bits"):
            make(priority=1.5)
