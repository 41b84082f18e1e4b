"""Which psstore this is. The package's metadata have it from here."""

__version__ = "0.1.0"
