"""Random sequences of calls against a real storage, compared with a model of ten lines."""

import asyncio
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from covey.v1 import storage_service_pb2 as pb
from covey_kit.caller import Role
from covey_kit.errors import (
    CoveyError,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Reason,
)
from covey_kit.status import rpc_errors
from covey_storage.app import StorageSettings
from support.storage import Storage, get, put, ref, sha256

T = TypeVar("T")

BLOBS = [bytes([65 + index]) * (index * 9 + 1) for index in range(4)]
HOLDERS = ["jobs/a", "jobs/b"]

blobs = st.sampled_from(BLOBS)
holders = st.sampled_from(HOLDERS)


class BlobStore(RuleBasedStateMachine):
    """The model: what is visible, what has arrived in part, what rotted, and who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.visible: set[bytes] = set()
        self.rotten: set[bytes] = set()  # on disk, not yet found
        self.quarantined: set[bytes] = set()
        self.parts: dict[bytes, int] = {}
        self.held: set[tuple[str, bytes]] = set()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Runs one call; gRPC errors become CoveyErrors."""

        async def bounded() -> T:
            with rpc_errors():
                async with asyncio.timeout(10):
                    return await call

        return self.loop.run_until_complete(bounded())

    def fails(self, call: Coroutine[Any, Any, Any], kind: type[CoveyError], reason: Reason) -> None:
        """The call is refused for this reason."""
        with pytest.raises(kind) as caught:
            self.run(call)
        assert caught.value.reason is reason

    @initialize()
    def start(self) -> None:
        """Serves a fresh folder."""
        self.served = Storage(StorageSettings(Path(self.folder.name, "s"), min_free_bytes=0))
        self.run(self.served.start())
        self._connect()
        # Something to lose from the beginning: most calls are refused in an empty storage.
        for data in BLOBS[:3]:
            self.write(data)
        self.reference("jobs/a", set(BLOBS[:2]))
        self.reference("jobs/b", set(BLOBS[1:3]))

    def _connect(self) -> None:
        async def stubs() -> None:
            self.stub = self.served.stub()
            self.grants = {job: self.served.stub(Role.GRANT, job) for job in ("a", "b")}

        self.run(stubs())

    def teardown(self) -> None:
        """Stops serving and removes the folder."""
        if hasattr(self, "served"):
            self.run(self.served.stop())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        self.folder.cleanup()

    async def unary(self, method: str, request: Any) -> Any:
        """One call of a unary method."""
        return await getattr(self.stub, method)(request)

    # ------------------------------------------------------------ writing

    @rule(data=blobs)
    def write(self, data: bytes) -> None:
        """A whole blob in one stream."""
        response = self.run(put(self.stub, data))
        assert response.already_existed == (data in self.visible)
        self._appeared(data)

    def _appeared(self, data: bytes) -> None:
        if data not in self.visible:
            self.rotten.discard(data)
            self.parts.pop(data, None)
        self.visible.add(data)
        self.quarantined.discard(data)

    @rule(data=blobs, fraction=st.floats(0, 1, exclude_max=True))
    def write_part(self, data: bytes, fraction: float) -> None:
        """A stream that ends early."""
        if data in self.visible:
            return
        sent = int(len(data) * fraction)
        self.fails(put(self.stub, data[:sent], blob=ref(data)), InvalidArgument, Reason.SIZE_MISMATCH)
        self.parts[data] = sent

    @rule(data=blobs)
    def go_on(self, data: bytes) -> None:
        """QueryWrite tells the truth, and the write goes on from there."""
        state = self.run(self.unary("QueryWrite", pb.QueryWriteRequest(sha256=sha256(data))))
        if data in self.visible:
            assert (state.committed_bytes, state.complete) == (len(data), True)
            return
        assert (state.committed_bytes, state.complete) == (self.parts.get(data, 0), False)
        self.run(put(self.stub, data, offset=state.committed_bytes))
        self._appeared(data)

    @rule(data=blobs, offset=st.integers(1, 60))
    def go_on_elsewhere(self, data: bytes, offset: int) -> None:
        """No write goes on anywhere else."""
        if data in self.visible or offset == self.parts.get(data, 0):
            return
        self.fails(put(self.stub, data, offset=offset), FailedPrecondition, Reason.OFFSET_MISMATCH)

    @rule(data=blobs)
    def write_wrong(self, data: bytes) -> None:
        """Wrong bytes are dropped."""
        if data in self.visible:
            return
        wrong = bytes(len(data))
        self.fails(put(self.stub, wrong, blob=ref(data)), InvalidArgument, Reason.DIGEST_MISMATCH)
        self.parts.pop(data, None)

    # ------------------------------------------------------------ reading

    @rule(data=blobs, begin=st.integers(0, 40), size=st.integers(0, 40))
    def read(self, data: bytes, begin: int, size: int) -> None:
        """A range, by an owner."""
        whole = begin == 0 and (size == 0 or size >= len(data))
        call = get(self.stub, sha256(data), begin, size)
        if data in self.quarantined:
            self.fails(call, DataLoss, Reason.BLOB_CORRUPT)
        elif data not in self.visible:
            self.fails(call, NotFound, Reason.BLOB_NOT_FOUND)
        elif data in self.rotten and whole:
            self.fails(call, DataLoss, Reason.BLOB_CORRUPT)
            self._found(data)
        elif begin > len(data):
            self.fails(call, CoveyError, Reason.RANGE)
        else:
            found = self.run(call)[1]
            if data not in self.rotten:
                assert found == data[begin:][: size or None]

    @rule(data=blobs, job=st.sampled_from(["a", "b"]))
    def read_with_grant(self, data: bytes, job: str) -> None:
        """A whole blob, by a grant."""
        call = get(self.grants[job], sha256(data))
        if (f"jobs/{job}", data) not in self.held:
            self.fails(call, PermissionDenied, Reason.NO_GRANT)
        elif data in self.quarantined or data in self.rotten:
            self.fails(call, DataLoss, Reason.BLOB_CORRUPT)
            self._found(data)
        else:
            assert self.run(call)[1] == data

    def _found(self, data: bytes) -> None:
        self.rotten.discard(data)
        self.visible.discard(data)
        self.quarantined.add(data)

    # ------------------------------------------------------------ holders

    @rule(holder=holders, wanted=st.sets(blobs, min_size=1, max_size=2))
    def reference(self, holder: str, wanted: set[bytes]) -> None:
        """All or none."""
        request = pb.AddReferencesRequest(holder=holder, sha256=[sha256(data) for data in wanted])
        call = self.unary("AddReferences", request)
        if wanted <= self.visible:
            self.run(call)
            self.held |= {(holder, data) for data in wanted}
        else:
            self.fails(call, FailedPrecondition, Reason.BLOB_MISSING)

    @rule(holder=holders, delete=st.booleans())
    def release(self, holder: str, delete: bool) -> None:
        """Drops what a holder has, with or without its blobs."""
        mine = {data for who, data in self.held if who == holder}
        self.held = {(who, data) for who, data in self.held if who != holder}
        freed = mine - {data for _, data in self.held} if delete else set()
        request = pb.ReleaseHolderRequest(holder=holder, delete_unreferenced=delete)
        response = self.run(self.unary("ReleaseHolder", request))
        assert response.references_dropped == len(mine)
        assert response.blobs_deleted == len(freed)
        assert response.bytes_freed == sum(map(len, freed))
        for data in freed:
            self._gone(data)

    @rule(data=blobs)
    def delete(self, data: bytes) -> None:
        """Only what nobody holds."""
        call = self.unary("DeleteBlob", pb.DeleteBlobRequest(sha256=sha256(data)))
        if any(held == data for _, held in self.held):
            self.fails(call, FailedPrecondition, Reason.BLOB_REFERENCED)
            return
        assert self.run(call).deleted == (data in self.visible | self.quarantined)
        self._gone(data)

    def _gone(self, data: bytes) -> None:
        for state in (self.visible, self.rotten, self.quarantined):
            state.discard(data)

    # ------------------------------------------------------------ the world

    @rule(data=blobs)
    def rot(self, data: bytes) -> None:
        """A file's bytes change behind storage's back."""
        if data in self.visible:
            self.served.blob_path(sha256(data)).write_bytes(bytes(len(data)))
            self.rotten.add(data)

    @rule()
    def scrub(self) -> None:
        """Finds exactly what rotted."""

        async def call() -> list[pb.ScrubResponse]:
            return [report async for report in self.stub.Scrub(pb.ScrubRequest())]

        reports = self.run(call())
        damaged = {digest for report in reports for digest in report.damaged}
        assert damaged == set(map(sha256, self.rotten))
        assert reports[-1].blobs_checked == len(self.visible)
        assert reports[-1].orphans_removed == 0
        for data in list(self.rotten):
            self._found(data)

    @rule(lose_records=st.booleans())
    def restart(self, lose_records: bool) -> None:
        """Everything is as before, unless the database is lost.

        Then sound files come back, held by nobody, and damaged ones are dropped.
        """
        self.run(self.served.stop())
        if lose_records:
            for path in self.served.folder.glob("storage.sqlite*"):
                path.unlink()
            self.visible -= self.rotten
            for state in (self.rotten, self.quarantined, self.held):
                state.clear()
        self.run(self.served.start())
        self._connect()

    @invariant()
    def the_inventory_agrees(self) -> None:
        """Numbers, holders and missing blobs are the model's."""
        if not hasattr(self, "stub"):
            return
        found = self.run(self.unary("GetInventory", pb.GetInventoryRequest()))
        unheld = self.visible - {data for _, data in self.held}
        assert found.blob_count == len(self.visible)
        assert found.blob_bytes == sum(map(len, self.visible))
        assert found.unreferenced_count == len(unheld)
        assert found.unreferenced_bytes == sum(map(len, unheld))
        assert found.quarantined_count == len(self.quarantined)
        assert found.partial_count == len(self.parts)
        assert {blob.blob.sha256: (list(blob.holders), blob.quarantined) for blob in found.blobs} == {
            sha256(data): (
                sorted(who for who, held in self.held if held == data),
                data in self.quarantined,
            )
            for data in self.visible | self.quarantined
        }
        missing = self.run(self.unary("FindMissingBlobs", pb.FindMissingBlobsRequest(blobs=map(ref, BLOBS))))
        assert list(missing.missing) == [ref(data) for data in BLOBS if data not in self.visible]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.may_block
def test_any_sequence_of_calls_does_what_the_model_says() -> None:
    """Writes, cuts, references, rot, scrubs and restarts in any order leave what the model expects."""
    run_state_machine_as_test(BlobStore, settings=settings(max_examples=30, stateful_step_count=25))
