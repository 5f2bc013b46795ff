"""Page tokens: where a list goes on, sealed so that only ours are taken back.

A token is base64url of 16 bytes of HMAC-SHA-256 and the place, made for one list with one set of arguments.
"""

import base64
import binascii
import hashlib
import hmac

from covey_kit.errors import InvalidArgument, Reason

__all__ = ["PageTokens"]

_SEAL = 16


class PageTokens:
    """Makes and opens page tokens.

    Args:
        secret: what they are sealed with; another secret's tokens are refused.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def _seal(self, scope: str, place: str) -> bytes:
        return hmac.new(self._secret, f"{scope}\0{place}".encode(), hashlib.sha256).digest()[:_SEAL]

    def make(self, scope: str, place: str) -> str:
        """Returns the token for going on behind `place` in the list `scope` (its name and arguments)."""
        return base64.urlsafe_b64encode(self._seal(scope, place) + place.encode()).decode()

    def open(self, scope: str, token: str) -> str | None:
        """Returns the place in a token; None for the empty token: the first page.

        Raises:
            InvalidArgument: PAGE_TOKEN: not one of ours, or made for other arguments.
        """
        if not token:
            return None
        try:
            raw = base64.urlsafe_b64decode(token.encode())
            place = raw[_SEAL:].decode()
        except (binascii.Error, UnicodeError):
            raw, place = b"", ""
        if not hmac.compare_digest(raw[:_SEAL], self._seal(scope, place)):
            raise InvalidArgument(
                Reason.PAGE_TOKEN,
                "the page token wasn't made by this server for this list; begin with the first page",
            )
        return place
