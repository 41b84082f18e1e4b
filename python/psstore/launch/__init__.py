"""Starts a store and its workers together, and ends them together, whatever happens."""
