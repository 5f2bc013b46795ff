"""Signed tokens: JWT (RFC 7519) with EdDSA (RFC 8037).

Whoever holds the signing key says who is who; servers need the public key alone.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covey_kit.caller import Caller, Role
from covey_kit.errors import Reason, Unauthenticated

__all__ = ["SigningKey", "Verifier", "write_secret"]

_AUDIENCE = "covey"
_LEEWAY_SECONDS = 10


def write_secret(path: Path, content: bytes) -> None:
    """Writes a file that only its owner can read, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class SigningKey:
    """An Ed25519 key that makes tokens."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def generate(cls) -> "SigningKey":
        """Makes a new key."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load_or_create(cls, path: Path) -> "SigningKey":
        """Reads the key at `path` (PEM), or makes one there (0600); the public half lies beside it (`.pub`).

        Raises:
            ValueError: the file isn't an Ed25519 key in PEM.
        """
        if not path.exists():
            key = cls.generate()
            write_secret(path, key.private_pem())
        key = cls._load(path)
        public = path.with_suffix(".pub")
        if not public.exists() or public.read_bytes() != key.public_pem:
            write_secret(public, key.public_pem)
        return key

    @classmethod
    def _load(cls, path: Path) -> "SigningKey":
        loaded = serialization.load_pem_private_key(path.read_bytes(), password=None)
        if not isinstance(loaded, Ed25519PrivateKey):
            raise ValueError(  # noqa: TRY004 - the content is wrong, not the argument
                f"{path}: expected an Ed25519 private key, found {type(loaded).__name__}"
            )
        return cls(loaded)

    def private_pem(self) -> bytes:
        """The key itself, PEM (PKCS #8, not encrypted)."""
        return self._key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )

    @property
    def public_pem(self) -> bytes:
        """The public half, PEM."""
        return self._key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    def issue(self, subject: str, role: Role, ttl_seconds: float, job_id: str | None = None) -> str:
        """Returns a token that says `subject` has `role` for `ttl_seconds`; a grant names its job."""
        now = time.time()
        claims: dict[str, object] = {
            "aud": _AUDIENCE,
            "sub": subject,
            "role": role.value,
            "iat": int(now),
            "exp": int(now + ttl_seconds),
        }
        if job_id is not None:
            claims["job"] = job_id
        return jwt.encode(claims, self._key, algorithm="EdDSA")


class Verifier:
    """Says who a token's bearer is.

    Args:
        public_pems: public keys (PEM) of everyone whose tokens count. None: every token is refused.
    """

    def __init__(self, public_pems: Sequence[bytes]) -> None:
        self._keys = [serialization.load_pem_public_key(pem) for pem in public_pems]

    def verify(self, token: str) -> Caller:
        """Returns the bearer.

        Raises:
            Unauthenticated: TOKEN_EXPIRED, or TOKEN_INVALID when no trusted key made it.
        """
        for key in self._keys:
            try:
                claims = jwt.decode(
                    token,
                    key,  # type: ignore[arg-type]  # any public key type; others than Ed25519 fail below
                    algorithms=["EdDSA"],
                    audience=_AUDIENCE,
                    leeway=_LEEWAY_SECONDS,
                    options={"require": ["exp", "sub", "role"]},
                )
                role = Role(claims["role"])
            except jwt.ExpiredSignatureError as error:
                raise Unauthenticated(
                    Reason.TOKEN_EXPIRED, "the token has expired; ask for a new one"
                ) from error
            except (jwt.PyJWTError, ValueError):
                continue
            if role is Role.ANYONE or (role is Role.GRANT and "job" not in claims):
                continue
            return Caller(role, str(claims["sub"]), claims.get("job"))
        raise Unauthenticated(
            Reason.TOKEN_INVALID,
            "the token wasn't made by anyone this server trusts; use the token of this mesh",
        )
