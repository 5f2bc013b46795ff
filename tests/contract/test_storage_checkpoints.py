"""Checkpoints over a real connection."""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from covey.v1 import checkpoint_pb2
from covey.v1 import storage_service_pb2 as pb
from covey_kit.blobs import write_bytes
from covey_kit.caller import Role
from covey_kit.errors import AlreadyExists, DataLoss, FailedPrecondition, InvalidArgument, NotFound, Reason
from covey_kit.status import rpc_errors
from support.storage import (
    WEIGHTS,
    Storage,
    expectation,
    get,
    join_file,
    put,
    ref,
    sha256,
    split_file,
    storage,
    version_1,
    weights,
    write_checkpoint,
)

Kind = checkpoint_pb2.CheckpointProblem.Kind
BODY = WEIGHTS * 4


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Storage]:
    """A running storage in a fresh folder."""
    async with storage(tmp_path / "storage") as found:
        yield found


@pytest.fixture
def checkpoint(tmp_path: Path) -> bytes:
    """A valid version 2 checkpoint with two optimizer tensors."""
    return write_checkpoint(tmp_path / "checkpoint")


async def put_checkpoint(
    served: Storage, data: bytes, job_id: str = "job-1", fits: pb.CheckpointExpectation | None = None
) -> checkpoint_pb2.Checkpoint:
    """Writes a file and records it as a checkpoint."""
    blob = await write_bytes(served.channel(), data)
    request = pb.PutCheckpointRequest(job_id=job_id, blob=blob, expectation=fits or expectation())
    with rpc_errors():
        response = await served.stub().PutCheckpoint(request)
    found: checkpoint_pb2.Checkpoint = response.checkpoint
    return found


async def verify(
    served: Storage, data: bytes, fits: pb.CheckpointExpectation | None = None
) -> pb.VerifyCheckpointResponse:
    """Writes a file and verifies it."""
    await put(served.stub(), data)
    request = pb.VerifyCheckpointRequest(sha256=sha256(data), expectation=fits)
    response: pb.VerifyCheckpointResponse = await served.stub(Role.VIEWER).VerifyCheckpoint(request)
    return response


def kinds(response: pb.VerifyCheckpointResponse) -> list[str]:
    """The kinds of problems found, without prefix."""
    return [Kind.Name(problem.kind).removeprefix("KIND_") for problem in response.problems]


async def test_a_checkpoint_is_recorded(served: Storage, checkpoint: bytes) -> None:
    """PutCheckpoint returns where the weights lie; reading that range gives exactly the weights."""
    recorded = await put_checkpoint(served, checkpoint)
    place = recorded.weights
    _, data, digest = await get(served.stub(), place.blob.sha256, place.offset, place.size_bytes)

    assert (recorded.job_id, recorded.round, recorded.blob) == ("job-1", 3, ref(checkpoint))
    assert data == weights().tobytes()
    assert digest == place.sha256 == recorded.header.weights_sha256
    assert (await served.stub().GetCheckpoint(pb.GetCheckpointRequest(job_id="job-1"))).checkpoint == recorded


async def test_a_recorded_checkpoint_belongs_to_its_job(served: Storage, checkpoint: bytes) -> None:
    """The job holds the file: its grant reads it, and it can't be deleted until the job is released."""
    await put_checkpoint(served, checkpoint)
    digest = sha256(checkpoint)

    assert (await get(served.stub(Role.GRANT, "job-1"), digest))[1] == checkpoint
    with pytest.raises(FailedPrecondition), rpc_errors():
        await served.stub().DeleteBlob(pb.DeleteBlobRequest(sha256=digest))
    released = await served.stub().ReleaseHolder(
        pb.ReleaseHolderRequest(holder="jobs/job-1", delete_unreferenced=True)
    )
    assert released.blobs_deleted == 1
    with pytest.raises(NotFound) as caught, rpc_errors():
        await served.stub().GetCheckpoint(pb.GetCheckpointRequest(job_id="job-1"))
    assert caught.value.reason is Reason.CHECKPOINT_NOT_FOUND


async def test_recording_again_changes_nothing(served: Storage, checkpoint: bytes) -> None:
    """The same call again gives the same answer; two jobs may share a file."""
    first = await put_checkpoint(served, checkpoint)
    again = await put_checkpoint(served, checkpoint)
    other = await put_checkpoint(served, checkpoint, "job-2")

    assert again == first
    assert other.job_id == "job-2"
    inventory = await served.stub().GetInventory(pb.GetInventoryRequest())
    assert inventory.checkpoint_count == 2
    assert list(inventory.blobs[0].holders) == ["jobs/job-1", "jobs/job-2"]


