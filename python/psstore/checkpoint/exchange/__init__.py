"""Checkpoints to and from the formats of others: safetensors, torch's own files, torch.distributed.checkpoint.

A model is whole in memory here, and numpy's; a store reads and writes checkpoints without this folder.
"""
