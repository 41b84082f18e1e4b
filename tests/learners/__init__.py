"""Learners of DiLoCo that are killed at seeded moments, and leaders of shards with them: what each learner has pushed
is found in the store's values, in the one decision that counted it. `python -m tests.learners --kills 1000` does so for
long."""
