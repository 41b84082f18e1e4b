"""Checkpoints on storage: their format, and how they are written, listed, verified, read, exported and imported.

docs/checkpoints.md draws the format and says what it promises. Nothing here knows of shards that run, connections or
clients: a writer is given buffers and plain records, a reader is given memory to fill.
"""
