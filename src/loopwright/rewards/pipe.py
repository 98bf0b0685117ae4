"""Messages between two processes of one machine, in msgpack behind their length, each within a time.

    ours, theirs = socket.socketpair()
    send(ours, ["fox"], until=time.monotonic() + 30)
    receive(theirs)                                         # ["fox"], however long it takes

The time is that of the whole message: who takes or gives half of one and stops is given up as who does nothing is.
"""

import socket
import struct
import time

import msgpack

_LENGTH = struct.Struct("!Q")


def send(pipe: socket.socket, message: object, until: float | None = None) -> None:
    """Raises TimeoutError where it is not taken by then (`time.monotonic`), OSError where nobody is there."""
    data = msgpack.packb(message)
    for part in (_LENGTH.pack(len(data)), data):
        pipe.settimeout(_left(until))
        pipe.sendall(part)


def receive(pipe: socket.socket, until: float | None = None) -> object:
    """Raises TimeoutError where not all has come by then, EOFError or OSError where nobody is there."""
    (length,) = _LENGTH.unpack(_received(pipe, _LENGTH.size, until))
    message: object = msgpack.unpackb(_received(pipe, length, until))
    return message


def _received(pipe: socket.socket, count: int, until: float | None) -> bytearray:
    data = bytearray(count)
    rest = memoryview(data)
    while rest:
        pipe.settimeout(_left(until))
        come = pipe.recv_into(rest)
        if not come:
            raise EOFError("the other end is closed")
        rest = rest[come:]
    return data


def _left(until: float | None) -> float | None:
    """Seconds. A socket with none left would not wait, but not raise TimeoutError either."""
    if until is None:
        return None
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("no time is left")
    return left
