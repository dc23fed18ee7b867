"""Checkpoints in S3: with a `wingbeat` that was built with `--features cloud`, named by WINGBEAT_BIN, and a moto_server
(`pip install 'moto[s3,server]'`), named by WINGBEAT_TEST_S3."""

import contextlib
import http.client
import http.server
import os
import re
import subprocess
import threading

import pytest
from conftest import one_node
from test_train import CHECKPOINTS

SERVER = os.environ.get("WINGBEAT_TEST_S3")

pytestmark = pytest.mark.skipif(not SERVER, reason="WINGBEAT_TEST_S3 names no moto_server")


@pytest.fixture(scope="module")
def s3():
    """The port of a pretended S3 with the bucket `bucket`."""
    server = subprocess.Popen([SERVER, "-H", "127.0.0.1", "-p", "0"], stderr=subprocess.PIPE, text=True)
    port = next(int(found[1]) for found in (re.search(r"Running on http://127.0.0.1:(\d+)", line) for line in server.stderr) if found)
    threading.Thread(target=lambda: [None for _ in server.stderr], daemon=True).start()
    ask(port, "PUT", "/bucket")
    yield port
    server.terminate()
    server.wait()


def ask(port, method, path, body=b"", headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request(method, path, body, {"Authorization": "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request", **(headers or {})})
    answer = connection.getresponse()
    with contextlib.closing(connection):
        return answer.status, dict(answer.getheaders()), answer.read()


def stored(port, prefix):
    """What lies below a prefix."""
    return sorted(re.findall(rf"<Key>{prefix}/([^<]*)</Key>", ask(port, "GET", f"/bucket?list-type=2&prefix={prefix}/")[2].decode()))


def settings(port):
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "a secret of tests",
        "AWS_REGION": "us-east-1",
    }


@contextlib.contextmanager
def in_front_of(port, before):
    """The port of a server that passes requests on, each after `before(method, path, body)`."""

    class Passing(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            before(self.command, self.path, body)
            headers = {name: value for name, value in self.headers.items() if name.lower() not in ("connection",)}
            status, answered, content = ask(port, self.command, self.path, body, headers)
            self.send_response(status)
            for name, value in answered.items():
                if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                    self.send_header(name, value)
            length = answered.get("Content-Length", len(content)) if self.command == "HEAD" else len(content)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Passing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def test_checkpoints_are_stored_in_s3_and_a_restart_goes_on_from_the_newest(run, write, binary, environment, tmp_path, s3):
    script = write("saves.py", CHECKPOINTS)
    options = ("-n", "2", "--max-failures", "1", "--storage", "s3://bucket/goes-on", "--keep", "1", "--keep-best", "loss:min")
    with one_node(binary, environment, tmp_path) as env:
        env = {**env, **settings(s3)}
        done = run("train", *options, script, env=env, cwd=tmp_path)
        assert done.stdout.count("starts at 0") == 2 and done.stdout.count("starts at 2") == 2
        files = [".wingbeat-complete.json", ".wingbeat-made-in", "rank-0", "rank-1", "state.json"]
        of_checkpoints = [key for key in stored(s3, "goes-on") if key.startswith("checkpoint_")]
        assert of_checkpoints == [f"checkpoint_00000{number}/{file}" for number in (2, 4) for file in files]
        assert run("train", *options, script, env=env, cwd=tmp_path).stdout.count("starts at 4") == 2, "the next run goes on, too"


def test_a_checkpoint_waits_for_the_removal_of_old_ones_and_not_for_ever(run, write, binary, environment, tmp_path, s3):
    others = threading.Event()

    def before(method, path, body):
        if method == "PUT" and "checkpoint_000004/.wingbeat-complete" in path:
            others.set()
        # The first removal stands still until the next checkpoints are complete.
        if b"<Delete" in body and b"checkpoint_" in body:
            others.wait()

    script = write("four.py", """
        from wingbeat import train
        for step in range(4):
            train.report({"step": step}, checkpoint=__file__)
    """)
    with in_front_of(s3, before) as port, one_node(binary, environment, tmp_path) as env:
        env = {**env, **settings(port), "WINGBEAT_STORAGE_LIMIT_MS": "1000"}
        run("train", "--storage", "s3://bucket/slow", "--keep", "1", script, env=env, cwd=tmp_path)
    assert {key.split("/")[0] for key in stored(s3, "slow") if key.startswith("checkpoint_")} == {"checkpoint_000004"}


def test_a_storage_that_refuses_is_named_before_training(run, write, binary, environment, tmp_path, s3):
    script = write("never.py", "print('trained')")
    with one_node(binary, environment, tmp_path) as env:
        done = run("train", "--storage", "s3://nowhere/run", script, env={**env, **settings(s3)}, code=1)
    assert "s3://nowhere/run" in done.stderr and "trained" not in done.stdout, done.stderr
    assert "a secret of tests" not in done.stderr


def test_ranks_read_a_dataset_there(s3, cluster, python, tmp_path):
    done = python("""
        import pyarrow, pyarrow.fs, pyarrow.parquet
        from wingbeat import train

        def loop():
            shard = train.get_dataset_shard()
            rows = [row for batch in shard.iter_batches(batch_size=100, shuffle_seed=1) for row in batch["id"].tolist()]
            train.report({"rows": len(rows), "sum": sum(rows)})

        if __name__ == "__main__":
            storage, _ = pyarrow.fs.FileSystem.from_uri("s3://bucket/rows")
            for number in range(3):
                table = pyarrow.table({"id": range(number * 1000, number * 1000 + 1000)})
                pyarrow.parquet.write_table(table, f"bucket/rows/{number}.parquet", filesystem=storage, row_group_size=200)
            trainer = train.TorchTrainer(
                loop, datasets={"train": "s3://bucket/rows"}, scaling_config=train.ScalingConfig(num_workers=2),
                run_config=train.RunConfig(storage_path="stored", worker_runtime_env={"env_vars": dict(%r)}),
            )
            print("rows", trainer.fit().metrics["rows"])
            try:
                train.read_files("s3://bucket/none.parquet")
            except train.UnreadableFileError as error:
                print(error)
    """ % settings(s3), env={**cluster, **settings(s3), "XDG_DATA_HOME": str(tmp_path)})
    assert "rows 1500.0" in done.stdout
    assert "s3://bucket/none.parquet cannot be read: there is no such file" in done.stdout
