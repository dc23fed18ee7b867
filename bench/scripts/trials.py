"""How much of the time of its slots a search uses: 12 trials on 4 slots.

`python trials.py [SECONDS …]` runs `tune.Tuner` with 12 trials that sleep so long (1.4 and 3 s if nothing is said), four at a time. It
prints the time from the first trial's begin to the last one's report, and the part of it that three rounds of trials would take alone. It
starts a cluster of 4 pretended CPUs of its own, unless WINGBEAT_ADDRESS names one: trials sleep, and need no CPU of the machine.
"""

import json
import pathlib
import sys
import tempfile
import time

from wingbeat import tune

TRIALS, SLOTS = 12, 4


def trial(config):
    begun = time.time()
    time.sleep(config["seconds"])
    tune.report({"begun": begun, "ended": time.time()})


def main():
    for seconds in [float(word) for word in sys.argv[1:]] or [1.4, 3.0]:
        with tempfile.TemporaryDirectory() as folder:
            results = tune.Tuner(
                tune.with_resources(trial, {"cpu": 0.01}),
                param_space={"seconds": seconds, "number": tune.grid_search(list(range(TRIALS)))},
                tune_config=tune.TuneConfig(max_concurrent_trials=SLOTS),
                run_config=tune.RunConfig(storage_path=folder),
            ).fit()
            metrics = [json.loads(pathlib.Path(one.path, "metrics.jsonl").read_text().splitlines()[0]) for one in results]
        took = max(one["ended"] for one in metrics) - min(one["begun"] for one in metrics)
        ideal = TRIALS / SLOTS * seconds
        print(f"{TRIALS} trials of {seconds} s on {SLOTS} slots: {took:.2f} s, {ideal / took:.2f} of ideal", flush=True)


if __name__ == "__main__":
    main()
