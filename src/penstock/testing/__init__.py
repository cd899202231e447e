"""For tests, ours and yours: clocks that obey, stores that fail, what a connector must keep."""
