"""Talk to a mesh from Python.

    import asyncio
    from covey.client import connect
    from covey.packages import load, load_dataset

    async def main() -> None:
        async with connect() as client:                      # the coordinator of the last `covey up`
            package = load("models/digits")
            dataset = load_dataset("models/digits/data/dataset.json", package)
            job = await client.jobs.create(package, dataset)
            await client.participants.invite(job.job_id, all_connected=True)
            await client.jobs.start(job.job_id)
            async for job in client.jobs.watch(job.job_id):
                print(job.progress.rounds_done, "of", job.progress.rounds_wanted)
            await client.checkpoints.export(job.job_id, "digits.safetensors")

    asyncio.run(main())

What the methods return are the messages of the contract (`covey.v1`). What goes wrong is raised as
`covey_kit.errors.CoveyError`, with the server's reason and every violation.
"""

from covey.client._checkpoints import Checkpoints
from covey.client._client import Client, connect
from covey.client._device import Device, open_device
from covey.client._diagnostics import Diagnostics
from covey.client._jobs import Jobs
from covey.client._participants import Participants
from covey.client._storage import Storage, UploadProgress

__all__ = [
    "Checkpoints",
    "Client",
    "Device",
    "Diagnostics",
    "Jobs",
    "Participants",
    "Storage",
    "UploadProgress",
    "connect",
    "open_device",
]
