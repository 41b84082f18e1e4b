"""Arrays in the memory of devices, and their ways to and from the store."""
