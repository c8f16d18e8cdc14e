"""The control channel: one request, one reply, encrypted; the scheduler never speaks first.

What it guarantees:

* only a peer that read `control.json` (owner-only) can speak at all: without the server's public key the CURVE handshake
  fails, before anything reaches the process;
* a request that is no valid record is answered with `Refused` and counted; it never raises in the server;
* messages above `max_message_bytes` are not received, and queues are bounded: what does not fit is dropped and counted;
* every wait of a client has a deadline. A request that timed out is abandoned together with its connection, so an answer
  that comes late is never taken for another's;
* a server and a client each belong to one thread at a time: zmq sockets are not thread-safe. A process with several threads
  that speak gives each its own `ControlClient`.

Frames: client sends `[request id (8 bytes, big endian), record]`, the server answers with the same id.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from knittrans_jax.launch.messages import Refused, Reply, Request, Wait

MAX_MESSAGE_BYTES = 32 * 2**20
"""A plan of 4,096 trajectories is about 100 kB; this leaves room and still bounds what a peer can make us allocate."""
HIGH_WATER_MESSAGES = 1024
"""Messages queued per peer and direction before further ones are dropped."""
MAX_BATCH = 256
"""Most requests returned by one `receive`, so that a flood cannot keep the server from its other work."""
STOP_POLL_S = 0.1
"""How often a waiting client looks at its stop flag."""
ABSENT_S = 0.5
"""A wait that ends so much later than it was to: this process did not run meanwhile, and the time is not the scheduler's."""


class ControlError(RuntimeError):
    """Base of the control channel's errors."""


class ControlTimeout(ControlError):  # noqa: N818 - the name that callers read
    """No answer before the deadline."""


class ControlRefused(ControlError):  # noqa: N818
    """The scheduler refused the request; the message says why."""


class ControlStopped(ControlError):  # noqa: N818
    """The caller's own stop flag was set while it waited."""


class ControlEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What `control.json` holds: where the server listens and its CURVE public key (z85)."""

    address: str
    server_key: str


@dataclasses.dataclass
class ControlCounters:
    """Traffic of a server or a client since its start. Bytes are those of records, without framing and encryption."""

    messages_in: int = 0
    messages_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    undecodable_bytes: int = 0
    """Bytes of requests that were no valid record."""
    dropped: int = 0
    """Replies whose peer is gone or does not read; requests without id; replies that came too late."""

    def as_dict(self, prefix: str = "control_") -> dict[str, float]:
        """The counters by name, for a report."""
        return {prefix + field.name: float(getattr(self, field.name)) for field in dataclasses.fields(self)}


@dataclasses.dataclass(frozen=True)
class Incoming:
    """A valid request: answer it with `ControlServer.reply(peer, request_id, ...)`, now or later."""

    peer: bytes
    """`name/suffix`: the client's name, and a suffix that is new at every connection."""
    request_id: int
    request: Request
    size_bytes: int


def write_private_file(path: Path, content: bytes) -> None:
    """Writes a file that only its owner can read (0600), whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_endpoint(control_file: Path) -> ControlEndpoint:
    """Reads `control.json`; raises `OSError` when it is not there and `ControlError` when it is no endpoint."""
    try:
        return msgspec.json.decode(control_file.read_bytes(), type=ControlEndpoint)
    except msgspec.MsgspecError as error:
        raise ControlError(f"{control_file}: not a control endpoint ({error}); is it from this run?") from error


def wait_for_endpoint(
    control_file: Path, timeout_s: float, stopped: Callable[[], bool] | None = None
) -> ControlEndpoint:
    """Waits until the scheduler has written `control.json`.

    Raises:
        ControlTimeout: it did not appear within `timeout_s`.
        ControlStopped: `stopped()` became true.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(FileNotFoundError):
            return read_endpoint(control_file)
        if stopped is not None and stopped():
            raise ControlStopped(f"stopped while waiting for {control_file}")
        if time.monotonic() >= deadline:
            raise ControlTimeout(
                f"{control_file} did not appear within {timeout_s:g} s: did the scheduler start? "
                "(raise control.start_timeout_s if it needs longer)"
            )
        time.sleep(0.05)


