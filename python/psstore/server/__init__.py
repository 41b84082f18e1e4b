"""The store's processes: a supervisor, and one process per shard."""