async def test_a_round_has_one_checkpoint(served: Storage, checkpoint: bytes, tmp_path: Path) -> None:
    """Another file for a recorded round is refused, both digests are named, and the first stays."""
    await put_checkpoint(served, checkpoint)
    other = write_checkpoint(tmp_path / "other", seed=1)

    with pytest.raises(AlreadyExists) as caught:
        await put_checkpoint(served, other)

    assert caught.value.reason is Reason.CHECKPOINT_INVALID
    assert sha256(checkpoint) in caught.value.message
    assert sha256(other) in caught.value.message
    kept = await served.stub().GetCheckpoint(pb.GetCheckpointRequest(job_id="job-1", round=3))
    assert kept.checkpoint.blob == ref(checkpoint)


async def test_a_checkpoint_needs_its_file(served: Storage, checkpoint: bytes) -> None:
    """Recording a file that was never written, or naming another size, is BLOB_MISSING."""
    request = pb.PutCheckpointRequest(job_id="j", blob=ref(checkpoint), expectation=expectation())
    with pytest.raises(FailedPrecondition) as caught, rpc_errors():
        await served.stub().PutCheckpoint(request)
    assert caught.value.reason is Reason.BLOB_MISSING

    await put(served.stub(), checkpoint)
    request.blob.size_bytes += 1
    with pytest.raises(FailedPrecondition) as caught, rpc_errors():
        await served.stub().PutCheckpoint(request)
    assert caught.value.reason is Reason.BLOB_MISSING


async def test_an_invalid_checkpoint_is_not_recorded(served: Storage, checkpoint: bytes) -> None:
    """Every problem is in the error, and neither record nor reference is left."""
    outer, inner, body = split_file(checkpoint)
    inner["weightsSha256"] = "0" * 64
    inner["packageVersion"] = "2.0.0"

    with pytest.raises(InvalidArgument) as caught:
        await put_checkpoint(served, join_file(outer, inner, body))

    assert caught.value.reason is Reason.CHECKPOINT_INVALID
    assert [violation.field for violation in caught.value.violations] == ["PACKAGE", "WEIGHTS_DIGEST"]
    inventory = await served.stub().GetInventory(pb.GetInventoryRequest())
    assert inventory.checkpoint_count == 0
    assert list(inventory.blobs[0].holders) == []


async def test_checkpoints_are_listed_by_round(served: Storage, tmp_path: Path) -> None:
    """Pages show each checkpoint of the job once, by round; without a round the latest is returned."""
    for round_ in (10, 2, 0, 7, 5):
        await put_checkpoint(served, write_checkpoint(tmp_path / "c", round_=round_))
    await put_checkpoint(served, write_checkpoint(tmp_path / "c", round_=99), "job-2")
    rounds: list[int] = []
    token, pages = "", 0
    while pages == 0 or token:
        page = await served.stub(Role.VIEWER).ListCheckpoints(
            pb.ListCheckpointsRequest(job_id="job-1", page_size=2, page_token=token)
        )
        rounds += [found.round for found in page.checkpoints]
        token, pages = page.next_page_token, pages + 1

    latest = await served.stub().GetCheckpoint(pb.GetCheckpointRequest(job_id="job-1"))
    initial = await served.stub().GetCheckpoint(pb.GetCheckpointRequest(job_id="job-1", round=0))

    assert (rounds, pages) == ([0, 2, 5, 7, 10], 3)
    assert latest.checkpoint.round == 10
    assert initial.checkpoint.round == 0