def new_session() -> int:
    """A number that tells one process of a role from the next; process ids do not, in containers."""
    return secrets.randbits(62)


def reachable_host(host: str) -> str:
    """What others connect to when this machine listens on `host`: its own name, where that is every interface."""
    return socket.gethostname() if host in ("0.0.0.0", "*") else host


class ControlServer:
    """The scheduler's end: a ROUTER socket. `address` is what peers connect to; port 0 picks a free one."""

    def __init__(
        self,
        host: str,
        port: int,
        control_file: Path,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        high_water_messages: int = HIGH_WATER_MESSAGES,
    ) -> None:
        """Binds, and writes `control_file` (0600) once peers can connect."""
        self.counters = ControlCounters()
        self._decoder = msgspec.msgpack.Decoder(Request)
        self._encoder = msgspec.msgpack.Encoder()
        self._max_message_bytes = max_message_bytes
        public, secret = zmq.curve_keypair()
        self._context = zmq.Context()
        try:
            self._socket = self._context.socket(zmq.ROUTER)
            self._socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
            self._socket.setsockopt(zmq.SNDHWM, high_water_messages)
            self._socket.setsockopt(zmq.RCVHWM, high_water_messages)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a reply to a peer that is gone is counted, not lost
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.curve_server = True
            self._socket.curve_secretkey = secret
            self._socket.curve_publickey = public
            try:
                self._socket.bind(f"tcp://{host}:{port or '*'}")
            except zmq.ZMQError as error:
                raise ControlError(
                    f"control.host/control.port: cannot listen on {host}:{port}: {error.strerror}"
                ) from error
            bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1]
            self.address = f"tcp://{reachable_host(host)}:{bound}"
            endpoint = ControlEndpoint(address=self.address, server_key=public.decode())
            write_private_file(control_file, msgspec.json.encode(endpoint))
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def receive(self, timeout_s: float) -> list[Incoming]:
        """Waits up to `timeout_s` for the first request, then takes what else is there (at most `MAX_BATCH`)."""
        incoming: list[Incoming] = []
        if not self._socket.poll(max(0, int(timeout_s * 1000))):
            return incoming
        for _ in range(MAX_BATCH):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            one = self._decode(frames)
            if one is not None:
                incoming.append(one)
        return incoming

    def reply(self, peer: bytes, request_id: int, reply: Reply) -> None:
        """Answers a request. A peer that is gone or does not read loses the reply, which is counted, and asks again."""
        body = self._encoder.encode(reply)
        if len(body) > self._max_message_bytes:
            body = self._encoder.encode(
                Refused(
                    reason=f"the reply ({type(reply).__name__}, {len(body)} bytes) is above the control channel's limit "
                    f"of {self._max_message_bytes} bytes: lower batch.groups / batch.mini_batches"
                )
            )
        try:
            self._socket.send_multipart([peer, request_id.to_bytes(8, "big"), body], zmq.NOBLOCK)
        except zmq.ZMQError:  # EHOSTUNREACH: gone; EAGAIN: its queue is full
            self.counters.dropped += 1
            return
        self.counters.messages_out += 1
        self.counters.bytes_out += len(body)

    def close(self, linger_s: float = 0.5) -> None:
        """Sends what is queued for at most `linger_s`, then closes."""
        self._context.destroy(linger=int(linger_s * 1000))

    def __enter__(self) -> ControlServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _decode(self, frames: list[bytes]) -> Incoming | None:
        size_bytes = sum(len(frame) for frame in frames[1:])
        self.counters.messages_in += 1
        self.counters.bytes_in += size_bytes
        if len(frames) != 3 or len(frames[1]) != 8:
            self.counters.undecodable_bytes += size_bytes
            self.counters.dropped += 1
            return None
        peer, request_id, body = frames[0], int.from_bytes(frames[1], "big"), frames[2]
        try:
            request = self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self.counters.undecodable_bytes += size_bytes
            self.reply(peer, request_id, Refused(reason=f"not a request of this version: {error}"))
            return None
        return Incoming(peer, request_id, request, len(body))


