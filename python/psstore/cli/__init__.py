"""The command line: one module per program or command."""
