"""Storage's decisions, without a server."""

import asyncio
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.v1 import package_pb2
from covey.v1 import storage_service_pb2 as pb
from covey_kit.errors import InvalidArgument, OutOfRange, Reason, ResourceExhausted, Unavailable
from covey_storage.convert import expectation_from_proto, expectation_to_proto
from covey_storage.domain.gate import Gate
from covey_storage.domain.locks import KeyedLocks
from covey_storage.domain.model import BlobRef, Examined, JobHolder, Problem
from covey_storage.domain.pages import PageTokens
from covey_storage.domain.reads import range_of
from covey_storage.domain.shelf import record_of
from covey_storage.domain.writes import Limits, check_room
from covey_storage.state.objects import open_bucket

sizes = st.integers(0, 1 << 40)
BLOB = BlobRef("a" * 64, 100)


@given(sizes, sizes, sizes)
def test_a_range_lies_in_its_blob(size: int, offset: int, limit: int) -> None:
    """What is sent begins where asked, ends in the blob, and is as much as was asked if there is."""
    if offset > size:
        with pytest.raises(OutOfRange) as caught:
            range_of(size, offset, limit)
        assert caught.value.reason is Reason.RANGE
        return

    begin, length = range_of(size, offset, limit)

    assert begin == offset
    assert length == (size - offset if limit == 0 else min(limit, size - offset))


@given(sizes, sizes, sizes, sizes, sizes)
def test_room_is_for_what_is_still_to_come(size: int, offset: int, free: int, limit: int, keep: int) -> None:
    """A blob over the bound is refused first; else what is missing must fit beside what is kept free."""
    limits = Limits(limit, keep)
    if size > limit:
        expected = Reason.LIMIT_EXCEEDED
    elif size - offset > max(free - keep, 0):
        expected = Reason.STORAGE_FULL
    else:
        check_room(BlobRef("0" * 64, size), offset, free, limits)
        return
    with pytest.raises(ResourceExhausted) as caught:
        check_room(BlobRef("0" * 64, size), offset, free, limits)
    assert caught.value.reason is expected


@given(st.text(max_size=50), st.text(max_size=50), st.binary(min_size=16, max_size=16))
def test_page_tokens_come_back(listing: str, after: str, secret: bytes) -> None:
    """A token gives back the place it was made for, to the same listing of the same storage only."""
    tokens = PageTokens(secret)
    token = tokens.issue(listing, after)

    assert tokens.read(listing, token) == after
    for other, name in ((PageTokens(secret + b"x"), listing), (tokens, listing + "x")):
        with pytest.raises(InvalidArgument) as caught:
            other.read(name, token)
        assert caught.value.reason is Reason.PAGE_TOKEN


@given(st.text(max_size=100))
def test_made_up_page_tokens_are_refused(token: str) -> None:
    """Any text that isn't a token of ours is PAGE_TOKEN, whatever characters it has."""
    with pytest.raises(InvalidArgument) as caught:
        PageTokens(b"secret secret secret").read("inventory", token)

    assert caught.value.reason is Reason.PAGE_TOKEN


def test_a_holder_stands_for_its_job() -> None:
    """`jobs/<id>` and nothing else stands for a job."""
    assert JobHolder.of("digits-1a2b") == "jobs/digits-1a2b"
    assert JobHolder.job_of("jobs/digits-1a2b") == "digits-1a2b"
    assert JobHolder.job_of("uploads/x") is None


def test_a_closed_gate_stops_transfers() -> None:
    """Before it's closed nothing happens; afterwards every look raises Unavailable with a time to retry."""
    gate = Gate(1)
    gate.check()
    gate.close()

    with pytest.raises(Unavailable) as caught:
        gate.check()

    assert caught.value.reason is Reason.SHUTTING_DOWN
    assert caught.value.retry_after is not None


def test_transfers_are_bounded() -> None:
    """As many transfers as may are let in; when one ends, however it ends, another may begin."""
    gate = Gate(2)
    with gate.transfer():
        with pytest.raises(KeyError), gate.transfer():
            raise KeyError
        with gate.transfer(), pytest.raises(Unavailable) as caught, gate.transfer():
            pass
        assert caught.value.reason is Reason.LIMIT_EXCEEDED


async def test_locks_are_held_one_at_a_time() -> None:
    """Holders of one key come one after the other, others at once; no key is remembered afterwards."""
    locks = KeyedLocks()
    inside: list[str] = []
    seen: list[list[str]] = []

    async def use(key: str) -> None:
        inside.append(key)
        seen.append(list(inside))
        await asyncio.sleep(0)
        inside.remove(key)

    await asyncio.gather(*(locks.run(key, partial(use, key)) for key in "aabba"))

    assert all(len(set(keys)) == len(keys) for keys in seen)
    assert any(len(keys) == 2 for keys in seen)
    assert locks._locks == {}


async def test_what_holds_a_lock_runs_to_its_end() -> None:
    """Cancelled callers stop waiting for the lock at once, but what already runs under it isn't cut."""
    locks = KeyedLocks()
    go_on, done = asyncio.Event(), []

    async def work(name: str) -> None:
        await go_on.wait()
        done.append(name)

    holder = asyncio.create_task(locks.run("a", lambda: work("holder")))
    await asyncio.sleep(0)
    waiter = asyncio.create_task(locks.run("a", lambda: work("waiter")))
    await asyncio.sleep(0)
    for task in (waiter, holder):
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert not holder.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await holder

    assert done == ["holder"]
    assert locks._locks == {}


def test_only_a_valid_file_becomes_a_record() -> None:
    """Problems, or weights that aren't whole, are refused with every violation; else there's a record."""
    whole = Examined((), b"header", 3, 1000, 4, "b" * 64)
    record = record_of("job", BLOB, whole)

    assert (record.job_id, record.round, record.blob) == ("job", 3, BLOB)
    assert (record.weights_offset, record.weights_bytes, record.weights_sha256) == (1000, 4, "b" * 64)
    problems = (Problem("TENSORS", "missing", "w"), Problem("PACKAGE", "other"))
    for wrong, fields in (
        (Examined(problems, b"header", 3, 1000, 4, "b" * 64), ["TENSORS[w]", "PACKAGE"]),
        (Examined(()), ["HEADER"]),
        (Examined((), b"header", 3), ["HEADER"]),
    ):
        with pytest.raises(InvalidArgument) as caught:
            record_of("job", BLOB, wrong)
        assert [violation.field for violation in caught.value.violations] == fields


@given(
    st.dictionaries(
        st.from_regex(r"\A[a-z]{1,8}\Z"), st.lists(st.integers(1, 1 << 20), max_size=4), max_size=5
    ),
    st.none() | st.integers(0, 2**32 - 1),
)
def test_expectations_convert_there_and_back(shapes: dict[str, list[int]], round_: int | None) -> None:
    """Names, order, shapes and an absent round survive the way through the domain."""
    message = pb.CheckpointExpectation(
        parameters=[package_pb2.Parameter(name=name, shape=shape) for name, shape in shapes.items()],
        package_name="p",
        package_version="1",
        module_sha256="a" * 64,
        round=round_,
    )

    assert expectation_to_proto(expectation_from_proto(message)) == message


def test_a_bucket_url_that_means_nothing_is_told() -> None:
    """A scheme that no store speaks is a ValueError with the URL in it."""
    with pytest.raises(ValueError, match="nonsense://x"):
        open_bucket("nonsense://x")
