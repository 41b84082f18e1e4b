"""Pushes and pulls in fewer bytes: what codecs keep from call to call."""
