"""`df.write.format("penstock")`: a job that appends to a collection of the user's own."""
