"""Why work failed on the GPU."""

from covey_participant.domain.failure import BackendFailure


class GpuFailure(BackendFailure):
    """Work that failed because it ran on the GPU: redo it on the CPU, with fallback reason `DEVICE_ERROR`.

    `reason` says more: `SHADER_INVALID` (the package's archive is wrong, on every device), `DEVICE` (the
    driver, its memory), `STEP_TIMEOUT` (it didn't come back), `WORKER_DIED` (the driver took the process
    with it), `RESULT_NOT_FINITE`, or what the module said while it fed the GPU. A plain `WorkFailure` from
    the same call isn't about the GPU: it would fail on the CPU too.
    """
