"""A store and its workers as Kubernetes has them: the objects of `psstore kubernetes render`.

A shard is a pod of a StatefulSet, whose number is the shard's; with standbys there are twice as many, of which the
second half stand by for the first. A worker is a pod of an Indexed Job in a JobSet, whose index is its rank, so that
the pod that comes in place of another takes that one's rank. charts/psstore makes the same objects with Helm.
"""
