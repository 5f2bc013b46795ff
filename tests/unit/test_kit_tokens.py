"""Tokens: who is believed."""

import base64
import json
import stat
from pathlib import Path

import jwt
import pytest

from covey_kit.caller import Caller, Role
from covey_kit.errors import Reason, Unauthenticated
from covey_kit.tokens import SigningKey, Verifier


def test_a_token_says_who_its_bearer_is() -> None:
    """Role, subject and a grant's job come back as issued."""
    key = SigningKey.generate()
    verifier = Verifier([key.public_pem])

    assert verifier.verify(key.issue("p1", Role.GRANT, 60, job_id="j")) == Caller(Role.GRANT, "p1", "j")
    assert verifier.verify(key.issue("me", Role.OWNER, 60)) == Caller(Role.OWNER, "me", None)


def test_an_expired_token_is_refused_as_expired() -> None:
    """The bearer learns that a new token would help."""
    key = SigningKey.generate()

    with pytest.raises(Unauthenticated) as caught:
        Verifier([key.public_pem]).verify(key.issue("me", Role.OWNER, -60))

    assert caught.value.reason is Reason.TOKEN_EXPIRED


@pytest.mark.parametrize(
    "forge", ["other_key", "none_algorithm", "hmac_with_public_key", "changed_role", "junk"]
)
def test_forged_tokens_are_refused(forge: str) -> None:
    """A token that no trusted key signed is refused, whatever trick made it."""
    key = SigningKey.generate()
    claims = {"aud": "covey", "sub": "me", "role": "owner", "exp": 2**40}
    if forge == "other_key":
        token = SigningKey.generate().issue("me", Role.OWNER, 60)
    elif forge == "none_algorithm":
        token = jwt.encode(claims, "", algorithm="none")
    elif forge == "hmac_with_public_key":
        token = _hmac(claims, key.public_pem)
    elif forge == "changed_role":
        head, _, signature = key.issue("me", Role.VIEWER, 60).split(".")
        body = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
        token = f"{head}.{body}.{signature}"
    else:
        token = "x.y.z"

    with pytest.raises(Unauthenticated) as caught:
        Verifier([key.public_pem]).verify(token)

    assert caught.value.reason is Reason.TOKEN_INVALID


def _hmac(claims: dict[str, object], secret: bytes) -> str:
    import hashlib
    import hmac

    def part(value: bytes) -> str:
        return base64.urlsafe_b64encode(value).decode().rstrip("=")

    text = f"{part(json.dumps({'alg': 'HS256', 'typ': 'JWT'}).encode())}.{part(json.dumps(claims).encode())}"
    return f"{text}.{part(hmac.new(secret, text.encode(), hashlib.sha256).digest())}"


def test_a_grant_without_a_job_is_no_grant() -> None:
    """A grant always names its job."""
    key = SigningKey.generate()

    with pytest.raises(Unauthenticated):
        Verifier([key.public_pem]).verify(key.issue("p", Role.GRANT, 60))


def test_the_key_file_is_private_and_lasts(tmp_path: Path) -> None:
    """A second start reads the same key; nobody else may read the file; the public half lies beside it."""
    path = tmp_path / "signing-key.pem"
    first = SigningKey.load_or_create(path)

    assert SigningKey.load_or_create(path).public_pem == first.public_pem
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.with_suffix(".pub").read_bytes() == first.public_pem
