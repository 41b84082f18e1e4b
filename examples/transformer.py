"""A small GPT that learns to write Python, letter by letter, from the standard library's own source.

    psstore run --shards 2 --workers 2 examples/transformer.py [--quick]

Each worker reads windows of its own from the text. AdamW's state, twice the size of the model, lives in the store;
the norm that is clipped is that of the average over the workers.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import nn

import psstore

NUM_CHARS = 128
"""ASCII; other letters are left out."""


class Block(nn.Module):
    """Attention to what came before, then two linear layers, each added to what goes through."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm1(x))
        result: torch.Tensor = x + self.contract(nn.functional.gelu(self.expand(self.norm2(x))))
        return result

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.query_key_value(x).view(batch, length, 3 * self.num_heads, -1).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: torch.Tensor = self.project(seen.transpose(1, 2).reshape(batch, length, width))
        return mixed


class Gpt(nn.Module):
    """Scores for the next letter at each place; the last layer's weights are those of the first."""

    def __init__(self, *, width: int, num_blocks: int, num_heads: int, length: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(NUM_CHARS, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_CHARS, bias=False)
        self.apply(self._start)
        self.head.weight = self.letters.weight

    @staticmethod
    def _start(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        places = torch.arange(letters.shape[1])
        scores: torch.Tensor = self.head(self.norm(self.blocks(self.letters(letters) + self.places(places))))
        return scores


def standard_library() -> torch.Tensor:
    """The source of its modules, as one long row of ASCII codes."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = "".join(path.read_text(encoding="utf-8", errors="ignore") for path in sorted(folder.glob("*.py")))
    return torch.tensor(list(text.encode("ascii", errors="ignore")))


def windows(text: torch.Tensor, count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Letters at random places, and for each letter the one after it; both (count, length)."""
    chosen = torch.stack([text[start : start + length + 1] for start in torch.randint(len(text) - length, (count,))])
    return chosen[:, :-1], chosen[:, 1:]


@torch.no_grad()
def continuation(model: nn.Module, start: str, *, num_chars: int, length: int) -> str:
    letters = torch.tensor([list(start.encode("ascii"))])
    for _ in range(num_chars):
        likely = (model(letters[:, -length:])[:, -1] / 0.8).softmax(dim=1)
        letters = torch.cat([letters, torch.multinomial(likely, 1)], dim=1)
    return bytes(letters[0].tolist()).decode("ascii")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps")
    quick = parser.parse_args().quick
    length, num_steps = (32, 60) if quick else (128, 600)

    store = psstore.connect()
    model = Gpt(width=48 if quick else 128, num_blocks=2 if quick else 4, num_heads=4, length=length)
    optimizer = psstore.torch.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=3e-3 if quick else 1e-3, betas=(0.9, 0.99), weight_decay=0.1),
        store,
        named_parameters=model.named_parameters(),
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=num_steps, pct_start=0.1)
    text = standard_library()
    torch.manual_seed(1 + (store.rank or 0))  # the model starts alike everywhere; the windows are each worker's own

    for step in range(1, num_steps + 1):
        letters, following = windows(text, 32 // store.num_workers, length)
        loss = nn.functional.cross_entropy(model(letters).flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        if step == 1 or step % (num_steps // 10) == 0:
            bits = loss.item() / math.log(2)
            print(f"step {step}: loss {loss.item():.3f}, {bits:.2f} bits per letter, norm {norm.item():.2f}")

    if store.rank == 0:
        print(continuation(model, "def ", num_chars=60 if quick else 400, length=length))
    store.close()


if __name__ == "__main__":
    main()
