"""Stores on a Ray cluster whose nodes are processes of this machine, each with a loopback address of its own: what
listens on one is not found on another. `python -m tests.ray` kills nodes under a training."""
