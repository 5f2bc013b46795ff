"""Client streams whose server may answer before it has read everything."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

__all__ = ["Upload"]

Request = TypeVar("Request")
Response = TypeVar("Response")


class Upload(Generic[Request, Response]):
    """One client-stream call, whose true answer is told however early it came.

    When a server ends a call while its client still writes, grpc.aio may put INTERNAL ("Internal error from
    Core", of the write that failed) in the place of the status that the server sent
    (https://github.com/grpc/grpc/issues/36066). This keeps the server's.

    Args:
        call: what `stub.Method()` returned, nothing written yet.
    """

    def __init__(self, call: "grpc.aio.StreamUnaryCall[Request, Response]") -> None:
        self._call: Any = call
        self._status: grpc.aio.AioRpcError | None = None
        self._call.add_done_callback(self._keep_status)

    def _keep_status(self, call: Any) -> None:
        if self._status is None:
            self._status = grpc.aio.AioRpcError(
                _at_once(call.code()),
                _at_once(call.initial_metadata()),
                _at_once(call.trailing_metadata()),
                _at_once(call.details()),
            )

    async def write(self, message: Request) -> bool:
        """Sends a message. False: the server has answered, and `finish` says what."""
        try:
            await self._call.write(message)
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            return False
        return True

    async def finish(self) -> Response:
        """Says that nothing follows, and returns the answer. Raises grpc.aio.AioRpcError."""
        with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):  # answered already
            await self._call.done_writing()
        try:
            response: Response = await self._call
        except grpc.aio.AioRpcError as error:
            kept = self._status
            if (
                error.code() is grpc.StatusCode.INTERNAL
                and kept is not None
                and kept.code() is not error.code()
            ):
                raise kept from error
            raise
        return response

    def cancel(self) -> None:
        """Ends the call, if it hasn't ended."""
        self._call.cancel()


def _at_once(known: Coroutine[Any, Any, Any]) -> Any:
    """Returns what a coroutine returns that has nothing to wait for, as those about a call that is done."""
    try:
        known.send(None)
    except StopIteration as done:
        return done.value
    finally:
        known.close()
    raise AssertionError("the call isn't done")
