"""Studies: index and comparison of runs, paired tests, power, sequential tests, verdicts."""
