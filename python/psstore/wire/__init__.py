"""Frames and messages: bytes to values and back. The codec of frames is C++ (csrc/wire)."""
