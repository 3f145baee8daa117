"""The transport between real processes and threads: replies, loss, retransmission and backpressure."""

import contextlib
import os
import re
import socket
import threading
import time

import numpy as np
import pytest

from polyrhythm.core.errors import PeerLost, PolyrhythmError, UsageError, WaitError, WireError
from polyrhythm.core.peer import Peer
from polyrhythm.wire import Arenas, Buffer, Transport, TransportOptions
from polyrhythm.wire.channel import Channel, open_channel
from polyrhythm.wire.frame import Header, Part, encode
from polyrhythm.wire.handshake import Identity
from polyrhythm.wire.links import LINGER
from polyrhythm.wire.sockets import dial, listen, shut_down
from tests.support.combine import few

KEY = bytes(range(32))
WORKER, SERVER = Peer("worker", 1), Peer("server", 0)
ADDRESSES = ["unix:", "tcp:127.0.0.1"]


@pytest.fixture(autouse=True)
def nothing_is_left():
    def state():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = state()
    yield
    deadline = time.monotonic() + 3
    while state() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert state() == before


@contextlib.contextmanager
def nodes(listen="unix:", server=None, worker=None, **both):
    options = {"listen": listen, **both}
    server = Transport(SERVER, KEY, TransportOptions(**{**options, **(server or {})}))
    worker = Transport(WORKER, KEY, TransportOptions(**{**options, **(worker or {})}))
    worker.introduce(SERVER, server.address)
    try:
        yield server, worker
    finally:
        worker.close()
        server.close()


class Proxy:
    """Forwards bytes to an address and records them. It can cut its connections and change a byte."""

    def __init__(self, target):
        self.target = target
        self.seen = bytearray()
        self.tamper_at = None
        self.sockets = []
        self.listener, self.address = listen("tcp:127.0.0.1" if target.startswith("tcp") else "unix:")
        self.threads = [threading.Thread(target=self.accept)]
        self.threads[0].start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = dial(self.target)
                far.settimeout(None)
                self.sockets += [near, far]
                for a, b in ((near, far), (far, near)):
                    self.threads.append(threading.Thread(target=self.pump, args=(a, b)))
                    self.threads[-1].start()

    def pump(self, source, target):
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if self.tamper_at is not None and len(data) > self.tamper_at:
                    data[self.tamper_at] ^= 1
                    self.tamper_at = None
                self.seen += data
                target.sendall(data)
        shut_down(target)

    def cut(self):
        for sock in self.sockets:
            shut_down(sock)

    def close(self):
        shut_down(self.listener)
        self.threads[0].join()
        self.cut()
        for thread in self.threads[1:]:
            thread.join()
        for sock in (self.listener, *self.sockets):
            sock.close()


def floats(*values):
    return Buffer("float32", np.array(values, np.float32).data.cast("B"))


def values(buffer):
    return np.frombuffer(buffer.view, buffer.dtype).tolist()


def shared(arenas, index, count):
    at = arenas.allocate(index, 4 * count)
    return Buffer("float32", arenas.view(index)[at : at + 4 * count], index, at)


def double(server, number=1):
    for _ in range(number):
        message = server.receive(timeout=10)
        server.reply(
            message, [floats(*(2 * x for x in values(b))) for b in message.buffers], {"of": message.kind}
        )


