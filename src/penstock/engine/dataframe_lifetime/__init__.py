"""Lifetime and errors of the plan of a DataFrame after it was returned to the user."""
