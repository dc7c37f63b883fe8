"""Conversion of corpora to memory-mapped Arrow shards, and inspection of corpora."""
