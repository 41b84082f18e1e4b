"""Trains PyTorch models on a store: `psstore.torch.DistributedOptimizer`."""

from psstore.codec.compression import Compression
from psstore.torch.optimizer import DistributedOptimizer
from psstore.torch.replicas import Replicas
from psstore.torch.scaler import GradScaler

__all__ = ["Compression", "DistributedOptimizer", "GradScaler", "Replicas"]
