"""Trains PyTorch models on a store: `psstore.torch.DistributedOptimizer`."""

from psstore.torch.optimizer import DistributedOptimizer
from psstore.torch.replicas import Replicas

__all__ = ["DistributedOptimizer", "Replicas"]