class ControlClient:
    """A role's end: a DEALER socket. One thread at a time; see the module's opening.

    `call` asks and waits; `post` and `poll` do the same in two steps for a loop that must not block, with at most one
    request outstanding. Both ask again by themselves upon `Wait`.
    """

    def __init__(
        self,
        control_file: Path,
        name: str,
        timeout_s: float,
        *,
        start_timeout_s: float = 0.0,
        stopped: Callable[[], bool] | None = None,
    ) -> None:
        """Connects.

        Args:
            control_file: the run's `control.json`.
            name: shows in the server's `Incoming.peer`; at most 200 bytes.
            timeout_s: deadline of every request, unless a call gives its own.
            start_timeout_s: how long to wait for `control_file`.
            stopped: looked at while waiting; true raises `ControlStopped`.
        """
        if not 0 < len(name.encode()) <= 200:
            raise ValueError(f"ControlClient name {name!r}: expected 1 to 200 bytes")
        self.counters = ControlCounters()
        self._file, self._name, self._timeout_s = Path(control_file), name, timeout_s
        self._stopped = stopped or (lambda: False)
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self._encoder = msgspec.msgpack.Encoder()
        self._request_id = 0
        self._outstanding: tuple[Request, float, float] | None = None  # request, its timeout, deadline of this asking
        endpoint = wait_for_endpoint(self._file, start_timeout_s, stopped)
        self._context = zmq.Context()
        self._socket = self._connect(endpoint)

    @property
    def outstanding(self) -> bool:
        """A posted request has no answer yet."""
        return self._outstanding is not None

    def call(self, request: Request, timeout_s: float | None = None, overall_s: float | None = None) -> Reply:
        """Asks and waits for the answer; upon `Wait` asks again.

        Args:
            request: the record.
            timeout_s: deadline of each asking (default: the client's).
            overall_s: deadline over all askings. None: as long as the scheduler keeps answering `Wait` in time, so a
                dead scheduler is still noticed after `timeout_s`.

        Raises:
            ControlTimeout: no answer in time. Whether the request was acted on is not known.
            ControlRefused: the scheduler refused it.
            ControlStopped: the stop flag was set.
        """
        overall = None if overall_s is None else time.monotonic() + overall_s
        self.post(request, timeout_s)
        try:
            while True:
                left_s = STOP_POLL_S if overall is None else min(STOP_POLL_S, max(0.0, overall - time.monotonic()))
                reply = self.poll(left_s)
                if reply is not None:
                    return reply
                if self._stopped():
                    raise ControlStopped(
                        f"{self._name}: stopped while waiting for an answer to {type(request).__name__}"
                    )
                if self._moved():
                    raise ControlTimeout(
                        f"{self._name}: {type(request).__name__} will not be answered: the scheduler was started anew"
                    )
                if overall is not None and time.monotonic() >= overall:
                    raise ControlTimeout(
                        f"{self._name}: {type(request).__name__} was still unanswered after {overall_s:g} s in all"
                    )
        except BaseException:
            self.abandon()
            raise

    def post(self, request: Request, timeout_s: float | None = None) -> None:
        """Sends a request without waiting. Raises `ControlError` when one is outstanding already."""
        if self._outstanding is not None:
            raise ControlError(
                f"{self._name}: {type(self._outstanding[0]).__name__} is still outstanding; poll() for its answer first"
            )
        self._ask(request, self._timeout_s if timeout_s is None else timeout_s)

    def poll(self, timeout_s: float = 0.0) -> Reply | None:
        """Waits up to `timeout_s` for the answer to the posted request; None: none yet. Raises like `call`."""
        end = time.monotonic() + timeout_s
        while self._outstanding is not None:
            request, request_timeout_s, deadline = self._outstanding
            now = time.monotonic()
            wait_s = max(0.0, min(end, deadline) - now)
            came = self._socket.poll(int(wait_s * 1000 + 0.999))
            absent_s = time.monotonic() - now - wait_s
            if absent_s > ABSENT_S and not came:  # the answer may be here, but nobody has read it yet
                self._outstanding = (request, request_timeout_s, deadline + absent_s)
                continue
            if not came:
                if time.monotonic() >= deadline:
                    self.abandon()
                    raise ControlTimeout(
                        f"{self._name}: no answer to {type(request).__name__} within {request_timeout_s:g} s: "
                        "the scheduler is gone, stuck or overloaded (control.rpc_timeout_s)"
                    )
                if time.monotonic() >= end:
                    return None
                continue
            reply = self._take()
            if reply is None:
                continue
            self._outstanding = None
            if isinstance(reply, Wait):
                self._ask(request, request_timeout_s)
                continue
            if isinstance(reply, Refused):
                raise ControlRefused(f"{self._name}: {type(request).__name__} was refused: {reply.reason}")
            return reply
        return None

    def abandon(self) -> None:
        """Gives up the outstanding request, if any, and its connection: nothing of it is sent or answered later."""
        if self._outstanding is None:
            return
        self._outstanding = None
        self._socket.close(linger=0)
        with contextlib.suppress(OSError, ControlError):  # while a scheduler restarts the last endpoint stays good
            self._endpoint = read_endpoint(self._file)
        self._socket = self._connect(self._endpoint)

    def _moved(self) -> bool:
        """Whether the run's scheduler is another one than this client is connected to."""
        with contextlib.suppress(OSError, ControlError):
            return read_endpoint(self._file) != self._endpoint
        return False

    def close(self, linger_s: float = 0.0) -> None:
        """Closes; `linger_s` bounds the sending of what is queued."""
        self._context.destroy(linger=int(linger_s * 1000))

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connect(self, endpoint: ControlEndpoint) -> zmq.Socket[bytes]:
        self._endpoint = endpoint
        public, secret = zmq.curve_keypair()
        sock = self._context.socket(zmq.DEALER)
        sock.setsockopt(zmq.ROUTING_ID, f"{self._name}/{secrets.token_hex(4)}".encode())
        sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        sock.setsockopt(zmq.SNDHWM, 16)  # one request is outstanding at most
        sock.setsockopt(zmq.RCVHWM, 16)
        sock.setsockopt(zmq.LINGER, 0)
        sock.curve_serverkey = endpoint.server_key.encode()
        sock.curve_publickey, sock.curve_secretkey = public, secret
        sock.connect(endpoint.address)
        return sock

    def _ask(self, request: Request, timeout_s: float) -> None:
        body = self._encoder.encode(request)
        if len(body) > MAX_MESSAGE_BYTES:
            raise ControlError(
                f"{self._name}: {type(request).__name__} of {len(body)} bytes is above the control channel's limit "
                f"of {MAX_MESSAGE_BYTES} bytes"
            )
        self._request_id += 1
        self._outstanding = (request, timeout_s, time.monotonic() + timeout_s)
        try:
            self._socket.send_multipart([self._request_id.to_bytes(8, "big"), body], zmq.NOBLOCK)
        except zmq.Again:  # the queue to a peer that does not read is full
            self.abandon()
            raise ControlTimeout(f"{self._name}: the scheduler does not take {type(request).__name__}") from None
        self.counters.messages_out += 1
        self.counters.bytes_out += len(body)

    def _take(self) -> Reply | None:
        """The answer to the outstanding request, or None for anything else (counted)."""
        frames = self._socket.recv_multipart(zmq.NOBLOCK)
        self.counters.messages_in += 1
        self.counters.bytes_in += sum(len(frame) for frame in frames)
        if len(frames) != 2 or int.from_bytes(frames[0], "big") != self._request_id:
            self.counters.dropped += 1
            return None
        try:
            return self._decoder.decode(frames[1])
        except msgspec.MsgspecError as error:
            self._outstanding = None
            raise ControlError(
                f"{self._name}: the scheduler's answer is no record of this version ({error}); do all roles run one version?"
            ) from error
