"""torchrun's flags and variables, in `wingbeat torchrun`."""

import json
import socket
import subprocess
import sys

from conftest import free_port

DUMP = """
    import json, os, sys
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "TORCHELASTIC_RUN_ID")
    print(json.dumps({"argv": sys.argv, **{name: os.environ.get(name) for name in names}}))
"""


def ranks(done):
    said = [json.loads(line) for line in done.stdout.splitlines()]
    return sorted(said, key=lambda rank: int(rank["RANK"]))


def test_variables_stand_for_flags_and_flags_win(run, write, cluster):
    script = write("dump.py", DUMP)
    env = {**cluster, "PET_NPROC_PER_NODE": "2", "PET_RDZV_ID": "job"}
    told = ranks(run("torchrun", script, env=env))
    assert [rank["TORCHELASTIC_RUN_ID"] for rank in told] == ["job", "job"]
    assert len(ranks(run("torchrun", "--nproc-per-node", "1", script, env=env))) == 1
    program = {**cluster, "PET_NO_PYTHON": "1"}
    assert run("torchrun", "echo", "hello", env=program).stdout == "hello\n"
    bad = run("torchrun", script, env={**cluster, "PET_NPROC_PER_NODE": "two"}, code=1)
    assert "two" in bad.stderr


def test_the_script_s_name_is_what_was_typed(run, write, cluster, tmp_path):
    write("dump.py", DUMP)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--master-port"]
    env = {**cluster, "TMPDIR": str(tmp_path)}
    for typed in ("dump.py", "./dump.py", str(tmp_path / "dump.py")):
        ours = ranks(run("torchrun", typed, "a", "--b", env=env, cwd=tmp_path))
        theirs = subprocess.run([*torchrun, str(free_port()), typed, "a", "--b"], env=env, cwd=tmp_path, capture_output=True, check=True)
        assert ours[0]["argv"] == json.loads(theirs.stdout)["argv"]


def test_flags_may_be_short_and_those_that_change_nothing_are_taken(run, write, cluster):
    flags = [
        "--nproc_per", "2", "--rdzv-conf", "timeout=60", "--logs-specs", "default", "--local-addr", "127.0.0.1",
        "--event-log-handler", "null", "--master-addr", socket.gethostname(), "--rdzv_endpoint", "localhost:0",
    ]
    assert len(ranks(run("torchrun", *flags, write("dump.py", DUMP), env=cluster))) == 2


def test_lines_with_one_of_some_texts_are_written_once_more_as_by_torchrun(run, write, cluster, tmp_path):
    script = write("fruit.py", """
        import os, sys
        for line in ("an apple", "a pear", "an orange, a plum", "no fruit"):
            print(line, flush=True)
            print(line, "said", file=sys.stderr, flush=True)
    """)
    flags = [
        "--nproc-per-node", "2", "--tee", "3", "--local-ranks-filter", "1",
        "--duplicate-stdout-filters", "apple,orange,, a", "--duplicate-stderr-filters", "nothing of that",
    ]
    env = {**cluster, "TMPDIR": str(tmp_path)}
    run("torchrun", *flags, "--log-dir", "ours", script, env=env, cwd=tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--master-port", str(free_port()), *flags, "--log-dir", "theirs", script]
    subprocess.run(torchrun, env=env, cwd=tmp_path, capture_output=True, check=True)
    written = [
        {file.name: file.read_text() for file in tmp_path.glob(f"{logs}/*/attempt_0/filtered_*.log")} for logs in ("ours", "theirs")
    ]
    assert written[0] == written[1] and written[0]["filtered_stdout.log"].count("[default1]:") == 2, written


def test_flags_for_agents_elsewhere_say_what_to_do_instead(run, write, cluster):
    script = write("dump.py", DUMP)
    for flags in (["--master-addr", "10.1.2.3"], ["--node-rank", "1"], ["--rdzv-endpoint", "elsewhere:1"]):
        refused = run("torchrun", *flags, script, env=cluster, code=None)
        assert refused.returncode != 0 and "torchrun is called once" in " ".join(refused.stderr.split()), refused.stderr
    assert "a script is a file" in run("torchrun", "-", env=cluster, code=2).stderr


def test_layouts_tell_ranks_that_they_are_alone(run, write, gpu_cluster):
    script = write("dump.py", DUMP)
    virtual = ranks(run("torchrun", "--nproc-per-node", "2", "--virtual-local-rank", script, env=gpu_cluster))
    assert [rank["LOCAL_RANK"] for rank in virtual] == ["0", "0"]
    assert [rank["CUDA_VISIBLE_DEVICES"] for rank in virtual] == ["5", "GPU-aa"]
    options = ["--workers", "2", "--gpus-per-worker", "1", "--unprefixed", "--layout", "spark"]
    spark = ranks(run("train", *options, script, env=gpu_cluster))
    assert [(rank["LOCAL_RANK"], rank["LOCAL_WORLD_SIZE"]) for rank in spark] == [("0", "1")] * 2
    assert len({rank["CUDA_VISIBLE_DEVICES"] for rank in spark}) == 2


def test_only_named_signals_are_passed_on(binary, write, cluster):
    script = write("waits.py", """
        import os, signal, time
        signal.signal(signal.SIGUSR1, lambda *_: (os.write(1, b"got SIGUSR1\\n"), exit(0)))
        print("begun", flush=True)
        while True:
            time.sleep(0.01)
    """)
    command = [binary, "torchrun", "--signals-to-handle", "SIGUSR1", script]
    running = subprocess.Popen(command, env=cluster, stdout=subprocess.PIPE, text=True)
    assert running.stdout.readline() == "begun\n"
    running.send_signal(10)
    assert running.stdout.read() == "got SIGUSR1\n"
    running.stdout.close()
    assert running.wait() == 1


def test_a_file_without_an_end_is_refused_and_a_rank_s_own_variable_is_named(run, write, cluster, tmp_path):
    script = write("dump.py", DUMP)
    endless = run("train", "--file", "settings=/dev/zero", script, env=cluster, code=1)
    assert "/dev/zero is larger than 16" in endless.stderr
    done = run("train", "--env", "GROUP_RANK=7", "--env", "OURS=7", "--unprefixed", script, env=cluster)
    assert "--env GROUP_RANK=7: every rank gets this in place of its own GROUP_RANK" in done.stderr
    assert "OURS" not in done.stderr
