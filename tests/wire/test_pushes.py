"""A parameter server over TCP whose connections break repeatedly: each push is applied exactly once."""

import threading
import time

import torch
from test_transport import KEY, Proxy
from torch import nn

from polyrhythm.core.events import Applied, Delivered
from polyrhythm.core.peer import Peer
from polyrhythm.core.registry import parse
from polyrhythm.model.replica import Replica
from polyrhythm.model.shard import Shard
from polyrhythm.wire import Transport, TransportOptions
from polyrhythm.worlds.processes.node import ProcessNode
from tests.support.combine import few

WORKER, SERVER = Peer("worker", 0), Peer("server", 0)


class Quiet(ProcessNode):
    """Keeps its events, because there is no coordinator."""

    def __init__(self, *args):
        super().__init__(*args)
        self.events = []

    def log(self, event):
        self.events.append(event)


def point():
    model = nn.ParameterList([torch.zeros(1000)])
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


@few("strategy", ["async", "sync", "softsync:1,pull=next-version", "easgd:1,alpha=0.5"], quick=1)
def test_pushes_survive_cuts_and_count_once(strategy):
    chosen, pushes = parse(strategy), 60
    transports = {
        peer: Transport(peer, KEY, TransportOptions("tcp:127.0.0.1", wait=30)) for peer in (WORKER, SERVER)
    }
    proxy = Proxy(transports[SERVER].address)
    server, worker = (Quiet(peer, transports[peer], 0, time.monotonic()) for peer in (SERVER, WORKER))
    for node in (server, worker):
        node.meet(
            [("worker", 0, (transports[WORKER].address, "", -1)), ("server", 0, (proxy.address, "", -1))]
        )
    shard, replica = Shard(*point(), 0, 1, server.memory.empty), Replica(*point(), worker.memory.empty)
    replica.layout.parameters[0].grad = torch.ones(1000)
    replica.gradients.gather()
    done = threading.Event()

    def serve():
        with torch.no_grad():
            chosen.server(server, shard).serve()

    def cut():
        while not done.wait(0.004):
            proxy.cut()

    threads = [threading.Thread(target=serve), threading.Thread(target=cut)]
    try:
        for thread in threads:
            thread.start()
        with torch.no_grad():
            trainer = chosen.worker(worker, replica, worker.everyone)
            trainer.start()
            for _ in range(pushes):
                replica.steps += 1
                trainer.step()
    finally:
        done.set()
        threads[1].join()
        while threads[0].is_alive():  # a one-way message may be lost with its connection
            worker.transport.send(SERVER, "over")
            threads[0].join(0.05)
        for transport in transports.values():
            transport.close()
        proxy.close()
    applied = [event.sequence for event in server.events if isinstance(event, Applied)]
    delivered = [each for each in server.events if isinstance(each, Delivered) and each.kind == "push"]
    assert shard.version == pushes == len(applied) == len(set(applied))
    assert len(delivered) > pushes  # otherwise nothing was repeated and this test shows nothing
    if chosen.name == "easgd":  # the center gains what the worker loses
        assert torch.equal(replica.parameters[0] + shard.parameters[0], torch.full((1000,), -float(pushes)))
    else:
        assert torch.equal(shard.parameters[0], torch.full((1000,), -float(pushes)))
        assert torch.equal(replica.parameters[0], shard.parameters[0])
