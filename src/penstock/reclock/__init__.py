"""A source's own time, translated into ours."""
