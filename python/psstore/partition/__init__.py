"""How tensors are cut into slices, placed on shards and packed into frames. Pure functions."""
