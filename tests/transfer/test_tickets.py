import pytest
from hypothesis import given
from hypothesis import strategies as st

from knittrans_jax.transfer import tickets

KEY = bytes(range(32))
NONCE = b"n" * 16


def ticket(**changes: object) -> bytes:
    fields: dict = {"key": KEY, "unit": "host0", "peer": "train1", "expires_s": 100.0, "nonce": NONCE} | changes
    return tickets.issue(**fields)


def check(one: bytes, now_s: float = 50.0, key: bytes = KEY) -> tickets.TicketClaims:
    return tickets.check(key, one, unit="host0", peer="train1", now_s=now_s)


def test_a_good_ticket_gives_its_claims():
    assert check(ticket()) == tickets.TicketClaims(unit="host0", peer="train1", expires_s=100.0, nonce=NONCE)


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (ticket(unit="host1"), "for unit 'host1'"),
        (ticket(peer="train0"), "for peer 'train0'"),
        (ticket(expires_s=50.0), "expired"),
        (ticket(key=bytes(32)), "signature"),
        (b"", "0 bytes"),
        (b"x" * 5000, "5000 bytes"),
        (b"x" * 100, "signature"),
    ],
)
def test_a_ticket_for_something_else_is_refused(one: bytes, why: str):
    with pytest.raises(tickets.TicketError, match=why):
        check(one)


@given(st.integers(0, len(ticket()) - 1), st.integers(1, 255))
def test_no_byte_of_a_ticket_can_be_changed(at: int, flip: int):
    changed = bytearray(ticket())
    changed[at] ^= flip
    with pytest.raises(tickets.TicketError, match="signature"):
        check(bytes(changed))


def test_a_ticket_is_used_once_and_the_memory_of_it_is_bounded():
    guard = tickets.ReplayGuard(capacity=2)

    def claims(nonce: bytes, expires_s: float) -> tickets.TicketClaims:
        return tickets.TicketClaims(unit="host0", peer="train1", expires_s=expires_s, nonce=nonce)

    guard.use(claims(b"a", 10.0), 0.0)
    with pytest.raises(tickets.TicketError, match="used before"):
        guard.use(claims(b"a", 10.0), 1.0)
    guard.use(claims(b"b", 20.0), 1.0)
    with pytest.raises(tickets.TicketError, match="ask again later"):
        guard.use(claims(b"c", 20.0), 2.0)
    guard.use(claims(b"c", 20.0), 11.0)  # "a" has expired and is forgotten
    assert len(guard) == 2
