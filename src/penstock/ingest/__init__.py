"""From a source, over the reclock, into persist."""
