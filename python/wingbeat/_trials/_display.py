"""What is shown while trials run: a table in a terminal, and elsewhere a line now and then."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from wingbeat._trials._trial import ERROR, RUNNING, TERMINATED, Trial, is_number

# How often a line is printed where there is no terminal.
_LINE_S = 5.0
# How often the table is drawn, and how many trials it has.
_DRAW_S = 0.5
_MOST = 20


class Display:
    """Shows trials.

    Args:
        metric: The metric to improve.
        mode: "max" or "min".
        title: What runs them.
        is_quiet: Whether nothing is shown of what ends before the first line is due.
    """

    def __init__(self, metric: str | None, mode: str | None, *, title: str = "wingbeat tune", is_quiet: bool = False) -> None:
        self._metric, self._mode, self._title = metric, mode, title
        self._shown = time.monotonic() if is_quiet else 0.0
        self._is_quiet = is_quiet
        self._last = ""
        self._live: Any = None

    @contextlib.contextmanager
    def drawn(self) -> Iterator[None]:
        """Draws a table for the time of a `with`, if there is a terminal and `rich` is installed."""
        if sys.stderr is None or not sys.stderr.isatty():
            yield
            return
        try:
            from rich.console import Console
            from rich.live import Live
        except ImportError:
            yield
            return
        # What the program itself prints is shown above the table, unless it goes elsewhere.
        is_shown = sys.stdout is not None and sys.stdout.isatty()
        with Live(console=Console(stderr=True), auto_refresh=False, transient=True, redirect_stdout=is_shown) as self._live:
            yield
        self._live = None

    def say(self, text: str) -> None:
        """Prints a line.

        Args:
            text: The line.
        """
        with contextlib.suppress(OSError, ValueError):  # nobody reads it, or it cannot be encoded: trials go on
            if self._live is not None:
                self._live.console.print(text, markup=False, highlight=False)
            elif sys.stderr is not None:
                print(text, file=sys.stderr, flush=True)

    def update(self, trials: Sequence[Trial], is_last: bool = False) -> None:
        """Shows how far trials are, if it is time for that.

        Args:
            trials: All that were started.
            is_last: Whether it is shown in any case.
        """
        now = time.monotonic()
        if is_last and self._is_quiet and not self._last and self._live is None:
            return
        if not is_last and now - self._shown < (_LINE_S if self._live is None else _DRAW_S):
            return
        self._shown = now
        line = self._line(trials)
        if self._live is not None and not is_last:
            with contextlib.suppress(OSError, ValueError):
                self._live.update(self._table(trials, line), refresh=True)
        elif line != self._last:
            self._last = line
            self.say(line)

    def _line(self, trials: Sequence[Trial]) -> str:
        counts = {state: sum(trial.status == state for trial in trials) for state in (RUNNING, TERMINATED, ERROR)}
        waiting = sum(trial.waits for trial in trials)
        line = f"{self._title}: {counts[RUNNING] - waiting} running, {counts[TERMINATED]} done, {counts[ERROR]} failed"
        having = [trial for trial in trials if is_number(trial.last.get(self._metric or ""))]
        if having and self._mode is not None:
            best = (max if self._mode == "max" else min)(having, key=lambda trial: trial.last[self._metric or ""])
            value = best.last[self._metric or ""]
            line += f"; best {self._metric} {value:.6g} of {best.trial_id} ({best.parameters})"
        return line

    def _table(self, trials: Sequence[Trial], line: str) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(line), title_justify="left", box=None)
        for name in ("trial", "state", "parameters", "reports", "seconds", "metrics"):
            table.add_column(name, overflow="fold")
        # Those that run are seen in any case.
        order = sorted(trials, key=lambda trial: (trial.status != RUNNING, -trial.ended, trial.trial_id))
        for trial in order[:_MOST]:
            last = trial.last
            names = [name for name in last if name not in ("training_iteration", "time_total_s")]
            metrics = "  ".join(f"{name} {last[name]:.6g}" for name in names[:4])
            state = "stopped" if trial.is_stopped and trial.status == TERMINATED else trial.status.lower()
            state = "waiting" if trial.waits else state
            row = [trial.trial_id, state, trial.parameters, str(len(trial.counted)), f"{trial.seconds:.0f}", metrics]
            table.add_row(*map(Text, row))
        if len(order) > _MOST:
            table.add_row(f"and {len(order) - _MOST} more")
        return table
