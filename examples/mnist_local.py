"""The network of PyTorch's MNIST example, in one process: `python mnist_local.py [--data-dir DIR] [--epochs 10]`.

Without a directory of MNIST's files it trains on scikit-learn's handwritten digits, of 8x8 pixels.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from psstore.cli.demo.data import load


class Net(nn.Module):
    """Two convolutions, a pooling, two linear layers, with dropout between."""

    def __init__(self, image_size: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.fc1 = nn.Linear(64 * ((image_size - 4) // 2) ** 2, 128)
        self.dropout2 = nn.Dropout(0.5)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = nn.functional.relu(self.conv1(images))
        x = nn.functional.relu(self.conv2(x))
        x = self.dropout1(nn.functional.max_pool2d(x, 2)).flatten(1)
        x = self.dropout2(nn.functional.relu(self.fc1(x)))
        scores: torch.Tensor = self.fc2(x)
        return scores


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", help="MNIST's four IDX files")
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    torch.manual_seed(0)
    digits = load(args.data_dir)
    train = TensorDataset(digits.train_images, digits.train_labels)

    model = Net(digits.image_size)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(train, batch_size=64, shuffle=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.8)

    for epoch in range(args.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        scheduler.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")

    model.eval()
    print(f"test accuracy {(model(digits.test_images).argmax(1) == digits.test_labels).float().mean():.1%}")


if __name__ == "__main__":
    main()
