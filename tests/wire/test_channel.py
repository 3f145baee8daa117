"""Channels: handshakes, plain and encrypted streams, and attacks on them."""

import os
import threading

import numpy as np
import pytest

from polyrhythm.core.errors import UsageError, WireError
from polyrhythm.core.peer import Peer
from polyrhythm.wire import handshake
from polyrhythm.wire.channel import open_channel
from polyrhythm.wire.frame import Header, Part
from polyrhythm.wire.handshake import Identity
from polyrhythm.wire.sockets import dial, listen, parse_address
from polyrhythm.wire.streams import MAX_RECORD

KEY, OTHER = bytes(32), bytes(31) + b"\1"
WORKER, SERVER = Identity(Peer("worker", 1), "here"), Identity(Peer("server", 0), "here")
KINDS = [("unix:", True), ("tcp:127.0.0.1", True), ("tcp:127.0.0.1:0", False)]


def sockets(address):
    listener, address = listen(address)
    dialed = dial(address)
    accepted, _ = listener.accept()
    listener.close()
    return dialed, accepted


def both(first, second):
    """Runs two functions at once. Returns what each returned or raised."""
    results = [None, None]

    def run(at, function):
        try:
            results[at] = function()
        except Exception as error:
            results[at] = error

    thread = threading.Thread(target=run, args=(0, first))
    thread.start()
    run(1, second)
    thread.join(20)
    return results


def pair(address, encrypt=True, keys=(KEY, KEY), timeout=5.0, encrypt_there=None):
    there = encrypt if encrypt_there is None else encrypt_there
    a, b = sockets(address)
    ends = both(
        lambda: open_channel(a, WORKER, keys[0], dialed=True, where="B", encrypt=encrypt, timeout=timeout),
        lambda: open_channel(b, SERVER, keys[1], dialed=False, where="A", encrypt=there, timeout=timeout),
    )
    for end, sock in zip(ends, (a, b), strict=True):
        if isinstance(end, Exception):
            sock.close()
    return ends


@pytest.mark.parametrize(("address", "encrypt"), KINDS)
def test_messages_arrive_as_they_were_sent(address, encrypt):
    left, right = pair(address, encrypt)
    assert (left.peer, right.peer, left.host) == (SERVER.peer, WORKER.peer, "here")
    rng = np.random.default_rng(0)
    sizes = [[], [0], [5], [3_000_001, 0, 17], [70_000] * 3, [1] * 3000]
    for number, counts in enumerate(sizes):
        arrays = [rng.integers(0, 255, n, np.uint8) for n in counts]
        header = Header("x", number, fields={"n": number}, parts=[Part("uint8", n) for n in counts])
        thread = threading.Thread(target=left.send, args=(header, [a.data for a in arrays]))
        thread.start()
        assert right.receive_header() == header
        for array in arrays:
            got = np.empty_like(array)
            right.receive_into(got.data)
            assert np.array_equal(got, array)
        thread.join()
    left.release()
    with pytest.raises(ConnectionError):
        right.receive_header()
    right.release()


def test_many_threads_may_send():
    left, right = pair("unix:")
    threads = [
        threading.Thread(
            target=lambda n=n: [
                left.send(Header("x", n, parts=[Part("uint8", 9000)]), [memoryview(bytes([n]) * 9000)])
                for _ in range(50)
            ]
        )
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    body = memoryview(bytearray(9000))
    for _ in range(200):
        header = right.receive_header()
        right.receive_into(body)
        assert bytes(body) == bytes([header.sequence]) * 9000
    left.release()
    right.release()


@pytest.mark.parametrize(("address", "encrypt"), KINDS)
def test_a_wrong_key_is_a_clear_error_at_both_ends(address, encrypt):
    for end in pair(address, encrypt, keys=(KEY, OTHER)):
        assert isinstance(end, WireError)
        assert "does not have the key of this run" in str(end)


def test_a_peer_cannot_turn_encryption_off():
    for end in pair("tcp:127.0.0.1", True, encrypt_there=False):
        assert isinstance(end, WireError)
        assert "opposite" in str(end)


def test_handshake_resists_a_reflection_attack():
    a, b = sockets("unix:")

    def mirror():
        while data := b.recv(1000):
            b.sendall(data)

    threading.Thread(target=mirror, daemon=True).start()
    with pytest.raises(WireError, match="key of this run"):
        open_channel(a, WORKER, KEY, dialed=True, where="the mirror")
    a.close()


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(handshake._HELLO.size)])
def test_handshake_refuses_arbitrary_bytes(data):
    a, b = sockets("unix:")
    a.sendall(data)
    with pytest.raises((WireError, TimeoutError)):
        open_channel(b, SERVER, KEY, dialed=False, where="a stranger", timeout=0.1)
    a.close()
    b.close()


