"""The bench's rows on Ray's Python API: one JSON line a row, with the same names and the same work.

    python ray_rows.py FILE
"""

import functools
import json
import os
import statistics
import subprocess
import sys
import time

BEGUN = time.perf_counter()
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy
import ray

LARGE = 256 << 20
OUT = open(sys.argv[1], "w", encoding="utf-8")


def row(name, value, unit):
    line = json.dumps({"system": f"ray {ray.__version__}", "row": name, "value": value, "unit": unit})
    print(line, file=OUT, flush=True)
    print(f"   {name:<28} {value:>14,.2f} {unit}", file=sys.stderr, flush=True)


def seconds(work, repeat=3):
    """The median time of `work`, after one run that warms up."""
    work()
    times = []
    for _ in range(repeat):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


@ray.remote
def nop(x):
    return x


@ray.remote
def large(byte):
    return numpy.full(LARGE, byte, dtype=numpy.uint8)


@ray.remote(num_cpus=0)
class Counter:
    def __init__(self):
        self.n = 0

    def incr(self):
        self.n += 1
        return self.n

    def drive_tasks(self, count):
        assert ray.get([nop.remote(i) for i in range(count)]) == list(range(count))

    def drive_actors(self, others, count):
        ray.get([other.incr.remote() for _ in range(count) for other in others])


def memory_of_ray():
    """Summed PSS of Ray's own processes, in MiB."""
    listing = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True).stdout
    total = 0
    for line in listing.splitlines()[1:]:
        pid, args = line.split(None, 1)
        if any(part in args for part in ("ray::", "raylet", "gcs_server", "site-packages/ray/")):
            try:
                with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
                    total += next(int(text.split()[1]) for text in file if text.startswith("Pss:"))
            except OSError:
                pass  # it has ended
    return total / 1024


def sync(call, count):
    for i in range(count):
        ray.get(call(i))


def wait_for_all(count):
    left = [nop.remote(i) for i in range(count)]
    while left:
        _, left = ray.wait(left)


def create(count):
    actors = [Counter.remote() for _ in range(count)]
    assert ray.get([actor.incr.remote() for actor in actors]) == [1] * count


def main():
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error", object_store_memory=3 << 30)
    assert ray.get(nop.remote(7)) == 7
    row("startup_to_first_task", time.perf_counter() - BEGUN, "s")
    ray.get([nop.remote(i) for i in range(100)])
    row("idle_rss", memory_of_ray(), "MiB")
    row("tasks_sync", 300 / seconds(lambda: sync(nop.remote, 300)), "/s")
    row("tasks_async", 3000 / seconds(lambda: ray.get([nop.remote(i) for i in range(3000)])), "/s")
    chain = lambda: ray.get(functools.reduce(lambda last, _: nop.remote(last), range(100), 3))
    row("task_chain_100", seconds(chain), "s")
    clients = [Counter.remote() for _ in range(2)]
    others = [Counter.remote() for _ in range(2)]
    ray.get([actor.incr.remote() for actor in clients + others])
    drive = lambda: ray.get([client.drive_tasks.remote(1000) for client in clients])
    row("tasks_multi_client_async", 2000 / seconds(drive), "/s")
    counter = others[0]
    row("actor_sync", 500 / seconds(lambda: sync(lambda _: counter.incr.remote(), 500)), "/s")
    row("actor_async", 5000 / seconds(lambda: ray.get([counter.incr.remote() for _ in range(5000)])), "/s")
    drive = lambda: ray.get([client.drive_actors.remote(others, 1000) for client in clients])
    row("actor_n_n_async", 4000 / seconds(drive), "/s")
    row("put_small", 2000 / seconds(lambda: [ray.put(i) for i in range(2000)]), "/s")
    small = ray.put(7)
    row("get_small", 5000 / seconds(lambda: [ray.get(small) for _ in range(5000)]), "/s")
    data = numpy.full(LARGE, 7, dtype=numpy.uint8)
    row("put_bandwidth", 2 * LARGE / 1e9 / seconds(lambda: [ray.put(data) for _ in range(2)]), "GB/s")
    row("task_return_256MiB", LARGE / 1e9 / seconds(lambda: ray.get(large.remote(7))), "GB/s")
    stored = large.remote(7)
    row("get_view_256MiB", seconds(lambda: ray.get(stored), 20), "s")
    holder = ray.put([ray.put(i) for i in range(10_000)])
    row("get_object_with_10k_refs", 1 / seconds(lambda: ray.get(holder)), "/s")
    row("wait_1k_refs", 1 / seconds(lambda: wait_for_all(1000)), "/s")
    row("actor_create_to_first_reply", 8 / seconds(lambda: create(8), 2), "/s")
    ray.shutdown()


main()
