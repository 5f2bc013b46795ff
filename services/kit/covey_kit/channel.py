"""Channels to Covey servers, with what the contract says of deadlines and retries built in."""

import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from covey_kit.addresses import split
from covey_kit.deadline import remaining
from covey_kit.limits import MESSAGE_BYTES
from covey_kit.policy import service_config

__all__ = ["Token", "connect"]

Token = str | Callable[[], str] | None
"""A bearer token, or what gives the current one for each call, or none."""


def connect(address: str, token: Token = None, *, root_cert: Path | None = None) -> grpc.aio.Channel:
    """Returns a channel to `HOST:PORT`. It connects at the first call.

    Each call carries the token, gets its default deadline from the method's policy (or what is left of
    the deadline of the call being handled, whichever is less), and is retried where the policy says so.

    Args:
        address: `HOST:PORT`.
        token: bearer token.
        root_cert: PEM of the root certificates; with it the channel is TLS, without it plain text.

    Raises:
        ValueError: the address isn't one.
    """
    split(address)
    options = [
        ("grpc.service_config", json.dumps(service_config())),
        ("grpc.enable_retries", 1),
        ("grpc.max_receive_message_length", MESSAGE_BYTES),
        ("grpc.max_send_message_length", MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        # One connection a channel, so that closing it ends what it carries.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if root_cert is None:
        plain = grpc.aio.insecure_channel(address, options=options)
    else:
        credentials = grpc.ssl_channel_credentials(root_cert.read_bytes())
        plain = grpc.aio.secure_channel(address, credentials, options=options)
    return _TokenChannel(plain, token)


class _TokenChannel(grpc.aio.Channel):
    """A channel whose calls carry a token. Interceptors would do it too, but slow streams down."""

    def __init__(self, inner: grpc.aio.Channel, token: Token) -> None:
        self._inner = inner
        self._token = token

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._inner.__aexit__(kind, error, trace)

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def get_state(
        self,
        try_to_connect: bool = False,  # noqa: FBT001, FBT002 - grpc's signature
    ) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()

    def _with_token(self, callable_: Any) -> Any:
        def call(
            *args: Any,
            timeout: float | None = None,
            metadata: Any = None,
            **kwargs: Any,
        ) -> Any:
            pairs = list(metadata or ())
            token = self._token() if callable(self._token) else self._token
            if token and not any(key == "authorization" for key, _ in pairs):
                pairs.append(("authorization", f"Bearer {token}"))
            left = remaining()
            if left is not None:
                timeout = left if timeout is None else min(timeout, left)
            return callable_(*args, timeout=timeout, metadata=pairs, **kwargs)

        return call

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_token(self._inner.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_token(self._inner.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_token(self._inner.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_token(self._inner.stream_stream(*args, **kwargs))
