"""Ids that people can read aloud."""

import secrets

__all__ = ["new_id"]

# Without vowels (no words by accident) and without 0/o, 1/l.
_ALPHABET = "23456789bcdfghjkmnpqrstvwxz"


def new_id(prefix: str, length: int = 8) -> str:
    """Returns `prefix-xxxxxxxx`, random and lower-case; 8 characters are 38 bits.

    `prefix` is cut to fit the contract's bound of 63 characters.
    """
    suffix = "".join(secrets.choice(_ALPHABET) for _ in range(length))
    return f"{prefix[: 62 - length]}-{suffix}"
