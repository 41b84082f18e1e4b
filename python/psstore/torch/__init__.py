"""Trains PyTorch models on a store: `psstore.torch.DistributedOptimizer`."""

from psstore.torch.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
