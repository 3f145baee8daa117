"""A strategy and a codec of your own, defined in the training script.

python examples/own_strategy.py --epochs 5
polyrhythm run examples/own_strategy.py --workers 4 --strategy bmuf:8,momentum=0.3+turns:2 -- --epochs 10
polyrhythm simulate examples/own_strategy.py --workers 16 --strategy bmuf -- --epochs 10
polyrhythm strategies examples/own_strategy.py
"""

import argparse
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.data import digits
from polyrhythm.model.vectors import cloned, copied, difference


@dataclass(frozen=True)
class BlockMomentum(pr.Strategy):
    """Local SGD with a momentum over rounds (blockwise model-update filtering).

    Every `period` steps: g = mean_i(w_i) - w, d <- momentum * d + g, w <- w + d; all w_i become w.
    """

    name = "bmuf"
    main = "period"
    codecs = True
    exchanges = "updates"  # a codec compresses the change of parameters, not gradients
    paper = "Chen, Huo 2016, Scalable Training of Deep Learning Machines by Incremental Block Training"

    period: int = 8
    momentum: float = 0.5

    def __post_init__(self):
        if self.period < 1 or not 0 <= self.momentum < 1:
            raise pr.UsageError("period must be 1 or more, and momentum at least 0 and below 1")

    @property
    def traits(self):
        return pr.Traits(lockstep=True, sync_period=self.period)

    def worker(self, node, replica, group):
        return BlockMomentumWorker(self, node, replica, group)


class BlockMomentumWorker(pr.Worker):
    def __init__(self, strategy, node, replica, group):
        super().__init__(strategy, node, replica, group)
        self.reducer = pr.MeanReducer(strategy.codec, node, replica, group)
        self.w, self.d, self.g = replica.buffer(), replica.buffer(), replica.buffer()
        self.local_steps = 0

    def step(self):
        if self.local_steps == 0:
            copied(self.replica.parameters, self.w)
        self.replica.apply()
        self.local_steps += 1
        if self.local_steps == self.strategy.period:
            self.synchronize()

    def synchronize(self, full=False):
        copied(self.outer_step(self.d, full), self.replica.parameters)
        self.local_steps = 0

    def outer_step(self, momentum, full):
        """The new w; `full`: exchange without the codec, at the end of training."""
        self.reducer.check_update()  # a codec would hide a parameter that is not finite
        self.reducer.mean(difference(self.replica.parameters, self.w, self.g), full=full)
        triples = zip(self.w, momentum, self.g, strict=True)
        return [w + d.mul_(self.strategy.momentum).add_(g) for w, d, g in triples]

    def finish(self):
        if self.local_steps:
            self.synchronize(full=True)

    def consensus(self, final=False):
        return self.outer_step(cloned(self.d), True) if self.local_steps else self.replica.parameters

    def state_dict(self):
        vectors = [cloned(each) for each in (self.replica.parameters, self.w, self.d)]
        return {"vectors": vectors, "steps": self.local_steps, "reducer": self.reducer.state_dict()}

    def load_state_dict(self, state):
        for saved, vectors in zip(state["vectors"], (self.replica.parameters, self.w, self.d), strict=True):
            copied(saved, vectors)
        self.local_steps = state["steps"]
        self.reducer.load_state_dict(state["reducer"])


@dataclass(frozen=True)
class Turns(pr.Codec):
    """Sends every `parts`-th number, another part in each step; with `feedback` the others are sent later."""

    name = "turns"
    main = "parts"
    reduction = pr.Reduction.SUM  # all workers send the same part, so their codes can be averaged

    parts: int = 4
    feedback: bool = field(default=True, kw_only=True)

    def encode(self, values, state):
        turn = state.count % self.parts
        return torch.cat([values.new_tensor([turn]), values[turn :: self.parts]])

    def decode(self, code, into, scale=1.0):
        turn = round(code[0].item()) if len(code) else -1
        if turn not in range(self.parts) or len(code) - 1 != len(into[turn :: self.parts]):
            raise pr.WireError(f"a code of {len(code)} numbers does not fit a vector of {len(into)}")
        into[turn :: self.parts].add_(code[1:], alpha=scale)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    session = pr.init(strategy=BlockMomentum(period=4))  # --strategy overrides it
    train_set, test_set = digits()
    model = nn.Sequential(nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(train_set, batch_size=32, shuffle=True)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for epoch in range(args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        images, labels = test_set.tensors
        right = session.consensus().eval()(images).argmax(1) == labels
        session.log(epoch=epoch, accuracy=right.float().mean().item())


if __name__ == "__main__":
    main()
