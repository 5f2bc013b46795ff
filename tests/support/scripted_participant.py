"""A participant that speaks WorkService with numpy in the place of WebAssembly.

What it computes is a pure function of (base weights, chunk, configuration), as of a real package, so the
same job gives the same bytes whoever runs it. A test scripts it: holds its work, has it fail, or sends
what it likes.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc.aio
import numpy as np
import numpy.typing as npt

from covey.v1 import common_pb2, errors_pb2, job_pb2, storage_service_pb2, storage_service_pb2_grpc
from covey.v1 import work_service_pb2 as pb
from covey.v1 import work_service_pb2_grpc as pb_grpc
from covey_kit.channel import connect
from covey_kit.errors import Aborted, CoveyError, Unavailable
from covey_kit.status import from_rpc_error, rpc_errors
from covey_kit.uploads import Upload
from covey_kit.version import CONTRACT_VERSION
from support.eventually import eventually

T = TypeVar("T")
Weights = npt.NDArray[np.float32]


@dataclass
class Outcome:
    """What comes of an assignment: a delta (or initial weights), or metrics alone, or a failure."""

    delta: Weights | None = None
    units: int = 0
    metrics: list[common_pb2.MetricValue] = field(default_factory=list)
    failure: str = ""
    package_fault: bool = False


def metric(name: str, total: float | None, count: float) -> common_pb2.MetricValue:
    """A metric's sum over a count."""
    return common_pb2.MetricValue(name=name, sum=total, count=count)


def weight_count(assignment: pb.Assignment) -> int:
    """Weights of an assignment's package."""
    return sum(int(np.prod(p.shape, dtype=np.int64)) for p in assignment.package.parameters)


