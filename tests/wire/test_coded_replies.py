"""Coded replies over connections that break repeatedly: server and worker agree on what the worker has."""

import threading
import time

import torch
from test_pushes import Quiet
from test_transport import KEY, Proxy
from torch import nn

from polyrhythm.core.events import Applied, Delivered
from polyrhythm.core.peer import Peer
from polyrhythm.core.registry import parse
from polyrhythm.model.replica import Replica
from polyrhythm.model.shard import Shard
from polyrhythm.wire import Transport, TransportOptions
from tests.support.combine import few

WORKERS, SERVER, STEPS = [Peer("worker", 0), Peer("worker", 1)], Peer("server", 0), 40


def model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def slope(rank, step, count):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(count, generator=generator, dtype=torch.float64)


@few(
    "strategy",
    ["async+topk:0.05,dense=1d", "async+topk:0.05", "async+int4:dense=0", "async:prefetch=yes+topk:0.05"],
    quick=0,
)
def test_servers_and_workers_agree_though_coded_replies_are_lost(strategy):
    """Two workers push at once while connections break. The server's copy of each worker's parameters is
    exact, each push is applied once, and with the residuals all gradients are in the model."""
    chosen, total = parse(strategy), sum(part.numel() for part in model()[0].parameters())
    transports = {
        peer: Transport(peer, KEY, TransportOptions("tcp:127.0.0.1", wait=30)) for peer in (*WORKERS, SERVER)
    }
    proxy = Proxy(transports[SERVER].address)
    nodes = {peer: Quiet(peer, transports[peer], 0, time.monotonic()) for peer in transports}
    places = [("worker", peer.rank, (transports[peer].address, "", -1)) for peer in WORKERS]
    for node in nodes.values():
        node.meet([*places, ("server", 0, (proxy.address, "", -1))])
    shard = Shard(*model(), 0, 1, nodes[SERVER].memory.empty)
    served = chosen.server(nodes[SERVER], shard)
    replicas = [Replica(*model(), nodes[peer].memory.empty) for peer in WORKERS]
    done, failures, known = threading.Event(), [], {}

    def serve():
        with torch.no_grad():
            served.serve()

    def cut():
        while not done.wait(0.004):
            proxy.cut()

    def work(rank):
        node, replica = nodes[WORKERS[rank]], replicas[rank]
        try:
            with torch.no_grad():
                worker = chosen.worker(node, replica, node.everyone)
                worker.start()
                for step in range(1, STEPS + 1):
                    replica.gradient[0].copy_(slope(rank, step, total))
                    replica.steps = step
                    worker.step()
                replica.leaves_early = True  # so that it pushes its residual
                worker.finish()
            known[rank] = worker.servers.known[0].clone()
        except BaseException as error:
            failures.append(error)

    for replica in replicas:  # so that every parameter has a gradient
        for parameter in replica.layout.parameters:
            parameter.grad = torch.ones_like(parameter)
        replica.gradients.gather()
    server, cutter = threading.Thread(target=serve), threading.Thread(target=cut)
    workers = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    try:
        for thread in (server, cutter, *workers):
            thread.start()
        for thread in workers:
            thread.join()
    finally:
        done.set()
        cutter.join()
        while server.is_alive():  # a one-way message may be lost with its connection
            transports[WORKERS[0]].send(SERVER, "over")
            server.join(0.05)
        for transport in transports.values():
            transport.close()
        proxy.close()
    assert not failures
    events = nodes[SERVER].events
    applied = [(event.worker, event.sequence) for event in events if isinstance(event, Applied)]
    delivered = [each for each in events if isinstance(each, Delivered) and each.kind == "push"]
    assert len(applied) == len(set(applied)) == 2 * (STEPS + 1)  # each step and the residual
    assert len(delivered) > len(applied)  # otherwise nothing was repeated and this test shows nothing
    for rank in range(2):
        assert torch.equal(known[rank], served.coded.known[rank][0])
    begin = Replica(*model()).parameters[0]
    law = begin - 0.5 * sum(slope(rank, step, total) for rank in range(2) for step in range(1, STEPS + 1))
    assert (shard.parameters[0] - law).abs().max() < 1e-12 * law.abs().max() * STEPS
