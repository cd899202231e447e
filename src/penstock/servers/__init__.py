"""Local servers for the demo, the tests, the examples and the benchmarks."""
