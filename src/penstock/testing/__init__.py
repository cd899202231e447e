"""For tests, ours and yours: clocks that obey and stores that fail on request."""
