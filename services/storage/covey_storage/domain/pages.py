"""Page tokens that only this storage can make."""

import base64
import binascii
import hashlib
import hmac

from covey_kit.errors import InvalidArgument, Reason

__all__ = ["PageTokens"]

_MAC_BYTES = 16


class PageTokens:
    """Tokens that say where a listing goes on, bound to the listing and its arguments.

    Args:
        secret: at least 16 random bytes, the same for as long as tokens shall be good.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def _mac(self, listing: str, after: bytes) -> bytes:
        text = listing.encode("utf-8") + b"\0" + after
        return hmac.new(self._secret, text, hashlib.sha256).digest()[:_MAC_BYTES]

    def issue(self, listing: str, after: str) -> str:
        """Returns the token with which `listing` (its name and arguments) goes on behind `after`."""
        place = after.encode("utf-8")
        return base64.urlsafe_b64encode(self._mac(listing, place) + place).decode("ascii").rstrip("=")

    def read(self, listing: str, token: str) -> str:
        """Returns where a listing goes on. Raises InvalidArgument (PAGE_TOKEN) for any other token."""
        try:
            raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
            mac, place = raw[:_MAC_BYTES], raw[_MAC_BYTES:]
            if hmac.compare_digest(mac, self._mac(listing, place)):
                return place.decode("utf-8")
        except (binascii.Error, ValueError):
            pass
        raise InvalidArgument(
            Reason.PAGE_TOKEN,
            "the page token isn't one that this listing gave with these arguments; begin with an empty one",
        )