def serve_in_a_process(listen, serve, **options):
    """Starts a server in a child process. Returns its address and a function that waits for its end."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        code = 1
        try:
            server = Transport(SERVER, KEY, TransportOptions(listen=listen, **options))
            os.write(writing, server.address.encode())
            serve(server)
            server.close()
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    address = os.read(reading, 200).decode()
    os.close(reading)
    return address, lambda: os.waitpid(child, 0)[1]


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("lend", [False, True])
def test_request_and_reply_between_processes(address, lend):
    arenas = Arenas(1, 1 << 30)
    options = {"arenas": arenas, "host": "h"} if lend else {}
    where, ended = serve_in_a_process(address, lambda server: double(server, 20), **options)
    worker = Transport(WORKER, KEY, TransportOptions(listen=address, **options))
    worker.introduce(SERVER, where)
    for number in range(20):
        count = 1 + number * 9973
        out, into = (shared(arenas, 0, count) for _ in range(2))
        np.frombuffer(out.view, np.float32)[:] = number
        reply = worker.request(SERVER, "double", [out], [into]).wait(10)
        assert reply.fields == {"of": "double"}
        assert reply.buffers[0].view is into.view
        assert (np.frombuffer(into.view, np.float32) == 2 * number).all()
    assert worker.traffic.bytes_sent == sum(4 * (1 + n * 9973) for n in range(20))
    assert ended() == 0
    worker.close()
    del out, into, reply
    arenas.close()


def test_tensors_in_shared_arenas_are_not_sent_over_the_socket():
    arenas = Arenas(1, 1 << 30)
    with nodes(arenas=arenas, host="h") as (server, worker):
        proxy = Proxy(server.address)
        worker.introduce(SERVER, proxy.address)
        big = shared(arenas, 0, 1 << 20)
        pending = worker.request(SERVER, "x", [big], [big])
        message = server.receive()
        assert message.buffers[0].arena == 0 and message.buffers[0].offset == big.offset
        server.reply(message, [Buffer("float32", memoryview(bytes(4 << 20)))])
        pending.wait(10)
        assert len(proxy.seen) < 2000
        assert server.traffic.bytes_sent == worker.traffic.bytes_sent == 4 << 20
        proxy.close()
    del big, message, pending
    arenas.close()


def test_bytes_are_counted_before_they_can_arrive(monkeypatch):
    """Otherwise a receiver could end the run before they are in the total. A failed send does not count."""
    counted, send = [], Channel.send

    def look(channel, header, views=()):
        send(channel, header, views)
        counted.append(
            (header.kind, header.reply_to > 0, worker.traffic.bytes_sent, server.traffic.bytes_sent)
        )

    with nodes() as (server, worker):
        monkeypatch.setattr(Channel, "send", look)
        worker.send(SERVER, "told", [floats(1)])
        pending = worker.request(SERVER, "asked", [floats(1, 2)])
        server.receive(["told"], timeout=5)
        server.reply(server.receive(["asked"], timeout=5), [floats(1, 2, 3)])
        pending.wait(5)
        assert counted == [("told", False, 4, 0), ("asked", False, 12, 0), ("asked", True, 12, 12)]
        server.close()
        with pytest.raises(PeerLost):
            worker.send(SERVER, "lost", [floats(1)], retry=False)
        assert worker.traffic.bytes_sent == 12


def test_tensors_between_hosts_are_sent_as_bytes():
    mine, theirs = Arenas(1, 1 << 20), Arenas(1, 1 << 20)
    options = {"server": {"arenas": theirs, "host": "elsewhere"}, "worker": {"arenas": mine, "host": "h"}}
    with nodes(**options) as (server, worker):
        out, into = shared(mine, 0, 3), shared(mine, 0, 3)
        out.view[:] = floats(1, 2, 3).view
        pending = worker.request(SERVER, "x", [out], [into])
        message = server.receive(timeout=5)
        assert message.buffers[0].arena == -1 and values(message.buffers[0]) == [1, 2, 3]
        server.reply(message, [floats(4, 5, 6)])
        pending.wait(5)
        assert values(into) == [4, 5, 6]
    del out, into, pending
    mine.close()
    theirs.close()


@pytest.mark.parametrize("address", ADDRESSES)
def test_messages_in_both_directions_over_one_connection(address):
    with nodes(address) as (server, worker):
        worker.send(SERVER, "hello", [floats(1), floats(), floats(2, 3)], {"name": "w"})
        message = server.receive(["hello"], timeout=5)
        assert (message.sender, message.wants_reply, message.fields) == (WORKER, False, {"name": "w"})
        assert [values(b) for b in message.buffers] == [[1], [], [2, 3]]
        pending = server.request(WORKER, "back", [floats(7)])
        double(worker)
        assert values(pending.wait(5).buffers[0]) == [14]
        assert len(server._poller._channels) == 1


def test_receive_chooses_by_kind_and_keeps_order():
    with nodes() as (server, worker):
        for number, kind in enumerate("abab"):
            worker.send(SERVER, kind, fields={"n": number})
        got = [server.receive(["b"], 5), server.receive(timeout=5), server.receive(["a", "b"], 5)]
        assert [m.fields["n"] for m in got] == [1, 0, 2]
        assert server.receive(["c"], timeout=0.01) is None


def test_wake_ends_the_receives_that_wait_now():
    with nodes() as (server, worker):
        results = []
        threads = [threading.Thread(target=lambda: results.append(server.receive())) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        server.wake()
        for thread in threads:
            thread.join(5)
        assert results == [None] * 3
        worker.send(SERVER, "x")
        assert server.receive(timeout=5).kind == "x"


def test_refused_requests_and_transport_misuse_raise_errors():
    with nodes() as (server, worker):
        pending = worker.request(SERVER, "x")
        message = server.receive()
        server.refuse(message, "no such shard: ask server 1")
        with pytest.raises(PolyrhythmError, match=r"^no such shard"):
            pending.wait(5)
        assert pending.done
        with pytest.raises(UsageError, match="has been replied to"):
            server.reply(message)
        for call in (
            lambda: worker.send(Peer("server", 7), "x"),
            lambda: worker.send(SERVER, "!x"),
            lambda: worker.send(SERVER, "x", [Buffer("complex", memoryview(b""))]),
            lambda: worker.send(SERVER, "x", fields={"f": object()}),
        ):
            with pytest.raises(UsageError):
                call()


def test_another_layout_is_refused():
    errors = []
    with nodes(on_error=errors.append) as (server, worker):
        server.layout, worker.layout = "aaaa", "bbbb"
        with pytest.raises(WireError, match=r"worker 1 sent 'x' for layout bbbb, server 0 has aaaa"):
            worker.request(SERVER, "x", [floats(1)]).wait(5)
        worker.layout = ""
        worker.send(SERVER, "y")
        assert server.receive(timeout=5).kind == "y"
    assert len(errors) == 1


def test_a_reply_of_another_shape_is_an_error():
    with nodes() as (server, worker):
        into = floats(0, 0)
        pending = worker.request(SERVER, "x", into=[into])
        server.reply(server.receive(), [floats(1, 2, 3)])
        with pytest.raises(WireError, match="server 0 replied to 'x' with"):
            pending.wait(5)
        assert values(into) == [0, 0]
        pending = worker.request(SERVER, "x", into=[into])
        server.reply(server.receive(), [floats(1, 2)])
        assert values(pending.wait(5).buffers[0]) == [1, 2]


def test_only_the_receiver_of_a_request_can_reply():
    """A reply from another peer is ignored, even with the right sequence number."""
    with nodes() as (server, worker):
        other = Transport(Peer("server", 1), KEY)
        other.introduce(WORKER, worker.address)
        other.send(WORKER, "before")
        worker.receive(["before"], timeout=5)
        pending = worker.request(SERVER, "x")
        forged = Header("x", 99, pending.header.sequence, fields={"forged": True})
        other._links[WORKER].channel.send(forged)
        other.send(WORKER, "after")
        worker.receive(["after"], timeout=5)
        assert not pending.done
        server.reply(server.receive(timeout=5), fields={"forged": False})
        assert pending.wait(5).fields == {"forged": False}
        other.close()


def test_many_threads_send_requests_at_once():
    with nodes(queue=4) as (server, worker):
        serving = threading.Thread(target=double, args=(server, 400))
        serving.start()
        doubled = []

        def request(number):
            for step in range(100):
                reply = worker.request(SERVER, "x", [floats(*[number + step] * (1 + step * 50))]).wait(20)
                doubled.append(set(values(reply.buffers[0])) == {2.0 * (number + step)})

        threads = [threading.Thread(target=request, args=(number * 1000,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in (*threads, serving):
            thread.join(30)
        assert doubled == [True] * 400


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_wrong_key_cannot_join_and_others_are_served(address):
    errors = []
    with nodes(address, server={"on_error": errors.append}) as (server, worker):
        stranger = Transport(Peer("worker", 9), os.urandom(32), TransportOptions(address))
        stranger.introduce(SERVER, server.address)
        with pytest.raises(WireError, match="does not have the key of this run"):
            stranger.send(SERVER, "x")
        silent = [dial(server.address) for _ in range(3)]
        pending = worker.request(SERVER, "x", [floats(1)])
        double(server)
        assert values(pending.wait(5).buffers[0]) == [2]
        assert server.receive(timeout=0.01) is None
        stranger.close()
        for sock in silent:
            sock.close()
    assert len(errors) == 1 and "key of this run" in errors[0]


def test_a_peer_with_an_unexpected_identity_is_refused():
    with nodes() as (server, worker):
        worker.introduce(Peer("server", 5), server.address)
        with pytest.raises(WireError, match=r"server 5 at .* is server 0"):
            worker.send(Peer("server", 5), "x")


@pytest.mark.parametrize("encrypt", [True, False])
def test_bytes_between_hosts_are_secret(encrypt):
    with nodes("tcp:127.0.0.1", encrypt=encrypt) as (server, worker):
        proxy = Proxy(server.address)
        worker.introduce(SERVER, proxy.address)
        marker = b"a marker in the tensor" * 4
        worker.send(
            SERVER, "the kind", [Buffer("uint8", memoryview(marker))], {"note": "a marker in the fields"}
        )
        assert bytes(server.receive(timeout=5).buffers[0].view) == marker
        for text in (b"a marker in the tensor", b"a marker in the fields", b"the kind"):
            assert (text in proxy.seen) is not encrypt
        proxy.close()


@pytest.mark.parametrize("encrypt", [True, False])
def test_traffic_counts_the_bytes_on_the_sockets_exactly(encrypt):
    """To the byte, including connections that have ended."""
    with nodes("tcp:127.0.0.1", encrypt=encrypt) as (server, worker):
        proxy = Proxy(server.address)
        worker.introduce(SERVER, proxy.address)
        worker.send(SERVER, "first")
        server.receive(timeout=5)
        begun, seen = sum(worker.traffic.by_peer().values()), len(proxy.seen)
        assert set(worker.traffic.by_peer()) == {SERVER} and server.traffic.by_peer()[WORKER] == 0
        for count in (0, 1, 5, 100_000):
            pending = worker.request(SERVER, "push", [floats(*range(count))], into=[floats(*range(count))])
            double(server)
            pending.wait(5)
        sent = worker.traffic.by_peer()[SERVER] - begun + server.traffic.by_peer()[WORKER]
        assert sent == len(proxy.seen) - seen > 2 * 4 * 100_000
        before = worker.traffic.by_peer()[SERVER]
        proxy.cut()
        pending = worker.request(SERVER, "again")
        server.reply(server.receive(timeout=5))
        pending.wait(5)
        assert before < worker.traffic.by_peer()[SERVER] < before + 500
        proxy.close()


def test_tampering_is_detected_and_the_node_lives_on():
    errors = []
    with nodes("tcp:127.0.0.1", server={"on_error": errors.append}) as (server, worker):
        proxy = Proxy(server.address)
        worker.introduce(SERVER, proxy.address)
        worker.request(SERVER, "x")
        server.reply(server.receive(timeout=5))
        proxy.tamper_at = 600
        worker.send(SERVER, "y", [Buffer("uint8", memoryview(bytes(1000)))])
        assert server.receive(timeout=0.2) is None
        assert errors == ["bytes from worker 1 were changed on the way"]
        pending = worker.request(SERVER, "z", [floats(1)])
        double(server)
        assert values(pending.wait(5).buffers[0]) == [2]
        proxy.close()


def test_malformed_bytes_fail_pending_requests_and_close_one_connection():
    errors = []
    with nodes(worker={"on_error": errors.append}) as (server, worker):
        pending = worker.request(SERVER, "x")
        message = server.receive(timeout=5)
        message._connection.channel._sock.sendall(b"no message at all")
        with pytest.raises(WireError, match="server 0 sent b'no '"):
            pending.wait(5)
        assert len(errors) == 1
        again = worker.request(SERVER, "x", [floats(1)])
        double(server)
        assert values(again.wait(5).buffers[0]) == [2]


def test_too_large_a_message_is_refused_before_memory_is_taken():
    errors = []
    with nodes(server={"max_inline": 1000, "on_error": errors.append}) as (server, worker):
        worker.send(SERVER, "x", [Buffer("uint8", memoryview(bytes(1001)))])
        assert server.receive(timeout=0.2) is None
        assert re.search("worker 1 sent 'x' with 1001 bytes", errors[0])


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_request_resent_after_a_broken_connection_is_delivered_once(address):
    with nodes(address) as (server, worker):
        proxy = Proxy(server.address)
        worker.introduce(SERVER, proxy.address)
        pending = worker.request(SERVER, "push", [floats(3)])
        message = server.receive(timeout=5)
        before = message._connection
        proxy.cut()
        deadline = time.monotonic() + 5
        while message._connection is before and time.monotonic() < deadline:
            time.sleep(0.005)
        assert server.receive(timeout=0.05) is None
        server.reply(message, [floats(6)])
        assert values(pending.wait(5).buffers[0]) == [6]
        proxy.close()


def test_a_request_whose_reply_was_lost_is_delivered_again():
    with nodes() as (server, worker):
        proxy = Proxy(server.address)
        worker.introduce(SERVER, proxy.address)
        pending = worker.request(SERVER, "push", [floats(3)])
        message = server.receive(timeout=5)
        message._connection.channel.close()
        server.reply(message, [floats(6)])
        repeated = server.receive(timeout=5)
        assert repeated.sequence == message.sequence
        assert values(repeated.buffers[0]) == [3]
        server.reply(repeated, fields={"applied": "before"})
        assert pending.wait(5).fields == {"applied": "before"}
        proxy.close()


def test_a_lost_reply_without_tensors_is_resent_automatically():
    with nodes() as (server, worker):
        proxy = Proxy(server.address)
        worker.introduce(SERVER, proxy.address)
        pending = worker.request(SERVER, "lease")
        message = server.receive(timeout=5)
        message._connection.channel.close()
        server.reply(message, fields={"first": 8})
        assert server.receive(timeout=0.3) is None
        assert pending.wait(5).fields == {"first": 8}
        proxy.close()


def test_replies_are_kept_until_they_are_confirmed():
    """A lost reply is sent again, however many other requests were replied to, and none is kept forever."""
    with nodes() as (server, worker):
        proxy = Proxy(server.address)
        worker.introduce(SERVER, proxy.address)
        first = worker.request(SERVER, "lease")
        lost = server.receive(timeout=60)
        later = [worker.request(SERVER, "lease") for _ in range(100)]
        for number in range(100):
            server.reply(server.receive(timeout=60), fields={"number": number})
        assert [each.wait(60).fields["number"] for each in later] == list(range(100))
        pending = worker.request(SERVER, "lease")
        message = server.receive(timeout=60)
        assert len(message._connection.history.replies) == 100  # the first request has no reply yet
        message._connection.channel.close()
        for number, request in enumerate((lost, message)):
            server.reply(request, fields={"number": number})
        assert [each.wait(60).fields["number"] for each in (first, pending)] == [0, 1]
        last = worker.request(SERVER, "lease")
        message = server.receive(timeout=60)
        assert message.sequence > pending.header.sequence and message._connection.history.replies == {}
        server.reply(message)
        last.wait(60)
        proxy.close()


def test_requests_over_broken_connections_are_counted_exactly_once():
    with nodes() as (server, worker):
        proxy = Proxy(server.address)
        worker.introduce(SERVER, proxy.address)
        taken, stop = {}, threading.Event()

        def serve():
            while not stop.is_set():
                if (message := server.receive(timeout=0.05)) is not None:
                    taken.setdefault(message.sequence, message.fields["n"])
                    server.reply(message, message.buffers)

        def disturb():
            while not stop.wait(0.03):
                proxy.cut()

        threads = [threading.Thread(target=serve), threading.Thread(target=disturb)]
        for thread in threads:
            thread.start()
        try:
            for number in range(60):
                into = floats(*[0] * 5000)
                worker.request(SERVER, "push", [floats(*[number] * 5000)], [into], {"n": number}).wait(20)
                assert set(values(into)) == {number}
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert list(taken.values()) == list(range(60))
        proxy.close()


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("handled", [False, True], ids=["received", "handled"])
@pytest.mark.parametrize("buffers", [[], [floats(3)]], ids=["header", "bytes"])
def test_a_repeated_one_way_message_is_delivered_once(address, handled, buffers, monkeypatch):
    """The connection breaks after all of the message has arrived and before its sender knows."""
    heard, sent, send = [], [], Channel.send

    def arrived():
        assert server.receive(["another"], timeout=0.05) is None  # reads what has arrived
        return server.arrived or heard

    def breaks(channel, header, views=()):
        send(channel, header, views)
        if header.kind == "x":
            sent.append(header.sequence)
            if len(sent) == 1:
                while not arrived():
                    pass
                channel.close()
                raise ConnectionError

    with nodes(address) as (server, worker):
        if handled:
            server.handlers["x"] = heard.append
        monkeypatch.setattr(Channel, "send", breaks)
        worker.send(SERVER, "x", buffers)
        worker.send(SERVER, "last")
        if not handled:
            heard.append(server.receive(timeout=5))
        assert server.receive(timeout=5).kind == "last"
        assert [message.sequence for message in heard] == [1] and sent == [1, 1]
        assert [values(buffer) for buffer in heard[0].buffers] == [values(buffer) for buffer in buffers]
        assert worker.traffic.bytes_sent == 4 * len(buffers)


def test_messages_of_a_restarted_peer_are_not_repetitions():
    with nodes() as (server, worker):
        worker.send(SERVER, "x")
        assert server.receive(timeout=5).sequence == 1
        again = Transport(WORKER, KEY)
        again.introduce(SERVER, server.address)
        again.send(SERVER, "x")
        assert server.receive(timeout=5).sequence == 1
        again.close()


@few("address", ADDRESSES, quick=1)
def test_a_replacement_may_connect_before_the_death_is_reported(address):
    """The late report does not close its connection. Its sequence numbers begin above those before."""
    with nodes(address) as (server, worker):
        old = worker.request(SERVER, "push")
        unanswered = server.receive(timeout=5)
        with contextlib.closing(Transport(WORKER, KEY, TransportOptions(address, incarnation=1))) as again:
            again.introduce(SERVER, server.address)
            pending = again.request(SERVER, "push")
            message = server.receive(timeout=5)
            assert message.sequence == (1 << 40) + 1
            channel = server._links[WORKER].channel
            server.lost(WORKER, "its process ended")
            server.introduce(WORKER, again.address)
            time.sleep(LINGER + 0.3)
            assert server._links[WORKER].channel is channel and not channel.broken
            server.reply(message, fields={"version": 7})
            assert pending.wait(5).fields == {"version": 7}
            server.send(WORKER, "x")
            assert again.receive(timeout=5).kind == "x"
            server.reply(unanswered)  # goes to the first process, which in a real run would be dead
            old.wait(5)


def test_receive_before_returns_only_messages_that_arrived_earlier():
    """So a busy node can handle a notice at its place in the order of arrival."""
    with nodes() as (server, worker):
        worker.send(SERVER, "x", fields={"n": 1})
        while server.arrived < 1:
            server.receive(("y",), timeout=0.05)
        mark = server.arrived
        worker.send(SERVER, "x", fields={"n": 2})
        while server.arrived < 2:
            server.receive(("y",), timeout=0.05)
        assert server.receive(timeout=0, before=mark).fields["n"] == 1
        assert server.receive(timeout=0, before=mark) is None
        assert server.receive(timeout=0).fields["n"] == 2


def test_a_full_queue_holds_the_sender_back():
    with nodes(queue=3) as (server, worker):
        sent, payload = [], Buffer("uint8", memoryview(bytes(1 << 20)))

        def send():
            for number in range(40):
                worker.send(SERVER, "x", [payload], {"n": number})
                sent.append(number)

        thread = threading.Thread(target=send)
        thread.start()
        while len(server._inbox._messages) < 3:
            time.sleep(0.01)
        time.sleep(0.3)
        assert len(server._inbox._messages) == 3
        assert len(sent) < 10
        assert [server.receive(timeout=5).fields["n"] for _ in range(40)] == list(range(40))
        thread.join(5)


def test_losing_a_peer_ends_waits_with_an_error_that_names_it():
    with nodes() as (server, worker):
        worker.send(SERVER, "last words")
        pending = worker.request(SERVER, "push")
        threading.Timer(0.2, worker.lost, (SERVER, "its process ended")).start()
        expected = r"^worker 1 waited [0-3]\.\d\d s for server 0 to reply to 'push': server 0 is gone: its "
        expected += "process ended$"
        with pytest.raises(PeerLost, match=expected):
            pending.wait()
        with pytest.raises(
            PeerLost, match=r"worker 1 waited .* for server 0 to receive 'x': server 0 is gone"
        ):
            worker.send(SERVER, "x")
        server.lost(WORKER, "it left")
        assert server.receive(timeout=5).kind == "last words"
        worker.introduce(SERVER, server.address)
        worker.send(SERVER, "back")
        assert server.receive(["back"], timeout=5)


def test_the_loss_of_one_ends_no_wait_for_another():
    with nodes() as (server, worker):
        pending = worker.request(SERVER, "push")
        worker.lost(Peer("server", 1), "it never came")
        assert not pending.done
        server.reply(server.receive(timeout=5), fields={"applied": True})
        assert pending.wait(5).fields == {"applied": True}


def test_lost_ends_a_send_that_is_blocked():
    with nodes(queue=1) as (_, worker):
        threading.Timer(0.2, worker.lost, (SERVER, "it hangs")).start()
        with pytest.raises(PeerLost, match="it hangs"):
            while True:
                worker.send(SERVER, "x", [Buffer("uint8", memoryview(bytes(1 << 20)))])


def test_a_peer_that_is_not_there_yet_is_waited_for():
    with nodes() as (_, worker):
        sock, address = listen("unix:")
        sock.close()
        late = Peer("server", 1)
        worker.introduce(late, address)
        made = []
        timer = threading.Timer(0.2, lambda: made.append(Transport(late, KEY, TransportOptions(address))))
        timer.start()
        worker.send(late, "x")
        timer.join()
        assert made[0].receive(timeout=5).kind == "x"
        made[0].close()


def test_every_transport_wait_times_out_and_names_both_peers():
    with nodes(wait=0.2, queue=1) as (_, worker):
        for wait, whom in (
            (lambda: worker.request(SERVER, "pull").wait(), "server 0 to reply to 'pull'"),
            (lambda: worker.receive(["b", "a"]), "anyone to send 'a' or 'b'"),
            (
                lambda: [
                    worker.send(SERVER, "x", [Buffer("uint8", memoryview(bytes(1 << 22)))]) for _ in range(9)
                ],
                "server 0 to receive 'x'",
            ),
        ):
            with pytest.raises(WaitError, match=rf"^worker 1 waited \d\.\d\d s for {whom}"):
                wait()
        sock, address = listen("unix:")
        sock.close()
        worker.introduce(Peer("server", 1), address)
        with pytest.raises(WaitError, match=r"worker 1 waited .* for server 1 to receive 'x': .*refused"):
            worker.send(Peer("server", 1), "x")


def test_close_ends_all_waits():
    with nodes() as (_, worker):
        pending = worker.request(SERVER, "x")
        threading.Timer(0.1, worker.close).start()
        with pytest.raises(WaitError, match="worker 1 is closed"):
            worker.receive()
        with pytest.raises(WaitError, match="worker 1 is closed"):
            pending.wait()
        worker.close()
        with pytest.raises(WaitError, match="worker 1 is closed"):
            worker.send(SERVER, "x")


def test_request_memory_is_reused_only_after_the_reply():
    with nodes() as (server, worker):
        first, second = (worker.request(SERVER, "x", [floats(*[n] * 1000)]) for n in (1, 2))
        messages = [server.receive(timeout=5) for _ in range(2)]
        assert [values(m.buffers[0])[0] for m in messages] == [1, 2]
        memory = messages[0]._memory
        server.reply(messages[0])
        first.wait(5)
        third = worker.request(SERVER, "x", [floats(*[3] * 1000)])
        message = server.receive(timeout=5)
        assert message._memory is memory
        assert values(messages[1].buffers[0])[0] == 2
        for m in (messages[1], message):
            server.reply(m)
        second.wait(5)
        third.wait(5)


def test_a_reply_in_the_memory_of_its_request_keeps_it_until_it_is_confirmed():
    with nodes() as (server, worker):
        waiting, first = (worker.request(SERVER, "x", [floats(*[n] * 1000)]) for n in (1, 2))
        messages = [server.receive(timeout=60) for _ in range(2)]
        memory, history = messages[1]._memory, messages[1]._connection.history
        assert server.reply(messages[1], messages[1].buffers)
        first.wait(60)
        second = worker.request(SERVER, "x", [floats(*[3] * 1000)])  # confirms nothing, because one waits
        messages.append(server.receive(timeout=60))
        assert messages[2]._memory is not memory
        assert np.frombuffer(history.replies[first.header.sequence].views[0], np.float32)[0] == 2
        for message, pending in ((messages[0], waiting), (messages[2], second)):
            server.reply(message)
            pending.wait(60)
        third = worker.request(SERVER, "x", [floats(*[4] * 1000)])
        message = server.receive(timeout=60)
        assert first.header.sequence not in history.replies
        server.reply(message)
        third.wait(60)


def test_sockets_closed_during_the_handshake_are_ignored():
    with nodes() as (server, worker):
        for _ in range(5):
            socket.socket.close(dial(server.address))
        worker.send(SERVER, "x")
        assert server.receive(timeout=5).kind == "x"


@pytest.mark.parametrize("size", [2 << 20, 8 << 20])  # read as bytes arrive, and by its own thread
def test_a_slow_message_holds_up_nobody_else(size):
    """While the push of one worker arrives record by record, each pull of another gets its reply."""
    slow = Peer("worker", 2)
    with nodes("tcp:127.0.0.1:0") as (server, worker):
        identity = Identity(slow, "", os.urandom(16))
        channel = open_channel(dial(server.address), identity, KEY, dialed=True, where="the server")
        header = Header("push", 1, 0, True, "", {}, [Part("uint8", size)])
        records = 0
        for record in channel._writer.records([memoryview(encode(header)), memoryview(bytearray(size))]):
            if records:  # the push has begun, and is not complete
                pending = worker.request(SERVER, "pull")
                server.reply(server.receive(["pull"], timeout=30))
                pending.wait(30)
            channel._sock.sendall(record)
            records += 1
        assert records > 2
        assert server.receive(["push"], timeout=30).sender == slow
        channel.release()


@pytest.mark.parametrize("queue", [1, 2, 64])
def test_a_thread_waiting_for_another_kind_does_not_block_receives(queue):
    """While another thread waits for another kind, a flood of messages is received completely."""
    number = 2000
    with nodes(server={"queue": queue}) as (server, worker):
        other = threading.Thread(target=server.receive, args=(["other"],), kwargs={"timeout": 60})
        flood = threading.Thread(
            target=lambda: [worker.send(SERVER, "m", fields={"n": n}) for n in range(number)]
        )
        other.start()
        flood.start()
        assert [server.receive(["m"], timeout=10).fields["n"] for _ in range(number)] == list(range(number))
        worker.send(SERVER, "other")
        other.join(10)
        flood.join(10)
        assert not other.is_alive()


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_expected_message_is_received_into_its_buffer(address):
    with nodes(address) as (server, worker):
        place = Buffer("float32", memoryview(bytearray(4 * 100_000)))
        withdraw = server.expect(WORKER, "x", [place])
        first = worker.request(SERVER, "x", [floats(*[1] * 100_000)])
        message = server.receive(timeout=5)
        assert message.buffers[0].view is place.view and set(values(place)) == {1}
        server.reply(message)
        first.wait(5)
        withdraw()
        withdraw = server.expect(WORKER, "x", [place])
        other = worker.request(SERVER, "x", [floats(5)])  # does not fit
        message = server.receive(timeout=5)
        withdraw()
        assert values(message.buffers[0]) == [5] and set(values(place)) == {1}
        server.reply(message)
        other.wait(5)


@pytest.mark.parametrize("bulk", [False, True])
def test_a_withdrawn_receive_buffer_is_not_written_to(bulk):
    size = 1 << (23 if bulk else 20)
    with nodes("tcp:127.0.0.1", encrypt=False) as (server, _):
        place = Buffer("uint8", memoryview(bytearray(size)))
        withdraw = server.expect(Peer("worker", 2), "x", [place])
        identity = Identity(Peer("worker", 2), "", os.urandom(16))
        sock = dial(server.address)
        channel = open_channel(sock, identity, KEY, dialed=True, where="the server", encrypt=False)
        sock.settimeout(None)
        header = encode(Header("x", 1, wants_reply=True, parts=[Part("uint8", size)]))
        sock.sendall(header + b"a" * (size // 4))
        deadline = time.monotonic() + 5
        while place.view[size // 8] != ord("a") and time.monotonic() < deadline:
            time.sleep(0.01)
        withdraw()
        before = bytes(place.view)
        with contextlib.suppress(OSError):
            sock.sendall(b"b" * (size - size // 4))
        time.sleep(0.1)
        assert bytes(place.view) == before and before[0] == ord("a") and before[-1] == 0
        assert server.receive(timeout=0.1) is None
        channel.release()


@pytest.mark.parametrize("address", ADDRESSES)
def test_peers_sending_to_each_other_do_not_deadlock(address):
    """Both send more than the connection buffers, and none receives before all is sent."""
    with nodes(address) as (server, worker):
        worker.request(SERVER, "hello")
        server.reply(server.receive(timeout=5))
        payload = Buffer("uint8", memoryview(bytes(3 << 20)))
        requests = {}

        def send(one, other):
            requests[one] = [one.request(other, "x", [payload]) for _ in range(12)]

        threads = [threading.Thread(target=send, args=pair) for pair in ((server, WORKER), (worker, SERVER))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        for one in (server, worker):
            for _ in range(12):
                one.reply(one.receive(timeout=5))
        for pending in (*requests[server], *requests[worker]):
            pending.wait(5)


def test_a_message_that_stops_half_way_breaks_its_connection(monkeypatch):
    monkeypatch.setattr("polyrhythm.wire.receiver.STALL", 0.3)
    with nodes("tcp:127.0.0.1", encrypt=False) as (server, worker):
        identity = Identity(Peer("worker", 2), "", os.urandom(16))
        sock = dial(server.address)
        channel = open_channel(sock, identity, KEY, dialed=True, where="the server", encrypt=False)
        sock.sendall(encode(Header("x", 1, parts=[Part("uint8", 1 << 20)])) + bytes(1000))
        pending = worker.request(SERVER, "y")
        server.reply(server.receive(timeout=5))
        pending.wait(5)
        sock.settimeout(5)
        assert sock.recv(1) == b""  # the server closed the connection
        channel.release()
