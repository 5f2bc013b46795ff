"""A real participant in this process, and jobs of the packages in WebAssembly text."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from covey.v1 import common_pb2, dataset_pb2, job_pb2, package_pb2
from covey.v1 import coordinator_service_pb2 as pb
from covey_kit.blobs import write_bytes
from covey_kit.caller import Role
from covey_participant.app import ParticipantApp, ParticipantSettings
from covey_participant.domain.values import Adapter
from support.coordinator import Mesh
from support.wat_packages import WatPackage


async def no_adapters() -> list[Adapter]:
    """A machine without a GPU: looking for one takes most of a second, and few tests need one."""
    return []


@contextlib.asynccontextmanager
async def device(address: str, folder: Path, **settings: Any) -> AsyncIterator[ParticipantApp]:
    """A participant that accepts everything, stopped at the end; what ended it early is raised."""
    given = {"accept_all": True, "find_adapters": no_adapters, **settings}
    app = await ParticipantApp.open(ParticipantSettings(address, folder, **given))
    running = asyncio.create_task(app.run())
    try:
        yield app
    finally:
        app.stop()
        await running


async def create_job(mesh: Mesh, package: WatPackage, **settings: Any) -> str:
    """Uploads a package with its dataset and creates a job of it; returns the job's id."""
    manifest = json_format.ParseDict(package.manifest, package_pb2.ModelPackage())
    names = [manifest.module.file_name]
    if manifest.HasField("validation"):
        names.append(manifest.validation.file_name)
    if manifest.HasField("shader_archive"):
        names.append(manifest.shader_archive.file_name)
    files = {name: (package.folder / name).read_bytes() for name in names}
    for chunk in package.chunks:
        files[chunk["fileName"]] = (package.data / chunk["fileName"]).read_bytes()
    uploaded = []
    async with mesh.channel(Role.OWNER) as channel:
        for name, content in files.items():
            blob: common_pb2.BlobRef = await write_bytes(channel, content)
            uploaded.append(common_pb2.UploadedFile(file_name=name, blob=blob))
    chunks = [json_format.ParseDict(chunk, dataset_pb2.Chunk()) for chunk in package.chunks]
    request = pb.CreateJobRequest(
        package=manifest,
        dataset=dataset_pb2.DatasetManifest(chunks=chunks),
        settings=job_pb2.JobSettings(**{"assignments_per_round": 2, **settings}),
        files=uploaded,
    )
    return str((await mesh.call("CreateJob", request)).job.job_id)
