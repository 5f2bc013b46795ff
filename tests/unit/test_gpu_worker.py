"""The GPU worker's own walls, and what it and its parent say to each other."""

import json
import subprocess
import sys

import pytest

from covey_kit.errors import Reason
from covey_participant.domain.backend import Fallback
from covey_participant.domain.failure import WorkFailure
from covey_participant.runtime.gpu.failure import GpuFailure
from covey_participant.runtime.gpu.protocol import GpuJob, GpuSpec, encode_failure, gpu_failure
from covey_participant.runtime.protocol import ConfigSpec, ModuleSpec, ProtocolError, Task, decode, encode
from support.gpu_plans import linear_facts

PROBE = """
import errno, os, resource, socket, threading
from covey_participant.runtime.gpu.worker import harden
harden()
ran = []
thread = threading.Thread(target=lambda: ran.append(1))
thread.start(); thread.join()
assert ran == [1]
for denied in (lambda: socket.socket(), lambda: os.execv("/bin/true", ["true"])):
    try:
        denied()
    except PermissionError:
        ran.append(2)
print(len(ran), resource.getrlimit(resource.RLIMIT_CORE)[0], os.getcwd())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the walls are Linux's")
def test_a_driver_may_start_threads_but_no_programs() -> None:
    """Behind the wall there are threads; neither network nor programs nor core files."""
    done = subprocess.run([sys.executable, "-I", "-c", PROBE], capture_output=True, text=True, check=False)

    assert (done.stdout.split(), done.stderr) == (["3", "0", "/"], "")


def gpu_job() -> GpuJob:
    """A job with everything set."""
    return GpuJob(
        task=Task.TRAIN,
        module=ModuleSpec("m", "0" * 64, "c", 1 << 20, 9, 1),
        config=ConfigSpec(seed=3, batch_size=16, hyperparameters=[0.5]),
        gpu=GpuSpec("a.zip", "1" * 64, linear_facts(), "card", "Vulkan", ["shader-f16"], 5 << 20),
    )


def test_a_job_arrives_as_it_was_sent() -> None:
    """Through JSON and back, the order of parameters included."""
    job = gpu_job()

    found = GpuJob.decode(decode(encode(job.encode())[4:]))

    assert found == job
    assert found.gpu is not None
    assert list(found.gpu.facts.parameters) == ["weight", "bias"]


def test_a_failure_arrives_as_it_was_sent() -> None:
    """Reason, words, blame and fallback; one that isn't the GPU's is left to the plain protocol."""
    sent = GpuFailure(Reason.LIMIT_EXCEEDED, "too large", package_fault=False, fallback=Fallback.BUDGET)

    found = gpu_failure(json.loads(json.dumps(encode_failure(sent))))

    assert found is not None
    assert (found.reason, found.message) == (sent.reason, sent.message)
    assert (found.package_fault, found.fallback) == (False, Fallback.BUDGET)
    assert gpu_failure(encode_failure(WorkFailure(Reason.MODULE_TRAP, "x"))) is None


@pytest.mark.parametrize(
    "change", [{"reason": "NO_SUCH"}, {"fallback": "NO_SUCH"}, {"message": 3}, {"reason": None}]
)
def test_a_failure_out_of_shape_is_refused(change: dict[str, object]) -> None:
    """The parent believes nothing that isn't of the protocol."""
    frame = {**encode_failure(GpuFailure(Reason.DEVICE, "x")), **change}

    with pytest.raises(ProtocolError):
        gpu_failure(frame)