def compute(assignment: pb.Assignment, base: Weights | None) -> Outcome:
    """Trains (a noisy step towards numbers that the chunk decides), initializes, or evaluates."""
    count = weight_count(assignment)
    noise = np.random.default_rng(assignment.config.seed & ((1 << 64) - 1))
    if assignment.kind == job_pb2.ASSIGNMENT_KIND_INITIALIZE:
        return Outcome(delta=noise.normal(size=count).astype(np.float32))
    assert base is not None
    if assignment.kind == job_pb2.ASSIGNMENT_KIND_EVALUATE:
        loss = float(np.sum(base.astype(np.float64) ** 2))
        units = assignment.unit_range.units if assignment.HasField("unit_range") else 10
        return Outcome(units=units, metrics=[metric("loss", loss, units)])
    if assignment.HasField("unit_range"):
        return play(assignment, base, noise)
    chunk = assignment.chunks.chunks[0]
    digest = hashlib.sha256(chunk.sha256.encode()).digest()
    target = np.frombuffer((digest * (count // 32 + 1))[:count], dtype=np.uint8).astype(np.float32) / 255
    step = np.float32(assignment.config.learning_rate) * (target - base)
    step += noise.normal(scale=0.001, size=count).astype(np.float32)
    loss = float(np.sum((target - base).astype(np.float64) ** 2)) * chunk.example_count
    measured = metric("loss", loss if chunk.example_count else None, chunk.example_count)
    return Outcome(step.astype(np.float32), chunk.example_count, [measured])


def play(assignment: pb.Assignment, base: Weights, noise: np.random.Generator) -> Outcome:
    """Learns from units, each a vector that (sequence seed, number) decides: steps towards their mean."""
    work = assignment.unit_range
    seed = work.sequence_seed & ((1 << 64) - 1)
    played = [
        np.random.default_rng([seed, work.first_unit + n]).normal(size=base.size) for n in range(work.units)
    ]
    step = assignment.config.learning_rate * (np.mean(played, axis=0) - base)
    step += noise.normal(scale=0.001, size=base.size)
    return Outcome(step.astype(np.float32), work.units, [metric("loss", float(np.sum(step**2)), work.units)])


Behaviour = Callable[["ScriptedParticipant", pb.Assignment, Weights | None], Awaitable[Outcome | None]]


async def work(_: "ScriptedParticipant", assignment: pb.Assignment, base: Weights | None) -> Outcome:
    """The behaviour of a participant that just does its work."""
    return compute(assignment, base)


class ScriptedParticipant:
    """One device.

    Args:
        address: of the coordinator (and of storage, unless it says otherwise).
        name: its participant id.
        behaviour: what it does with an assignment; None as an outcome: it keeps silent.
        accept: what it answers to invitations; None: nothing.
        credential: what it proves itself with.
    """

    def __init__(
        self,
        address: str,
        name: str,
        behaviour: Behaviour = work,
        *,
        accept: bool | None = True,
        credential: bytes | None = None,
    ) -> None:
        self.address = address
        self.name = name
        self.behaviour = behaviour
        self.accept = accept
        self.credential = credential or hashlib.sha256(name.encode()).digest()
        self.token = ""
        self.storage_address = ""
        self.commands: list[pb.JoinResponse] = []
        self.errors: list[CoveyError] = []
        self.in_hand: list[pb.Assignment] = []
        self.welcomed = asyncio.Event()
        self.ended: CoveyError | None = None
        self._channel = connect(address, lambda: self.token)
        self.stub: Any = pb_grpc.WorkServiceStub(self._channel)
        self._reader: asyncio.Task[None] | None = None
        self._jobs: set[asyncio.Task[None]] = set()

    # ---- Connection

    def request(self, version: str = CONTRACT_VERSION) -> pb.JoinRequest:
        """What it joins with."""
        device = job_pb2.DeviceInfo(platform="test", runtime="numpy", program_version="0")
        held = [pb.HeldAssignment(assignment_id=a.assignment_id, attempt=a.attempt) for a in self.in_hand]
        return pb.JoinRequest(
            participant_id=self.name,
            credential=self.credential,
            device=device,
            contract_version=version,
            held=held,
        )

    async def join(self) -> None:
        """Opens the command stream and returns once it was welcomed; tries again while nobody answers.

        Raises:
            CoveyError: it was refused.
        """

        async def tried() -> bool:
            await self.disconnect()
            self.ended = None
            self.welcomed.clear()
            self._reader = asyncio.create_task(self._read())
            await eventually(lambda: self.welcomed.is_set() or self.ended, message=f"{self.name} is welcomed")
            return not isinstance(self.ended, Unavailable)

        await eventually(tried, message=f"somebody answers {self.name}", interval=0.05)
        if self.ended is not None:
            raise self.ended

    async def _read(self) -> None:
        call = self.stub.Join(self.request())
        try:
            while (command := await call.read()) is not grpc.aio.EOF:
                self.commands.append(command)
                await self._obey(command)
            self.ended = Aborted(*_no_status())
        except grpc.aio.AioRpcError as error:
            self.ended = from_rpc_error(error)
        finally:
            call.cancel()

    async def stay(self) -> None:
        """Joins, and joins again whenever the stream ends, until it is cancelled."""
        while True:
            with contextlib.suppress(AssertionError):  # nobody answers for long: go on trying
                await self.join()
            if self._reader is not None:
                await asyncio.wait([self._reader])

    async def disconnect(self) -> None:
        """Breaks the command stream, as a lost connection does; what is in work goes on."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            self._reader = None

    async def die(self) -> None:
        """Ends everything at once, as SIGKILL does."""
        for task in self._jobs:
            task.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        await self.disconnect()
        await self._channel.close()

    # ---- Commands

    async def _obey(self, command: pb.JoinResponse) -> None:
        match command.WhichOneof("command"):
            case "welcome":
                self.token = command.welcome.session_token
                self.storage_address = command.welcome.storage_address
                self.welcomed.set()
            case "invitation" if self.accept is not None:
                if command.invitation.state == job_pb2.INVITATION_STATE_PENDING:
                    self._spawn(self._respond(command.invitation.invitation_id))
            case "assignment":
                self._spawn(self._do(command.assignment))

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._jobs.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._jobs.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, CoveyError):
                raise error
            self.errors.append(error)

    def of_kind(self, kind: str) -> list[Any]:
        """Returns the commands of one kind."""
        return [getattr(c, kind) for c in self.commands if c.WhichOneof("command") == kind]

    @property
    def assignments(self) -> list[pb.Assignment]:
        """Returns the assignments that it was given."""
        return self.of_kind("assignment")

    async def _respond(self, invitation_id: str) -> None:
        with rpc_errors():
            request = pb.RespondToInvitationRequest(invitation_id=invitation_id, accept=bool(self.accept))
            await self.stub.RespondToInvitation(request)

    async def _do(self, assignment: pb.Assignment) -> None:
        self.in_hand.append(assignment)
        try:
            base = None
            if assignment.HasField("weights"):
                base = await self._persist(lambda: self.base(assignment))
            outcome = await self.behaviour(self, assignment, base)
            if outcome is not None:
                await self._persist(lambda: self.send(assignment, outcome))
        finally:
            self.in_hand.remove(assignment)

    async def _persist(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeats a call while nobody answers it, as a real participant does."""
        while True:
            try:
                return await call()
            except Unavailable:
                await asyncio.sleep(0.05)

    async def base(self, assignment: pb.Assignment) -> Weights:
        """Reads the base weights with the assignment's grant and verifies them."""
        async with connect(self.storage_address or self.address, assignment.grant) as channel:
            stub: Any = storage_service_pb2_grpc.StorageServiceStub(channel)
            where = assignment.weights
            request = storage_service_pb2.ReadBlobRequest(
                sha256=where.blob.sha256, offset=where.offset, limit=where.size_bytes
            )
            with rpc_errors():
                data = b"".join([m.data async for m in stub.ReadBlob(request) if m.HasField("data")])
        assert hashlib.sha256(data).hexdigest() == where.sha256
        return np.frombuffer(data, dtype="<f4")

    async def send(self, assignment: pb.Assignment, outcome: Outcome) -> None:
        """Sends what came of an assignment."""
        if outcome.failure:
            await self.fail(assignment, outcome.failure, package_fault=outcome.package_fault)
        elif outcome.delta is not None:
            await self.push(assignment, outcome.delta, outcome.units, outcome.metrics)
        else:
            await self.evaluate(assignment, outcome.units, outcome.metrics)

    # ---- Calls

    async def push(
        self,
        assignment: pb.Assignment,
        delta: Weights,
        units: int | None,
        metrics: Sequence[common_pb2.MetricValue] = (),
        **changes: Any,
    ) -> pb.PushDeltaResponse:
        """Sends a delta; `changes` replace fields of its header."""
        data = delta.astype("<f4").tobytes()
        fields: dict[str, Any] = {
            "assignment_id": assignment.assignment_id,
            "attempt": assignment.attempt,
            "units": units,
            "size_bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "metrics": metrics,
            "backend": common_pb2.CPU_WASM,
        }
        header = pb.PushDeltaHeader(**{**fields, **changes})
        with rpc_errors():
            upload: Upload[pb.PushDeltaRequest, pb.PushDeltaResponse] = Upload(self.stub.PushDelta())
            if await upload.write(pb.PushDeltaRequest(header=header)):
                for start in range(0, len(data), 1 << 20):
                    if not await upload.write(pb.PushDeltaRequest(data=data[start : start + (1 << 20)])):
                        break
            return await upload.finish()

    async def evaluate(
        self, assignment: pb.Assignment, units: int | None, metrics: Sequence[common_pb2.MetricValue]
    ) -> pb.PushEvaluationResponse:
        """Sends the result of an evaluation."""
        request = pb.PushEvaluationRequest(
            assignment_id=assignment.assignment_id,
            attempt=assignment.attempt,
            units=units,
            metrics=metrics,
            backend=common_pb2.CPU_WASM,
        )
        with rpc_errors():
            response: pb.PushEvaluationResponse = await self.stub.PushEvaluation(request)
        return response

    async def fail(self, assignment: pb.Assignment, message: str, *, package_fault: bool) -> None:
        """Reports a failure."""
        reason = errors_pb2.ERROR_REASON_MODULE_TRAP if package_fault else errors_pb2.ERROR_REASON_DEVICE
        request = pb.ReportFailureRequest(
            assignment_id=assignment.assignment_id,
            attempt=assignment.attempt,
            failure=common_pb2.Failure(reason=reason, message=message),
            package_fault=package_fault,
        )
        with rpc_errors():
            await self.stub.ReportFailure(request)

    async def progress(self, assignment: pb.Assignment, **fields: Any) -> pb.ReportProgressResponse:
        """Reports how far an assignment is."""
        request = pb.ReportProgressRequest(
            assignment_id=assignment.assignment_id, attempt=assignment.attempt, **fields
        )
        with rpc_errors():
            response: pb.ReportProgressResponse = await self.stub.ReportProgress(request)
        return response


def _no_status() -> tuple[Any, str]:
    from covey_kit.errors import Reason

    return Reason.INTERNAL, "the stream ended without an error"


@asynccontextmanager
async def participants(
    address: str, count: int, behaviour: Behaviour = work, **options: Any
) -> AsyncIterator[list[ScriptedParticipant]]:
    """So many participants (p1, p2, …) that joined."""
    found = [ScriptedParticipant(address, f"p{n}", behaviour, **options) for n in range(1, count + 1)]
    try:
        for one in found:
            await one.join()
        yield found
    finally:
        for one in found:
            with contextlib.suppress(CoveyError):
                await one.die()
