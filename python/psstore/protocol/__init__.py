"""The protocol as state machines: messages and a time in, messages out. No sockets, no clock, no threads.

Sockets drive them in production (psstore.net), a seeded simulator in tests.
"""
