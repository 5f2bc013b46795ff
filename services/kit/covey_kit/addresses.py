"""Addresses as people write them: `HOST:PORT`."""

import ipaddress

__all__ = ["is_loopback", "split"]


def split(address: str) -> tuple[str, int]:
    """Returns host and port of `HOST:PORT` (IPv6 in brackets).

    Raises:
        ValueError: what was expected, what was found.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"address: expected HOST:PORT such as 127.0.0.1:7654, found {address!r}")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Says whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
