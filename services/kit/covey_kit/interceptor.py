"""The contract, enforced at the server's edge on every method before a handler runs.

For each call: the method's policy (default deny), the token's bearer and its role, the deadline, the
bounds on every message that isn't bulk, and the mapping of what a handler raises to `google.rpc.Status`.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio
import structlog

from covey_kit.caller import ANONYMOUS, Caller, Role, current_caller, set_caller
from covey_kit.deadline import set_deadline
from covey_kit.errors import (
    CoveyError,
    DeadlineExceeded,
    Internal,
    PermissionDenied,
    Reason,
    Unauthenticated,
)
from covey_kit.ids import new_id
from covey_kit.policy import MethodPolicy, policies
from covey_kit.status import to_status
from covey_kit.tokens import Verifier
from covey_kit.validation import check, is_bulk

__all__ = ["ContractInterceptor"]

log = structlog.get_logger()

_FOREIGN = ("/grpc.health.v1.", "/grpc.reflection.")
Behaviour = Callable[[Any, Any], Any]
if TYPE_CHECKING:
    RpcHandler = grpc.RpcMethodHandler[Any, Any]
else:  # generic in the stubs only
    RpcHandler = grpc.RpcMethodHandler


class ContractInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler of `covey.v1`; health and reflection pass, everything else is refused.

    Args:
        verifier: says whose tokens count.
    """

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self._policies = policies()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[RpcHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> RpcHandler | None:
        """Returns the wrapped handler; None for methods that aren't served here."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(_FOREIGN):
            return handler
        policy = self._policies.get(method)
        metadata = dict(handler_call_details.invocation_metadata or ())
        return _wrap(handler, _Call(method, policy, metadata, self._verifier))


class _Call:
    """One call: everything that isn't the handler's business."""

    def __init__(
        self,
        method: str,
        policy: MethodPolicy | None,
        metadata: Mapping[str, str | bytes],
        verifier: Verifier,
    ) -> None:
        self.method = method
        self.policy = policy
        self._metadata = metadata
        self._verifier = verifier

    @property
    def idle_timeout(self) -> float | None:
        return self.policy.idle_timeout if self.policy else None

    def _caller(self) -> Caller:
        assert self.policy is not None
        header = self._metadata.get("authorization", "")
        text = header.decode("ascii", "replace") if isinstance(header, bytes) else header
        scheme, _, token = text.partition(" ")
        anyone = Role.ANYONE in self.policy.roles
        if not token or scheme.lower() != "bearer":
            if anyone:
                return ANONYMOUS
            raise Unauthenticated(
                Reason.TOKEN_MISSING,
                f"{self.method} needs a token: send `authorization: Bearer <token>`",
            )
        try:
            return self._verifier.verify(token.strip())
        except Unauthenticated:
            if anyone:
                return ANONYMOUS
            raise

    def admit(self) -> None:
        """Checks policy and role, and sets the caller."""
        if self.policy is None or not self.policy.roles:
            raise PermissionDenied(
                Reason.ROLE_FORBIDDEN, f"{self.method} has no policy in the contract and is refused"
            )
        caller = self._caller()
        if Role.ANYONE not in self.policy.roles and caller.role not in self.policy.roles:
            if Role.GRANT in self.policy.roles and caller.role is Role.PARTICIPANT:
                raise PermissionDenied(
                    Reason.NO_GRANT,
                    f"{self.method} needs the grant of a job: accept its invitation, use the grant",
                )
            allowed = ", ".join(sorted(role.value for role in self.policy.roles))
            raise PermissionDenied(
                Reason.ROLE_FORBIDDEN,
                f"{self.method} may be called by: {allowed}; the token's role is {caller.role.value}",
            )
        set_caller(caller)

    def audit(self, result: str) -> None:
        """Logs an owner's command: who, what and with which result; the line itself says when."""
        if (
            self.policy is not None
            and self.policy.command
            and (caller := current_caller()).role is Role.OWNER
        ):
            log.info("command", method=self.method, who=caller.subject, result=result)

    def seconds(self, context: Any) -> float | None:
        """How long this call may be worked on."""
        bound = self.policy.deadline if self.policy else None
        left = context.time_remaining()
        known = [value for value in (bound, left) if value is not None]
        return min(known) if known else None


def _wrap(handler: Any, call: _Call) -> RpcHandler:
    coders = (handler.request_deserializer, handler.response_serializer)
    if not handler.request_streaming and not handler.response_streaming:
        return grpc.unary_unary_rpc_method_handler(_unary(handler.unary_unary, call), *coders)
    if not handler.request_streaming:
        return grpc.unary_stream_rpc_method_handler(_server_stream(handler.unary_stream, call), *coders)
    if not handler.response_streaming:
        return grpc.stream_unary_rpc_method_handler(_client_stream(handler.stream_unary, call), *coders)
    raise TypeError(f"{call.method}: the contract has no bidirectional streams")


def _unary(behaviour: Behaviour, call: _Call) -> Behaviour:
    async def run(request: Any, context: Any) -> Any:
        async def work() -> Any:
            call.admit()
            check(request)
            seconds = call.seconds(context)
            if seconds is None:
                return await behaviour(request, context)
            set_deadline(seconds)
            async with asyncio.timeout(seconds):
                return await behaviour(request, context)

        return await _mapped(work, call, context)

    return run


def _client_stream(behaviour: Behaviour, call: _Call) -> Behaviour:
    async def run(_iterator: Any, context: Any) -> Any:
        async def work() -> Any:
            call.admit()
            checked = _CheckedContext(context, call.idle_timeout)
            return await behaviour(checked.requests(), checked)

        return await _mapped(work, call, context)

    return run


def _server_stream(behaviour: Behaviour, call: _Call) -> Behaviour:
    async def run(request: Any, context: Any) -> None:
        async def work() -> None:
            call.admit()
            check(request)
            checked = _CheckedContext(context, call.idle_timeout)
            if not inspect.isasyncgenfunction(inspect.unwrap(behaviour)):
                await behaviour(request, checked)
                return
            async for message in behaviour(request, checked):
                await checked.write(message)

        await _mapped(work, call, context)

    return run


class _CheckedContext:
    """The call's context, whose reads are validated and whose reads and writes are bounded in time."""

    def __init__(self, context: Any, idle_timeout: float | None) -> None:
        self._context = context
        self._idle = idle_timeout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        """Reads the next message, validated unless it is bulk; `grpc.aio.EOF` at the end."""
        async with asyncio.timeout(self._idle):
            message = await self._context.read()
        if message is not grpc.aio.EOF and not is_bulk(message):
            check(message)
        return message

    async def write(self, message: Any) -> None:
        """Writes a message."""
        async with asyncio.timeout(self._idle):
            await self._context.write(message)

    async def requests(self) -> AsyncIterator[Any]:
        """Iterates over the requests through `read`."""
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message


async def _mapped(work: Callable[[], Awaitable[Any]], call: _Call, context: Any) -> Any:
    """Runs `work`; ends the call with the status of what it raises."""
    request_id = new_id("req")
    with structlog.contextvars.bound_contextvars(request=request_id):
        try:
            answer = await work()
        except CoveyError as error:
            call.audit(error.reason.value)
            log.info("call refused", method=call.method, reason=error.reason.value, message=error.message)
            await _abort(context, error)
        except TimeoutError:
            log.warning("call outlasted its bound", method=call.method)
            await _abort(context, _late(call))
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception:
            log.exception("call failed", method=call.method)
            await _abort(
                context,
                Internal(
                    Reason.INTERNAL,
                    f"{call.method} failed inside the server; its log has the details under {request_id}",
                    metadata={"request_id": request_id},
                ),
            )
        else:
            call.audit("OK")
            return answer


def _late(call: _Call) -> DeadlineExceeded:
    if call.idle_timeout is not None:
        return DeadlineExceeded(Reason.DEADLINE, f"{call.method}: nothing moved for {call.idle_timeout:g} s")
    return DeadlineExceeded(Reason.DEADLINE, f"{call.method} outlasted its deadline")


async def _abort(context: Any, error: CoveyError) -> NoReturn:
    status = to_status(error)
    await context.abort(
        grpc.StatusCode[error.code],
        error.message,
        (("grpc-status-details-bin", status.SerializeToString()),),
    )
    raise AssertionError("abort returned")
