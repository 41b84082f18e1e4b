"""The only sockets of psstore: the event loop, addresses, and the drivers of the sans-IO machines."""
