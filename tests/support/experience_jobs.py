"""Experience jobs over real servers: a small package that makes its own work, and its creation."""

from typing import Any

from covey.v1 import coordinator_service_pb2 as pb
from covey.v1 import job_pb2, package_pb2
from covey_kit.blobs import write_bytes
from covey_kit.caller import Role
from support.coordinator import MODULE, Mesh, digest, package, uploaded

OPPONENT = b"an opponent's weights"


def player(**changes: Any) -> package_pb2.ModelPackage:
    """A valid manifest of 7 weights that plays episodes against an opponent; `changes` as of `package`."""
    work = {
        "kind": "EXPERIENCE",
        "inputs": "none",
        "unit": "episode",
        "minUnits": 2,
        "maxUnits": 50,
        "evaluationUnits": 6,
    }
    named = {
        "name": "opponent",
        "fileName": "opponent.bin",
        "bytes": len(OPPONENT),
        "sha256": digest(OPPONENT),
    }
    own = {
        "name": "player",
        "workSource": work,
        "dataFormats": None,
        "validation": None,
        "validationExampleCount": None,
        "auxiliaryWeights": [named],
    }
    return package(**(own | changes))


def experience_request(units: int | None = 3, **settings: Any) -> pb.CreateJobRequest:
    """A valid creation of rounds of two assignments, of so many units each (None: the default)."""
    wanted = job_pb2.JobSettings(**{"assignments_per_round": 2, "epochs": 4, **settings})
    if units is not None:
        wanted.experience.units_per_assignment = units
    files = [uploaded("model.wasm", MODULE), uploaded("opponent.bin", OPPONENT)]
    return pb.CreateJobRequest(package=player(), settings=wanted, files=files)


async def create_experience(running: Mesh, units: int | None = 3, **settings: Any) -> str:
    """Uploads and creates the job; returns its id."""
    async with running.channel(Role.OWNER, address=running.storage_address) as channel:
        for data in (MODULE, OPPONENT):
            await write_bytes(channel, data)
    return str((await running.call("CreateJob", experience_request(units, **settings))).job.job_id)


async def completed(running: Mesh, job_id: str) -> list[str]:
    """Waits until a job is completed and returns the digests of its checkpoints."""
    job = await running.ended(job_id)
    assert job.state == job_pb2.JOB_STATE_COMPLETED, job.failure
    return [r.checkpoint.sha256 for r in await running.rounds(job_id)]
