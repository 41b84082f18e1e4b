"""The contestants of `gpu`'s training steps: a transformer's forward and backward pass, and its optimizer's step,
by torch's fused AdamW or by a store on the same GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from bench.gpu_timing import Bench, Launch


@dataclass(frozen=True)
class Shape:
    num_layers: int
    width: int
    num_heads: int
    vocabulary: int
    context: int
    batch: int

    def __str__(self) -> str:
        return f"{self.num_layers} layers of {self.width}, {self.batch} × {self.context} tokens"


GPT2_SMALL = Shape(num_layers=12, width=768, num_heads=12, vocabulary=50304, context=1024, batch=8)
"""124 M parameters (Radford 2019), the vocabulary rounded up to a multiple of 64."""

TINY = Shape(num_layers=1, width=16, num_heads=2, vocabulary=64, context=8, batch=2)


class Transformer(nn.Module):
    """Tokens → loss of the next one. Embedding and head share their weight."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        layer = nn.TransformerEncoderLayer(
            shape.width, shape.num_heads, 4 * shape.width, dropout=0.0, activation="gelu", batch_first=True,
            norm_first=True,
        )  # fmt: skip
        self.layers = nn.TransformerEncoder(layer, shape.num_layers, nn.LayerNorm(shape.width), False)
        mask = nn.Transformer.generate_square_subsequent_mask(shape.context)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.layers(self.tokens(tokens) + self.places(places), mask=self.mask, is_causal=True)
        logits = functional.linear(hidden[:, :-1], self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def training_step(bench: Bench, shape: Shape, make_optimizer: MakeOptimizer) -> Launch:
    """Forward, backward, step, in bfloat16 by autocast, on the same tokens as everybody else."""
    torch.manual_seed(0)
    model = Transformer(shape).to(bench.torch_device)
    optimizer = make_optimizer(model)
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.context), device=bench.torch_device)

    def launch() -> torch.Tensor:
        with torch.autocast(bench.torch_device.type, torch.bfloat16):
            loss: torch.Tensor = model(tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return launch


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
