"""Models whose layers are divided in the tests of tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, LENGTH, WORDS = 16, 4, 6, 11


class Attention(nn.Module):
    """Causal attention with one projection to queries, keys and values (nanoGPT), and a scale by head."""

    def __init__(self, written_out: bool = False, viewed: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, HEADS).view(HEADS, 1, 1))
        self.register_buffer("causal", torch.tril(torch.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH))
        self.written_out, self.viewed, self.dropout = written_out, viewed, dropout

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.size()
        if self.viewed:
            q, k, v = self.c_attn(x).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        else:
            pieces = self.c_attn(x).split(width, dim=2)
            q, k, v = (each.view(rows, length, HEADS, width // HEADS).transpose(1, 2) for each in pieces)
        q = q * self.scale
        if self.written_out:
            scores = (q @ k.transpose(-2, -1)) * k.size(-1) ** -0.5
            scores = scores.masked_fill(self.causal[:, :, :length, :length] == 0, float("-inf"))
            y = F.dropout(F.softmax(scores, dim=-1), self.dropout, self.training) @ v
        else:
            y = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
            )
        return self.c_proj(y.transpose(1, 2).contiguous().view(rows, length, width))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), Attention(**options)
        self.ln_2, self.fc, self.proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.proj(F.gelu(self.fc(self.ln_2(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A small nanoGPT."""

    def __init__(self, tied: bool = True, **options: Any) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block(**options) for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(x)  # type: ignore[no-any-return]


class Separate(nn.Module):
    """Separate projections, and attention by einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weights = torch.einsum("bhld,bhsd->bhls", q, k).softmax(-1)
        return x + self.out(torch.einsum("bhls,bhsd->bhld", weights, v).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """A gated MLP with a whole vector in the divided region, and matrices as in GPT-2 of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24, bias=False)
        self.factor = nn.Parameter(torch.linspace(0.5, 1.5, 24))
        self.down = nn.Parameter(torch.randn(24, WIDTH) / 5)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.gate(x)) * self.up(x) * self.factor
        return torch.addmm(self.bias, h.view(-1, h.size(-1)), self.down).view(x.shape)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 24), nn.ReLU(inplace=True), nn.Linear(24, WIDTH), nn.Tanh(),
        nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, 8), nn.Linear(8, WORDS),
    )  # fmt: skip


def encoder(batch_first: bool = True, dropout: float = 0.0) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, dropout, batch_first=batch_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first)


def tokens(rows: int) -> Tensor:
    return torch.randint(WORDS, (rows, LENGTH))


def vectors(rows: int) -> Tensor:
    return torch.randn(rows, LENGTH, WIDTH).double()


MODELS = {
    "mlp": (mlp, vectors),
    "encoder": (encoder, vectors),
    "sequence first": (lambda: encoder(batch_first=False), vectors),
    "gpt": (GPT, tokens),
    "gpt, untied": (lambda: GPT(tied=False), tokens),
    "gpt, written out": (lambda: GPT(written_out=True), tokens),
    "gpt, viewed": (lambda: GPT(viewed=True), tokens),
    "separate": (Separate, vectors),
    "gated": (Gated, vectors),
}
