"""One-time tickets for the bulk channel: the scheduler issues them, the storage unit checks them, both hold one key.

A ticket is the msgpack record of its claims, followed by their HMAC-SHA256. It opens one connection to one unit for one peer
before it expires; the unit remembers its nonce until then. Pure: clock and nonce come in as arguments.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

import msgspec

KEY_BYTES = 32
NONCE_BYTES = 16
_MAC_BYTES = hashlib.sha256().digest_size
MAX_TICKET_BYTES = 1024


def weight_unit(role: str) -> str:
    """The name that tickets for a role's weight server carry."""
    return f"{role}.weights"


class TicketError(ValueError):
    """A ticket that opens nothing; the message says why (to the log, not to the peer's advantage)."""


class TicketClaims(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """What a ticket says. `expires_s` is wall-clock time, shared by scheduler and units."""

    unit: str
    peer: str
    expires_s: float
    nonce: bytes


def new_key() -> bytes:
    """A fresh ticket key."""
    return secrets.token_bytes(KEY_BYTES)


def new_nonce() -> bytes:
    """A fresh nonce."""
    return secrets.token_bytes(NONCE_BYTES)


def issue(key: bytes, unit: str, peer: str, expires_s: float, nonce: bytes) -> bytes:
    """A ticket for one connection of `peer` to `unit`, good until `expires_s`."""
    if len(key) < KEY_BYTES or len(nonce) != NONCE_BYTES:
        raise ValueError(
            f"tickets: expected a key of at least {KEY_BYTES} bytes and a nonce of {NONCE_BYTES}, "
            f"got {len(key)} and {len(nonce)}"
        )
    claims = msgspec.msgpack.encode(TicketClaims(unit=unit, peer=peer, expires_s=expires_s, nonce=nonce))
    return claims + _mac(key, claims)


def check(key: bytes, ticket: bytes, *, unit: str, peer: str, now_s: float) -> TicketClaims:
    """The claims of a valid ticket.

    Raises:
        TicketError: forged, for another unit or peer, or expired.
    """
    if not _MAC_BYTES < len(ticket) <= MAX_TICKET_BYTES:
        raise TicketError(f"a ticket of {len(ticket)} bytes")
    claims_bytes, mac = ticket[:-_MAC_BYTES], ticket[-_MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(key, claims_bytes)):
        raise TicketError("the signature does not hold")
    try:
        claims = msgspec.msgpack.decode(claims_bytes, type=TicketClaims)
    except msgspec.MsgspecError as error:
        raise TicketError(f"signed, but not a ticket: {error}") from error
    if claims.unit != unit:
        raise TicketError(f"for unit {claims.unit!r}, this is {unit!r}")
    if claims.peer != peer:
        raise TicketError(f"for peer {claims.peer!r}, not {peer!r}")
    if now_s >= claims.expires_s:
        raise TicketError(f"expired {now_s - claims.expires_s:.1f} s ago")
    return claims


class ReplayGuard:
    """Remembers used nonces until their tickets expire. Bounded: when full of unexpired ones it refuses further tickets."""

    def __init__(self, capacity: int = 65536) -> None:
        """`capacity`: most nonces remembered at once."""
        self._capacity = capacity
        self._expires_of: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._expires_of)

    def use(self, claims: TicketClaims, now_s: float) -> None:
        """Marks a ticket used.

        Raises:
            TicketError: it was used before, or too many unexpired ones are remembered.
        """
        if len(self._expires_of) >= self._capacity:
            self._expires_of = {nonce: end for nonce, end in self._expires_of.items() if end > now_s}
        if claims.nonce in self._expires_of:
            raise TicketError("used before; every connection needs a ticket of its own")
        if len(self._expires_of) >= self._capacity:
            raise TicketError(f"{self._capacity} unexpired tickets are in use; ask again later")
        self._expires_of[claims.nonce] = claims.expires_s


def _mac(key: bytes, claims: bytes) -> bytes:
    return hmac.new(key, b"knittrans-ticket-1" + claims, hashlib.sha256).digest()
