"""How much memory a coordinator process needs for a large model: a real mesh, devices that push."""

import asyncio
import hashlib
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from covey.v1 import common_pb2, job_pb2
from covey.v1 import coordinator_service_pb2 as pb
from covey.v1 import coordinator_service_pb2_grpc as pb_grpc
from covey.v1 import work_service_pb2 as work_pb
from covey_kit.blobs import write_bytes
from covey_kit.channel import connect
from covey_kit.status import rpc_errors
from covey_kit.uploads import Upload
from support.coordinator import ENDED, HELD_OUT, MODULE, chunk_bytes, job_request, package
from support.eventually import eventually
from support.mesh import Mesh
from support.scripted_participant import Outcome, ScriptedParticipant, Weights

ASSIGNMENTS = 8
"""Assignments of a round, whoever does them."""

EXAMPLES = 5
"""Examples of a chunk."""

_MESSAGE = 1 << 20


@dataclass(frozen=True)
class Memory:
    """What the kernel says of the coordinator's process.

    Attributes:
        participants: devices that took part.
        weights_bytes: size of the model's weights.
        idle_bytes: resident before the first job.
        peak_bytes: the most that was ever resident, from then to the job's end.
    """

    participants: int
    weights_bytes: int
    idle_bytes: int
    peak_bytes: int

    @property
    def ratio(self) -> float:
        """Peak above idle in multiples of the weights."""
        return (self.peak_bytes - self.idle_bytes) / self.weights_bytes


class Pusher(ScriptedParticipant):
    """Sends the same bytes for every assignment: they're made once, so that many devices stay small."""

    data = b""
    sha256 = ""

    async def base(self, assignment: work_pb.Assignment) -> Weights:
        """Reads nothing."""
        return np.empty(0, dtype=np.float32)

    async def send(self, assignment: work_pb.Assignment, outcome: Outcome) -> None:
        """Sends the bytes."""
        training = assignment.kind == job_pb2.ASSIGNMENT_KIND_TRAIN
        header = work_pb.PushDeltaHeader(
            assignment_id=assignment.assignment_id,
            attempt=assignment.attempt,
            units=EXAMPLES if training else 0,
            size_bytes=len(self.data),
            sha256=self.sha256,
            metrics=[common_pb2.MetricValue(name="loss", sum=1.0, count=EXAMPLES)] if training else [],
            backend=common_pb2.CPU_WASM,
        )
        with rpc_errors():
            upload: Upload[Any, Any] = Upload(self.stub.PushDelta())
            await upload.write(work_pb.PushDeltaRequest(header=header))
            for start in range(0, len(self.data), _MESSAGE):
                part = self.data[start : start + _MESSAGE]
                if not await upload.write(work_pb.PushDeltaRequest(data=part)):
                    break
            await upload.finish()


async def _nothing(_: ScriptedParticipant, assignment: work_pb.Assignment, base: Weights | None) -> Outcome:
    return Outcome()


def _status(process: int, field: str) -> int:
    for line in Path(f"/proc/{process}/status").read_text("ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {process} has no {field}")


def _restart_peak(process: int) -> int:
    """Starts the kernel's peak anew from what is resident now, and returns that."""
    Path(f"/proc/{process}/clear_refs").write_text("5", "ascii")
    return _status(process, "VmRSS")


def _request(count: int, rounds: int) -> pb.CreateJobRequest:
    aggregation = job_pb2.AggregationSettings(strategy=job_pb2.AGGREGATION_STRATEGY_FED_ADAM)
    request = job_request(
        [EXAMPLES] * ASSIGNMENTS,
        assignments_per_round=ASSIGNMENTS,
        epochs=rounds,
        aggregation=aggregation,
    )
    request.package.CopyFrom(package(parameters=[{"name": "w", "shape": [count]}]))
    return request


async def _train(mesh: Mesh, participants: int, request: pb.CreateJobRequest, seconds: float) -> job_pb2.Job:
    token = mesh.token_file.read_text("ascii").strip()
    storage = mesh.servers["storage"].arguments[-1]
    async with connect(storage, token) as channel:
        for data in (MODULE, HELD_OUT, *(chunk_bytes(number) for number in range(ASSIGNMENTS))):
            await write_bytes(channel, data)
    async with AsyncExitStack() as stack:
        stub: Any = pb_grpc.CoordinatorServiceStub(
            await stack.enter_async_context(connect(mesh.address, token))
        )
        for number in range(participants):
            pusher = Pusher(mesh.address, f"p{number}", _nothing)
            await pusher.join()
            stack.push_async_callback(pusher.die)
        with rpc_errors():
            job_id = (await stub.CreateJob(request)).job.job_id
            await stub.InviteParticipants(pb.InviteParticipantsRequest(job_id=job_id, all_connected=True))

        async def job() -> job_pb2.Job:
            with rpc_errors():
                found: job_pb2.Job = (await stub.GetJob(pb.GetJobRequest(job_id=job_id))).job
            return found

        async def accepted() -> bool:
            states = [one.invitation for one in (await job()).participants]
            return states.count(job_pb2.INVITATION_STATE_ACCEPTED) == participants

        async def ended() -> job_pb2.Job | None:
            found = await job()
            return found if found.state in ENDED else None

        await eventually(accepted, message="all accepted")
        with rpc_errors():
            await stub.StartJob(pb.StartJobRequest(job_id=job_id))
        done = await eventually(ended, seconds, "the job ends", 0.2)
        assert done is not None
        return done


async def measure(
    folder: Path, participants: int, *, count: int, rounds: int = 1, seconds: float = 240.0
) -> Memory:
    """Trains a FedAdam job in real processes and returns the coordinator's memory.

    Args:
        folder: for state and logs; needs room for about 20 times the weights.
        participants: devices, which together do 8 assignments a round.
        count: weights of the model.
        rounds: rounds after round 0.
        seconds: how long the job may take.
    """
    values = (np.random.default_rng(0).standard_normal(count, dtype=np.float32) * np.float32(1e-3)).astype(
        "<f4"
    )
    Pusher.data = await asyncio.to_thread(values.tobytes)
    Pusher.sha256 = (await asyncio.to_thread(hashlib.sha256, Pusher.data)).hexdigest()
    async with Mesh(folder, "three processes") as mesh:
        process = mesh.coordinator.pid
        idle = _restart_peak(process)
        job = await _train(mesh, participants, _request(count, rounds), seconds)
        peak = _status(process, "VmHWM")
    assert job.state == job_pb2.JOB_STATE_COMPLETED, job.failure
    assert job.progress.rounds_done == rounds
    return Memory(participants, 4 * count, idle, peak)
