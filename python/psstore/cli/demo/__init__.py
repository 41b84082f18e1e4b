"""`psstore demo`: trains a small network on real handwritten digits, through a real store, in front of the user."""
