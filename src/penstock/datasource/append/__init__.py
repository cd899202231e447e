"""`df.write.format("penstock")`: append the rows of a Spark job to a user collection."""