async def test_pages_end_exactly(served: Storage, tmp_path: Path) -> None:
    """A list whose length is a multiple of its pages (and of how it's fetched) ends with its last page."""
    for round_ in range(40):
        await put_checkpoint(served, write_checkpoint(tmp_path / "c", round_=round_, optimizer=()))
    for page_size in (0, 10, 20, 40):
        rounds: list[int] = []
        sizes: list[int] = []
        token = ""
        while not sizes or token:
            page = await served.stub().ListCheckpoints(
                pb.ListCheckpointsRequest(job_id="job-1", page_size=page_size, page_token=token)
            )
            rounds += [found.round for found in page.checkpoints]
            sizes.append(len(page.checkpoints))
            token = page.next_page_token
        assert rounds == list(range(40))
        assert sizes == [page_size or 40] * (40 // (page_size or 40))


async def test_there_may_be_no_checkpoint(served: Storage, checkpoint: bytes) -> None:
    """An unknown job and an unknown round are NOT_FOUND; an unknown job's list is empty."""
    await put_checkpoint(served, checkpoint)
    for request in (
        pb.GetCheckpointRequest(job_id="nobody"),
        pb.GetCheckpointRequest(job_id="job-1", round=4),
    ):
        with pytest.raises(NotFound) as caught, rpc_errors():
            await served.stub().GetCheckpoint(request)
        assert caught.value.reason is Reason.CHECKPOINT_NOT_FOUND
    assert not (await served.stub().ListCheckpoints(pb.ListCheckpointsRequest(job_id="x"))).checkpoints


async def test_both_versions_are_valid(served: Storage, checkpoint: bytes) -> None:
    """Versions 1 and 2 verify, with and without an expectation, and both can be recorded."""
    for data in (checkpoint, version_1(checkpoint)):
        for fits in (None, expectation(), expectation(3)):
            response = await verify(served, data, fits)
            assert response.valid, response.problems
            assert response.header.weight_count == WEIGHTS
    assert (await put_checkpoint(served, version_1(checkpoint))).header.format_version == 1


def _in_header(**changes: Any) -> Callable[[bytes], bytes]:
    def damage(data: bytes) -> bytes:
        outer, inner, body = split_file(data)
        return join_file(outer, {**inner, **changes}, body)

    return damage


def _entry(name: str, **changes: Any) -> Callable[[bytes], bytes]:
    def damage(data: bytes) -> bytes:
        outer, inner, body = split_file(data)
        return join_file({**outer, name: {**outer[name], **changes}}, inner, body)

    return damage


def _byte(position: int, value: bytes) -> Callable[[bytes], bytes]:
    """Replaces bytes of the tensors."""

    def damage(data: bytes) -> bytes:
        outer, inner, body = split_file(data)
        return join_file(outer, inner, body[:position] + value + body[position + len(value) :])

    return damage


def _without_optimizer_v(data: bytes) -> bytes:
    outer, inner, body = split_file(data)
    del outer["optimizer.v"]
    return join_file(outer, inner, body[: 2 * BODY])


def _short_optimizer(data: bytes) -> bytes:
    outer, inner, body = split_file(data)
    outer["optimizer.v"] = {"dtype": "F32", "shape": [1], "data_offsets": [2 * BODY, 2 * BODY + 4]}
    return join_file(outer, inner, body[: 2 * BODY + 4])


DAMAGE: dict[str, tuple[list[str], Callable[[bytes], bytes]]] = {
    "cut": (["TRUNCATED"], lambda data: data[:-1]),
    "cut before its tensors": (["TRUNCATED"], lambda data: data[:200]),
    "too short for anything": (["TRUNCATED"], lambda data: data[:5]),
    "bytes behind": (["TRUNCATED"], lambda data: data + b"\0"),
    "not safetensors": (["HEADER"], lambda _: b"PK\x03\x04 a zip, say" * 10),
    "no checkpoint": (["HEADER"], lambda data: join_file({}, {}, b"")),
    "hostile length": (["HEADER"], lambda data: b"\xff" * 8 + data[8:]),
    "unknown field": (["HEADER"], _in_header(jobId="job-1")),
    "bad field": (["HEADER"], _in_header(moduleSha256="x")),
    "version 1 with fields of 2": (["HEADER"], _in_header(formatVersion=1)),
    "newer version": (["UNKNOWN_VERSION"], _in_header(formatVersion=3, news="…")),
    "missing tensor": (["TENSORS"], _without_optimizer_v),
    "unnamed tensor": (
        ["TENSORS", "WEIGHTS_SIZE", "WEIGHTS_DIGEST"],
        _in_header(parameterNames=["dense.weight", "dense.bias"]),
    ),
    "other dtype": (["TENSORS"], _entry("scale", dtype="I32")),
    "overlap": (["HEADER"], _entry("dense.bias", data_offsets=[92, 108])),
    "other shape": (["SHAPE"], _entry("dense.weight", shape=[4, 6])),
    "weight count": (["WEIGHTS_SIZE"] + ["OPTIMIZER_SIZE"] * 2, _in_header(weightCount="28")),
    "weights digest": (["WEIGHTS_DIGEST"], _in_header(weightsSha256="0" * 64)),
    "flipped weight": (["WEIGHTS_DIGEST"], _byte(17, b"\x01")),
    "flipped optimizer": (["OPTIMIZER_DIGEST"], _byte(BODY + 17, b"\x01")),
    "short optimizer": (["OPTIMIZER_SIZE", "OPTIMIZER_DIGEST"], _short_optimizer),
    "NaN among the weights": (["WEIGHTS_DIGEST", "NOT_FINITE"], _byte(40, b"\x00\x00\xc0\x7f")),
    "infinity in the optimizer": (["OPTIMIZER_DIGEST", "NOT_FINITE"], _byte(2 * BODY, b"\x00\x00\x80\x7f")),
    "other package": (["PACKAGE"], _in_header(packageName="gomoku")),
    "other module": (["PACKAGE"], _in_header(moduleSha256="b" * 64)),
    "other round": (["ROUND"], _in_header(round=4)),
}


@pytest.mark.parametrize("name", DAMAGE)
async def test_each_damage_has_its_kind(served: Storage, checkpoint: bytes, name: str) -> None:
    """Every kind of damage is found and named by its own kind."""
    expected, damage = DAMAGE[name]
    data = damage(checkpoint)
    assert data != checkpoint

    response = await verify(served, data, expectation(3))

    assert kinds(response) == expected, response.problems
    assert not response.valid
    assert all(problem.message for problem in response.problems)


async def test_every_kind_is_tested() -> None:
    """The table above (and the test below, for FILE_DIGEST) shows each kind of the contract."""
    shown = {kind for expected, _ in DAMAGE.values() for kind in expected} | {"FILE_DIGEST", "UNSPECIFIED"}

    assert shown == {name.removeprefix("KIND_") for name in Kind.keys()}  # noqa: SIM118 - not a dict


async def test_rot_in_storage_is_a_wrong_file_digest(served: Storage, checkpoint: bytes) -> None:
    """A byte flipped on disk is FILE_DIGEST; recording it is refused and quarantines the blob."""
    await put(served.stub(), checkpoint)
    path = served.blob_path(sha256(checkpoint))
    path.write_bytes(checkpoint[:-1] + bytes([checkpoint[-1] ^ 1]))
    request = pb.VerifyCheckpointRequest(sha256=sha256(checkpoint))

    response = await served.stub().VerifyCheckpoint(request)

    assert kinds(response) == ["FILE_DIGEST", "OPTIMIZER_DIGEST"]
    put_request = pb.PutCheckpointRequest(job_id="j", blob=ref(checkpoint), expectation=expectation())
    with pytest.raises(InvalidArgument) as caught, rpc_errors():
        await served.stub().PutCheckpoint(put_request)
    assert caught.value.violations[0].field == "FILE_DIGEST"
    stat = await served.stub().StatBlob(pb.StatBlobRequest(sha256=sha256(checkpoint)))
    assert stat.blob.quarantined
    assert kinds(await served.stub().VerifyCheckpoint(request)) == ["FILE_DIGEST", "OPTIMIZER_DIGEST"]


async def test_rot_is_found_when_weights_are_read_alone(served: Storage, checkpoint: bytes) -> None:
    """A range read of a recorded checkpoint's weights is held against their digest, too."""
    place = (await put_checkpoint(served, checkpoint)).weights
    path = served.blob_path(sha256(checkpoint))
    position = place.offset + 9
    path.write_bytes(checkpoint[:position] + bytes([checkpoint[position] ^ 4]) + checkpoint[position + 1 :])

    with pytest.raises(DataLoss) as caught, rpc_errors():
        await get(served.stub(), place.blob.sha256, place.offset, place.size_bytes)

    assert caught.value.reason is Reason.BLOB_CORRUPT


async def test_an_unknown_file_cannot_be_verified(served: Storage) -> None:
    """Verifying what isn't there is NOT_FOUND."""
    with pytest.raises(NotFound) as caught, rpc_errors():
        await served.stub().VerifyCheckpoint(pb.VerifyCheckpointRequest(sha256="0" * 64))

    assert caught.value.reason is Reason.BLOB_NOT_FOUND


async def test_records_survive_a_restart(served: Storage, checkpoint: bytes) -> None:
    """A recorded checkpoint is the same after the process was restarted."""
    recorded = await put_checkpoint(served, checkpoint)
    await served.restart()

    found = await served.stub().GetCheckpoint(pb.GetCheckpointRequest(job_id="job-1"))

    assert found.checkpoint == recorded
    assert json.loads(split_file(checkpoint)[0]["__metadata__"]["covey"])["round"] == 3
