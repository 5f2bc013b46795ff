"""Which snapshot is the newest and whether it is current."""

from covey_diagnostics.domain import STALE_AFTER_SECONDS, Executions, Order, Staleness


def accept(table: Executions[str], text: str, order: Order, monotonic: float, job: str | None = None) -> bool:
    return table.accept("p1", text, order, job_id=job, now=1000.0, monotonic=monotonic)


def test_older_and_repeated_snapshots_are_dropped() -> None:
    """Order is by run, then by sequence; the device's clock plays no part within a run."""
    table: Executions[str] = Executions()

    assert accept(table, "b", Order(1.0, 2), 0.0)
    assert not accept(table, "a", Order(1.0, 1), 1.0)
    assert not accept(table, "b", Order(1.0, 2), 1.0)
    assert accept(table, "new run", Order(2.0, 0), 2.0)
    assert [e.snapshot for e in table.all()] == ["new run"]


def test_silence_is_measured_by_the_servers_clock() -> None:
    """Current until ten seconds after it was received, silent from then on."""
    table: Executions[str] = Executions()
    table.opened("p1")
    accept(table, "a", Order(0.0, 0), 100.0)
    (execution,) = table.all()

    assert execution.staleness(100.0 + STALE_AFTER_SECONDS - 0.001) is Staleness.CURRENT
    assert execution.staleness(100.0 + STALE_AFTER_SECONDS) is Staleness.SILENT
    assert table.next_change(104.0) == STALE_AFTER_SECONDS - 4.0
    assert table.next_change(100.0 + STALE_AFTER_SECONDS) is None


def test_a_participant_is_disconnected_when_its_last_stream_ends() -> None:
    """A reconnection that overlaps with the old stream doesn't make it stale."""
    table: Executions[str] = Executions()
    table.opened("p1")
    accept(table, "a", Order(0.0, 0), 0.0)
    table.opened("p1")
    table.closed("p1")
    assert table.all()[0].staleness(1.0) is Staleness.CURRENT

    table.closed("p1")

    assert table.all()[0].staleness(1.0) is Staleness.DISCONNECTED


def test_executions_can_be_asked_for_by_job() -> None:
    """Idle participants belong to no job."""
    table: Executions[str] = Executions()
    accept(table, "a", Order(0.0, 0), 0.0, job="j1")

    assert len(table.all("j1")) == 1
    assert table.all("j2") == []