@pytest.mark.parametrize(
    ("magic", "version"), [(b"PRHX", handshake.VERSION), (b"PRHS", handshake.VERSION + 1)]
)
def test_an_invalid_hello_is_rejected_before_a_proof_is_sent(magic, version):
    a, b = sockets("unix:")
    a.sendall((magic + bytes([version])).ljust(handshake._HELLO.size, b"\0"))
    with pytest.raises(WireError, match="a stranger is not a polyrhythm node with handshake version 1"):
        open_channel(b, SERVER, KEY, dialed=False, where="a stranger", timeout=0.5)
    assert len(a.recv(1000)) == handshake._HELLO.size  # no proof follows
    a.close()
    b.close()


def test_a_record_is_no_longer_than_it_may_be():
    """Nor empty. The length is checked before more is read or memory is allocated."""
    for size in (0, MAX_RECORD + 1, (1 << 32) - 1):
        left, right = pair("tcp:127.0.0.1")
        left._sock.sendall(size.to_bytes(4, "big"))
        left.release()
        with pytest.raises(WireError, match=f"worker 1 sent a record of {size} bytes"):
            right.receive_into(memoryview(bytearray(1)))
        right.release()


def test_records_cannot_be_changed_dropped_or_repeated():
    for attack in ("change", "length", "drop", "repeat"):
        left, right = pair("tcp:127.0.0.1")
        records = [bytes(next(left._writer.records([memoryview(b"x" * 100)]))) for _ in range(2)]
        if attack == "change":
            records[0] = records[0][:50] + bytes([records[0][50] ^ 1]) + records[0][51:]
        elif attack == "length":
            records[0] = records[0][:3] + bytes([records[0][3] - 1]) + records[0][4:]
        left._sock.sendall(b"".join(records[1:] if attack == "drop" else [records[0]] * 2))
        body = memoryview(bytearray(100))
        with pytest.raises(WireError, match=r"server 0|worker 1"):
            right.receive_into(body)
            right.receive_into(body)
        left.release()
        right.release()


def test_each_direction_has_a_key_of_its_own():
    """Both count records from 0, so with one key two records would share a nonce."""
    a, b = sockets("tcp:127.0.0.1")
    (_, dialed), (_, accepted) = both(
        lambda: handshake.authenticate(a, WORKER, KEY, dialed=True, encrypt=True, where="B"),
        lambda: handshake.authenticate(b, SERVER, KEY, dialed=False, encrypt=True, where="A"),
    )
    assert dialed.sending == accepted.receiving and dialed.receiving == accepted.sending
    assert dialed.sending != dialed.receiving
    a.close()
    b.close()


@pytest.mark.parametrize("mirrored", [0, 1], ids=["dialed", "accepted"])
def test_a_node_refuses_its_own_records(mirrored):
    """A message reflected to its sender is rejected, although its record number is the expected one."""
    ends = pair("tcp:127.0.0.1")
    node, mirror = ends[mirrored], ends[1 - mirrored]
    node.send(Header("x", 1))
    mirror._sock.sendall(mirror._sock.recv(1 << 16))
    with pytest.raises(WireError, match="were changed on the way"):
        node.receive_header()
    for end in ends:
        end.release()


def test_ciphers_without_encrypt_into_use_the_same_format():
    left, right = pair("tcp:127.0.0.1")
    left._writer._encrypt_into = right._reader._decrypt_into = None
    left.send(Header("x", 1, parts=[Part("uint8", 5)]), [memoryview(b"hello")])
    assert right.receive_header().kind == "x"
    body = bytearray(5)
    right.receive_into(memoryview(body))
    assert body == b"hello"
    left.release()
    right.release()


def test_a_send_that_nobody_reads_times_out_and_closes_the_channel():
    left, right = pair("unix:")
    left.wait = 0.05
    with pytest.raises(BlockingIOError):
        left.send(Header("x", 1, parts=[Part("uint8", 1 << 24)]), [memoryview(bytes(1 << 24))])
    with pytest.raises(OSError, match="closed"):
        left.send(Header("x", 1))
    left.release()
    right.release()


def test_address_parsing_refuses_malformed_addresses():
    assert parse_address("tcp:[::1]:80") == ("tcp", "[::1]:80")
    for bad in ("", "here", "udp:x:1", "tcp:host:port"):
        with pytest.raises(UsageError, match="is not an address"):
            parse_address(bad)
    with pytest.raises(UsageError, match="may have 16 bytes"):
        Identity(Peer("a very long role indeed", 0)).check()
