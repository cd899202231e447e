"""Foreign systems, each read in its own time."""
