"""Messages on the simulator's own network: when does each arrive?"""

from __future__ import annotations

from polyrhythm.core.message import Message
from polyrhythm.core.peer import Peer
from polyrhythm.worlds.cost_model import CostModel
from polyrhythm.worlds.simulated.fibers import Loop
from polyrhythm.worlds.simulated.network import Network

Place = tuple[str, int]  # role and rank


def arrivals(costs: CostModel, *messages: tuple[Place, Place, int, float]) -> list[float]:
    """When the last byte of each message arrives; of each its source, target, bytes and when it is sent.

    Messages that are sent at the same time are sent in the given order.
    """
    loop, found = Loop(), dict[int, float]()
    network = Network(loop, costs)

    def arrive(message: Message) -> None:
        found[message.sequence] = loop.now

    def send(number: int) -> None:
        source, target, nbytes, _ = messages[number]
        network.carry(source, target, nbytes, arrive, Message(Peer(*source), "test", number))

    for number, (*_, moment) in enumerate(messages):
        loop.at(moment, send, number)
    loop.run(until=lambda: False)
    return [found[number] for number in range(len(messages))]
