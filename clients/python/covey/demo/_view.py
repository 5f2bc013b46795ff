"""What a demo shows while it runs: a live table on a terminal, lines elsewhere."""

import sys
from typing import Any, Self, TextIO

from covey.v1 import job_pb2
from covey.words import duration, mean_text, stage_word, state_word

__all__ = ["LiveView", "View", "make_view", "round_text"]


def round_text(summary: job_pb2.RoundSummary, wanted: int, unit: str) -> str:
    """Returns a finished round in one line."""
    if summary.round == 0:
        return "round 0: initial weights made"
    parts = [
        f"round {summary.round} of {wanted}: loss {mean_text(summary.metrics, 'loss')}",
        f"accuracy {mean_text(summary.metrics, 'accuracy')}",
        f"{summary.units:,} {unit}s",
        f"{len(summary.participant_ids)} participants",
    ]
    return ", ".join(parts)


class View:
    """Plain lines.

    Args:
        stream: where they go.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._rounds = 0
        self._validated: set[int] = set()
        self._errors: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def note(self, text: str) -> None:
        """Shows a sentence."""
        print(text, file=self._stream, flush=True)

    def job(self, job: job_pb2.Job) -> None:
        """Shows a new state of the job."""
        if job.HasField("last_error") and job.last_error.message not in self._errors:
            self._errors.add(job.last_error.message)
            self.note(f"went wrong on the way: {job.last_error.message}")
        if not job.HasField("latest_round"):
            return
        latest = job.latest_round
        if latest.round + 1 > self._rounds:
            self._rounds = latest.round + 1
            self.note(round_text(latest, job.progress.rounds_wanted, job.unit))
        if latest.validation_metrics and latest.round not in self._validated:
            self._validated.add(latest.round)
            self.note(
                f"round {latest.round}: held-out accuracy {mean_text(latest.validation_metrics, 'accuracy')}"
            )


class LiveView(View):
    """A table that is drawn over and over."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream, highlight=False, markup=False)
        self._live = Live(console=self._console, refresh_per_second=8, transient=True)
        self._held_out = ""

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._live.stop()

    def note(self, text: str) -> None:
        """Shows a sentence above the table."""
        self._console.print(text)

    def job(self, job: job_pb2.Job) -> None:
        """Draws the table anew."""
        super().job(job)
        self._live.update(self._render(job))

    def _render(self, job: job_pb2.Job) -> Any:
        from rich.box import SIMPLE_HEAD
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        progress = job.progress
        current = job.current_round.round if job.HasField("current_round") else progress.rounds_done
        head = f"{job.job_id}: {state_word(job.state)}, round {current} of {progress.rounds_wanted}"
        lines: list[Any] = [Text(head)]
        if progress.HasField("round_units_wanted") and progress.round_units_wanted:
            bar = ProgressBar(
                total=progress.round_units_wanted, completed=progress.round_units_done, width=40
            )
            row = Table.grid(padding=(0, 2))
            row.add_row(bar, f"{progress.round_units_done:,} of {progress.round_units_wanted:,} {job.unit}s")
            lines.append(row)
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for column in ("PARTICIPANT", "DOES", "ASSIGNMENT", "DONE", "FAILED"):
            table.add_column(column)
        for one in job.participants:
            name = one.display_name or one.participant_id
            does = stage_word(one.stage) if one.connected else "gone"
            table.add_row(name, does, one.assignment_id, str(one.assignments_done), str(one.failures))
        lines.append(table)
        lines += [Text(f"waits: {wait.message}") for wait in job.waits[:3]]
        return Group(*lines)


def make_view(stream: TextIO | None = None) -> View:
    """Returns the view that fits the stream (None: standard output)."""
    stream = stream or sys.stdout
    return LiveView(stream) if stream.isatty() else View(stream)


def final_rows(history: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Returns the rows of the table that ends a demo."""

    def cell(value: float | None) -> str | None:
        return None if value is None else f"{value:.4f}"

    return [
        (
            row["round"],
            cell(row["loss"]),
            cell(row["accuracy"]),
            cell(row["held_out_accuracy"]),
            f"{row['units']:,}",
            duration(row["seconds"]),
        )
        for row in history
    ]
