"""`wingbeat torchrun` beside torchrun, and unmodified programs of others."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from conftest import free_port

DUMP = textwrap.dedent("""
    import json, os, sys
    names = sorted(name for name in os.environ if name.startswith((
        "RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_", "MASTER_", "TORCH", "OMP_", "NODE_RANK")))
    with open(f"{sys.argv[1]}-{os.environ['RANK']}.json", "w") as file:
        json.dump({name: os.environ[name] for name in names}, file)
""")
# What differs from run to run, or on purpose: rank 0 hosts the store.
DIFFER = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE"}


def test_the_environment_is_torchrun_s(run, write, environment, tmp_path):
    script = write("dump.py", DUMP)
    torchrun = [Path(sys.executable).parent / "torchrun", "--master-port", str(free_port())]
    options = ["--nproc-per-node", "2", "--rdzv-id", "job", "--max-restarts", "3", "--role", "trainer"]
    # It leaves a folder for logs behind.
    theirs = {**environment, "TMPDIR": str(tmp_path)}
    subprocess.run([*torchrun, *options, script, "theirs"], env=theirs, cwd=tmp_path, check=True)
    run("torchrun", *options, script, "ours", env=environment, cwd=tmp_path)
    for rank in (0, 1):
        theirs, ours = (json.loads((tmp_path / f"{who}-{rank}.json").read_text()) for who in ("theirs", "ours"))
        assert ours.pop("NODE_RANK") == "0"
        assert set(theirs) <= set(ours), set(theirs) - set(ours)
        for name in set(theirs) - DIFFER:
            assert ours[name] == theirs[name], name
        assert ours["TORCHELASTIC_USE_AGENT_STORE"] == "False"


def test_underscores_and_modules_and_programs_are_taken(run, write, cluster, tmp_path):
    write("said.py", "import sys\nprint('said', *sys.argv[1:])\n")
    done = run("torchrun", "--nproc_per_node=2", "-m", "said", "--x", "-m", env=cluster, cwd=tmp_path)
    assert done.stdout == "said --x -m\n" * 2
    # Nobody is at that address: it is not asked.
    elsewhere = {**cluster, "WINGBEAT_ADDRESS": "127.0.0.1:1"}
    echo = ("--no-python", "--nproc-per-node", "2", "sh", "-c", "echo $LOCAL_RANK")
    done = run("torchrun", "--standalone", *echo, env=elsewhere)
    assert sorted(done.stdout.split()) == ["0", "1"]


def test_what_ranks_print_goes_to_files_and_is_teed(run, write, cluster, tmp_path):
    script = write("prints.py", "import os, sys\nprint('out', os.environ['RANK'])\nprint('err', file=sys.stderr)\n")
    options = ("--nproc-per-node", "2", "--log-dir", "logs", "--rdzv-id", "job", "-r", "0:1", "--tee", "1:3")
    done = run("torchrun", *options, script, env=cluster, cwd=tmp_path)
    (folder,) = (tmp_path / "logs").iterdir()
    files = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.log")}
    assert files == {
        "attempt_0/0/stdout.log": "out 0\n",
        "attempt_0/1/stdout.log": "out 1\n",
        "attempt_0/1/stderr.log": "err\n",
    }
    assert done.stdout == "[default1]:out 1\n"
    assert folder.name.startswith("job_")
    done = run("torchrun", "--nproc-per-node", "2", "--local-ranks-filter", "1", script, env=cluster)
    assert done.stdout == "out 1\n"


def test_it_ends_as_torchrun_does(run, write, cluster):
    script = write("fails.py", "import sys\nsys.exit(3)\n")
    assert "exited with code 3" in run("torchrun", script, env=cluster, code=1).stderr


@pytest.mark.parametrize(
    "options, says",
    [
        (["--nnodes", "2:1"], "LEAST:MOST"),
        (["--nnodes", "2", "--standalone"], "needs a cluster"),
        (["--nproc-per-node", "gpu"], "there is no GPU"),
        (["--nproc-per-node", "many"], "none of: a number, gpu, cpu, auto"),
        (["--rdzv-endpoint", "elsewhere:29500"], "started on every node"),
        (["--node-rank", "1"], "torchrun is called once"),
        (["--rdzv-backend", "etcd"], "possible values"),
        (["--no-such-flag"], "unexpected argument"),
        (["--nnodes", "3"], "cannot place"),
        (["--numa-binding", "node"], "torchrun has this flag"),
        (["--no-python", "no-such-program"], "cannot run no-such-program"),
    ],
)
def test_what_cannot_be_honoured_is_an_error(options, says, run, write, cluster):
    done = run("torchrun", *options, write("script.py", ""), env=cluster, code=None)
    assert done.returncode != 0 and says in done.stderr, done.stderr


def test_a_port_that_is_taken_is_said_so(run, write, cluster):
    import socket

    script = write("joins.py", "import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("torchrun", "--nproc-per-node", "2", "--master-port", port, script, env=cluster, code=1)
    assert f"port {port} of" in done.stderr and "is taken" in done.stderr


def test_ranks_as_many_as_cpus(run, write, cluster):
    script = write("world.py", "import os\nprint(os.environ['WORLD_SIZE'])\n")
    assert run("torchrun", "--nproc-per-node", "auto", script, env=cluster).stdout == "4\n" * 4


FSDP = """
    import torch, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (model(torch.ones(4, 8)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    print("learned")
    dist.destroy_process_group()
"""
TENSOR_PARALLEL = """
    import torch, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    expected = model(torch.ones(2, 8))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    assert torch.allclose(model(torch.ones(2, 8)), expected, atol=1e-5)
    print("learned")
    dist.destroy_process_group()
"""
LIGHTNING = """
    import warnings; warnings.filterwarnings("ignore")
    import logging; logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    import torch, pytorch_lightning as pl
    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)
        def training_step(self, batch, _):
            return self.layer(batch[0]).square().mean()
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 8)), batch_size=4)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Model(), data)
    assert trainer.world_size == 2 and trainer.global_step == 4, (trainer.world_size, trainer.global_step)
    print("learned")
