"""A generative adversarial network on the digits: two models, two optimizers, three backward passes a step.

python examples/conversions/gan.py
polyrhythm run examples/conversions/gan.py --workers 2 --strategy async
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.data import digits

NOISE = 16


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())


def discriminator() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))


@torch.no_grad()
def distance(net: nn.Module, images: Tensor) -> float:
    """How far the pixels of generated digits are from the real ones, in mean and spread."""
    noise = torch.randn(1000, NOISE, generator=torch.Generator().manual_seed(0))
    fake, real = net.eval()(noise), images.flatten(1)
    apart = (fake.mean(0) - real.mean(0)).abs() + (fake.std(0) - real.std(0)).abs()
    return apart.mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    session = pr.init()
    train_set, test_set = digits()
    images = test_set.tensors[0]
    net_g, net_d = generator(), discriminator()
    opt_d = torch.optim.Adam(net_d.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_g = torch.optim.Adam(net_g.parameters(), lr=1e-3, betas=(0.5, 0.999))
    loader = DataLoader(train_set, batch_size=32, shuffle=True)
    net_g, net_d, opt_g, opt_d, loader = session.prepare(net_g, net_d, opt_g, opt_d, loader)
    for epoch in range(args.epochs):
        for x, _ in loader:
            real, ones, zeros = x.flatten(1), torch.ones(len(x), 1), torch.zeros(len(x), 1)
            net_d.zero_grad()
            F.binary_cross_entropy_with_logits(net_d(real), ones).backward()
            fake = net_g(torch.randn(len(x), NOISE))
            F.binary_cross_entropy_with_logits(net_d(fake.detach()), zeros).backward()
            opt_d.step()
            net_g.zero_grad()
            F.binary_cross_entropy_with_logits(net_d(fake), ones).backward()
            opt_g.step()
        trained, _ = session.consensus()
        session.log(epoch=epoch, distance=distance(trained, images))


if __name__ == "__main__":
    main()
