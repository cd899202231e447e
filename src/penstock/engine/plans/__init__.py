"""What becomes of a plan after it was handed out: how long it lives, and how it fails."""