"""
TRANSFORMERS = """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16))
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 16
        def __getitem__(self, index):
            ids = torch.arange(8) % 32
            return {"input_ids": ids, "labels": ids}
    arguments = TrainingArguments(output_dir="out", max_steps=4, per_device_train_batch_size=2, use_cpu=True,
                                  report_to=[], save_strategy="no", disable_tqdm=True)
    trainer = Trainer(model=model, args=arguments, train_dataset=Data())
    trainer.train()
    assert arguments.world_size == 2 and trainer.state.global_step == 4
    print("learned")
"""


CHECKPOINTS = """
    import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    dist.init_process_group("gloo")
    def model(seed):
        torch.manual_seed(seed)
        made = torch.nn.Linear(8, 4)
        fully_shard(made, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
        return made
    first, second = model(1), model(2)
    dcp.save(get_model_state_dict(first), checkpoint_id="saved")
    dcp.async_save(get_model_state_dict(first), checkpoint_id="saved-behind").result()
    for folder in ("saved", "saved-behind"):
        second = model(2)
        state = get_model_state_dict(second)
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(second, state)
        assert torch.equal(first.weight.full_tensor(), second.weight.full_tensor())
    print("learned", flush=True)
    dist.destroy_process_group()
"""
LOADERS = """
    import os, torch
    from torch.utils.data import DataLoader, Dataset
    class Squares(Dataset):
        def __len__(self):
            return 32
        def __getitem__(self, index):
            return index * index, int(os.environ["RANK"])
    if __name__ == "__main__":
        for method in ("fork", "spawn", "forkserver"):
            loader = DataLoader(Squares(), batch_size=8, num_workers=2, multiprocessing_context=method, persistent_workers=True)
            for _ in range(2):
                seen = [(int(x), int(rank)) for xs, ranks in loader for x, rank in zip(xs, ranks)]
                assert seen == [(i * i, int(os.environ["RANK"])) for i in range(32)], (method, seen)
        print("learned")
"""
COMPILED = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()))
    x = torch.randn(4, 8)
    # Whether there is a C compiler for inductor is not what this asks.
    compiled = torch.compile(model, backend="aot_eager")
    assert torch.allclose(compiled(x), model(x))
    compiled(x).sum().backward()
    print("learned")
    dist.destroy_process_group()
"""
PROGRAMS = {
    "fsdp2": FSDP,
    "tensor_parallel": TENSOR_PARALLEL,
    "lightning": LIGHTNING,
    "transformers": TRANSFORMERS,
    "checkpoints": CHECKPOINTS,
    "loaders": LOADERS,
    "compiled": COMPILED,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_run_unmodified(name, run, write, cluster, tmp_path):
    script = write("program.py", textwrap.dedent(PROGRAMS[name]))
    # What they leave in the folder for temporary files goes with the test's.
    leaves = name in ("loaders", "compiled")
    env = {**cluster, "TMPDIR": str(tmp_path)} if leaves else cluster
    done = run("torchrun", "--nproc-per-node", "2", *(["--cold"] if leaves else []), script, env=env, cwd=tmp_path)
    assert done.stdout.count("learned") == 2, done.stdout + done.stderr


def test_accelerate_s_own_test_passes(run, cluster):
    import accelerate.test_utils

    script = Path(accelerate.test_utils.__file__).parent / "scripts/test_script.py"
    env = {**cluster, "ACCELERATE_USE_CPU": "true"}
    done = run("torchrun", "--nproc-per-node", "2", script, env=env)
    assert "Training yielded the same results" in done.stdout


def test_errors_are_among_the_logs_and_logs_of_no_named_folder_are_the_user_s(run, write, cluster, tmp_path):
    script = write("raises.py", """
        from torch.distributed.elastic.multiprocessing.errors import record
        @record
        def main():
            raise ValueError("of rank 0")
        main()
    """)
    run("torchrun", "--log-dir", tmp_path / "logs", "--rdzv-id", "job", script, env=cluster, code=1)
    (error,) = (tmp_path / "logs").glob("job_*/attempt_0/0/error.json")
    assert "of rank 0" in json.loads(error.read_text())["message"]["message"]
    state = {**cluster, "XDG_STATE_HOME": str(tmp_path / "state")}
    old = tmp_path / "state" / "wingbeat" / "torchrun" / "long-ago_1"
    old.mkdir(parents=True)
    os.utime(old, (0, 0))
    run("torchrun", "--redirects", "1", "--rdzv-id", "job", write("says.py", "print('said')\n"), env=state)
    (run_folder,) = old.parent.iterdir()
    assert run_folder.name.startswith("job_"), "what nobody has touched for a month is gone"
    assert (run_folder / "attempt_0" / "0" / "stdout.log").read_text() == "said\n"


def test_an_activated_environment_wins_over_one_that_lies_there(run, write, environment, tmp_path):
    script = write("which.py", "import os\nprint(os.environ['CHOSEN'])\n")
    for name in ("active", "conda", ".venv"):
        python = tmp_path / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f"#!/bin/sh\nCHOSEN={name} exec {sys.executable} \"$@\"\n")
        python.chmod(0o755)
    plain = {name: value for name, value in environment.items() if name not in ("WINGBEAT_PYTHON", "VIRTUAL_ENV", "CONDA_PREFIX")}
    conda = {"CONDA_PREFIX": str(tmp_path / "conda")}
    for activated, chosen in (({"VIRTUAL_ENV": str(tmp_path / "active"), **conda}, "active"), (conda, "conda"), ({}, ".venv")):
        done = run("torchrun", "--cold", script, env={**plain, **activated}, cwd=tmp_path)
        assert done.stdout == f"{chosen}\n"
