"""Trains PyTorch models on a store: `psstore.torch.DistributedOptimizer`, and `psstore.torch.session` around it."""

try:
    from psstore.codec.compression import Compression
    from psstore.torch.conversion import embeddings_in_store
    from psstore.torch.delayed_nesterov import DelayedNesterov
    from psstore.torch.diloco import DiLoCo
    from psstore.torch.elastic_sampler import ElasticSampler
    from psstore.torch.embedding import Embedding
    from psstore.torch.embedding_bag import EmbeddingBag
    from psstore.torch.follower import Follower
    from psstore.torch.hooks import Hook
    from psstore.torch.loop import Step, TrainingSession, session
    from psstore.torch.optimizer import DistributedOptimizer
    from psstore.torch.parts import TensorPart
    from psstore.torch.publishing import load, publish
    from psstore.torch.replicas import Replicas
    from psstore.torch.resumable_loader import ResumableLoader
    from psstore.torch.scaler import GradScaler
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError("psstore.torch needs PyTorch: pip install 'psstore[torch]'", name="torch") from None

__all__ = [
    "Compression",
    "DelayedNesterov",
    "DiLoCo",
    "DistributedOptimizer",
    "ElasticSampler",
    "Embedding",
    "EmbeddingBag",
    "Follower",
    "GradScaler",
    "Hook",
    "Replicas",
    "ResumableLoader",
    "Step",
    "TensorPart",
    "TrainingSession",
    "embeddings_in_store",
    "load",
    "publish",
    "session",
]
