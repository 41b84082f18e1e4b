"""What can be measured: each module is a command, `python -m bench.<name>` from the root of the repository."""
