"""Configuration and node scripts of AWS ParallelCluster."""
