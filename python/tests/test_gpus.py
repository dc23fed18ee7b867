"""Ranks use the devices that their node may use, by the names that it knows them by."""

import textwrap

SHOW = "import os\nprint(os.environ['LOCAL_RANK'], os.environ.get('CUDA_VISIBLE_DEVICES'))\n"


def shown(done):
    """What SHOW has printed, by local rank."""
    lines = [line.split("] ")[-1].split(maxsplit=1) for line in done.stdout.splitlines()]
    return {int(rank): devices for rank, devices in lines}


def test_a_script_s_ranks_see_the_devices_of_all_on_their_node(run, write, gpu_cluster):
    done = run("train", "-n", "3", "--gpus-per-worker", "1", write("show.py", SHOW), env=gpu_cluster)
    assert shown(done) == dict.fromkeys(range(3), "5,GPU-aa,7")
    done = run("train", "--cold", "--gpus-per-worker", "2", write("show.py", SHOW), env=gpu_cluster)
    assert shown(done) in [{0: "5,GPU-aa"}, {0: "GPU-aa,7"}, {0: "5,7"}]


def test_a_number_of_ranks_gets_a_gpu_each_where_there_are_as_many(run, write, gpu_cluster):
    done = run("torchrun", "--nproc-per-node", "3", write("show.py", SHOW), env=gpu_cluster)
    assert shown(done) == dict.fromkeys(range(3), "5,GPU-aa,7")


def test_more_ranks_than_gpus_or_cpus_run_and_are_told_that_they_see_none(run, write, gpu_cluster):
    script = write("sees.py", "import os\nprint(os.environ['CUDA_VISIBLE_DEVICES'] == '')\n")
    done = run("torchrun", "--nproc-per-node", "6", script, env=gpu_cluster)
    assert done.stdout.split() == ["True"] * 6
    assert "6 ranks on a node with 3 GPUs see none; with --gpus-per-rank" in done.stderr, done.stderr


def test_a_function_s_ranks_see_them_too(python, gpu_cluster):
    done = python(
        textwrap.dedent("""
            import os
            from wingbeat.torch import TorchDistributor

            def devices():
                return os.environ["CUDA_VISIBLE_DEVICES"]

            print(TorchDistributor(num_processes=3, local_mode=False, use_gpu=True).run(devices))
        """),
        env=gpu_cluster,
    )
    assert done.stdout.strip().endswith("5,GPU-aa,7")
