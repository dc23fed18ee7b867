"""What Ctrl-C does to trials in threads: each ends, wherever it is, and nothing else does."""

import queue
import signal
import threading

import pyarrow as pa
import pytest
from conftest import DEADLINE_SECONDS

from wingbeat import _command, _interrupts
from wingbeat.ml import _sgd, _shards, _trials
from wingbeat.ml._trials import Trial
from wingbeat.ml.classification import LogisticRegression


def ctrl_c():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def interrupted(*functions):
    """Runs functions as trials until one of them calls `ctrl_c`."""
    with pytest.raises(KeyboardInterrupt):
        _trials.run([Trial("", function) for function in functions], len(functions), stops_at_failure=False)


def ended(seconds=DEADLINE_SECONDS):
    """Waits for all threads of trials."""
    for thread in threading.enumerate():
        if thread.name.startswith("wingbeat-trial"):
            thread.join(seconds)
            assert not thread.is_alive()


@pytest.fixture
def training(monkeypatch):
    """Releases once for each epoch that a training has ended."""
    epochs = threading.Semaphore(0)

    class Told(_sgd.Progress):
        def rows_done(self, epoch, count):
            super().rows_done(epoch, count)
            epochs.release()

    monkeypatch.setattr(_sgd, "Progress", Told)
    return epochs


def fit():
    return LogisticRegression(maxIter=10**9, tol=0).fit(pa.table({"features": [[0.0], [1.0]], "label": [0, 1]}))


def test_trainings_in_this_process_end(training):
    def one():
        for _ in range(20):
            training.acquire(timeout=DEADLINE_SECONDS)
        ctrl_c()

    interrupted(fit, fit, one)
    ended()


def test_trainings_end_also_where_a_signal_ends_no_wait(training):
    signal.siginterrupt(signal.SIGINT, False)
    try:
        interrupted(fit, lambda: training.acquire(timeout=DEADLINE_SECONDS) and ctrl_c())
    finally:
        signal.siginterrupt(signal.SIGINT, True)
    ended()


def test_trials_of_a_trial_end(training):
    def outer():
        _trials.run([Trial("", fit), Trial("", fit)], 2, stops_at_failure=False)

    def one():
        training.acquire(timeout=DEADLINE_SECONDS)
        ctrl_c()

    interrupted(outer, one)
    ended()


def test_a_trial_that_was_about_to_start_ranks_starts_none(monkeypatch):
    monkeypatch.setenv("WINGBEAT_BIN", "/nonexistent")
    begun, before, raised = threading.Event(), threading.Event(), queue.Queue()

    def late():
        begun.set()  # one that is interrupted before it begins calls nothing
        assert before.wait(DEADLINE_SECONDS)
        try:
            _shards.on_ranks(print, (), 1)
        except BaseException as error:
            raised.put(type(error))

    interrupted(late, lambda: begun.wait(DEADLINE_SECONDS) and ctrl_c())
    before.set()
    assert raised.get(timeout=DEADLINE_SECONDS) is _interrupts.Interrupted
    ended()


def test_a_command_that_was_started_just_before_is_interrupted():
    interrupt = _interrupts.Interrupt()
    interrupt.set()
    with _interrupts.under([interrupt]):
        assert _command.run(["sleep", str(DEADLINE_SECONDS)], {}) == -signal.SIGINT


def test_commands_that_are_not_of_trials_go_on():
    started, codes = queue.Queue(), queue.Queue()

    class Seen(_interrupts.Interrupt):
        def add(self, command):
            started.put(command)

    def run():
        with _interrupts.under([Seen()]):
            codes.put(_command.run(["sleep", str(DEADLINE_SECONDS)], {}))

    other = threading.Thread(target=run)
    other.start()
    command = started.get(timeout=DEADLINE_SECONDS)
    interrupted(ctrl_c, lambda: None)
    # Of two signals that wait, the one with the lower number is first: SIGINT.
    command.terminate()
    assert codes.get(timeout=DEADLINE_SECONDS) == -signal.SIGTERM
    other.join()


def test_whatever_ends_a_search_ends_its_trials_and_starts_no_more():
    started, told = [], threading.Event()

    def leave(number, frame):
        raise SystemExit(143)

    def trial():
        started.append(threading.current_thread())
        if len(started) == 2:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
        assert told.wait(DEADLINE_SECONDS)
        _interrupts.check()

    before = signal.signal(signal.SIGTERM, leave)
    try:
        with pytest.raises(SystemExit):
            _trials.run([Trial(str(number), trial) for number in range(10)], 2, stops_at_failure=False)
    finally:
        signal.signal(signal.SIGTERM, before)
    told.set()
    ended()
    assert len(started) == 2
