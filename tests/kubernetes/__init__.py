"""A stand-in for a Kubernetes cluster of one node: it runs what `psstore kubernetes render` prints, as processes with
namespaces of their own, and evicts pods of a training, which must end with the bytes of the undisturbed one.

    python -m tests.kubernetes --evictions 200
"""
