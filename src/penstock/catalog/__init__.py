"""Names, and what they name: which objects a lake holds, and how each of them is."""
