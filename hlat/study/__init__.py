"""Statistics of studies: comparisons paired by seed, power, and sequential tests."""
