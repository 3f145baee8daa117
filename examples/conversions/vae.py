"""A variational autoencoder on the digits, with a loss that is summed over the batch.

python examples/conversions/vae.py
polyrhythm run examples/conversions/vae.py --workers 2 --strategy allreduce
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import polyrhythm as pr
from polyrhythm.data import digits


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.mean, self.spread = nn.Linear(64, 8), nn.Linear(64, 8)
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.spread(hidden)
        noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
        return self.decoder(mean + noise * (log_variance / 2).exp()), mean, log_variance


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Reconstruction and divergence, per image."""
    pixels = x.flatten(1)
    made, mean, log_variance = model(pixels)
    reconstruction = F.mse_loss(made, pixels, reduction="sum")
    divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum()
    return (reconstruction + 0.05 * divergence) / len(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    session = pr.init()
    train_set, test_set = digits()
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = DataLoader(train_set, batch_size=32, shuffle=True)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for epoch in range(args.epochs):
        model.train()
        for x, _ in loader:
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
        with torch.no_grad():
            session.log(epoch=epoch, loss=loss_of(session.consensus().eval(), test_set.tensors[0]).item())


if __name__ == "__main__":
    main()
