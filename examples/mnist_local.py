"""Trains a small network on scikit-learn's handwritten digits, in one process: `python mnist_local.py --epochs 10`."""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs

    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train, test = torch.utils.data.random_split(data, [1437, 360])

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(train, batch_size=64, shuffle=True)

    for epoch in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")

    inputs, targets = next(iter(DataLoader(test, batch_size=len(test))))
    print(f"test accuracy {(model(inputs).argmax(1) == targets).float().mean():.1%}")


if __name__ == "__main__":
    main()
