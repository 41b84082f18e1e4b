"""What contributions and pulled values may be made of to need fewer bytes, by name. Pure functions and values."""
