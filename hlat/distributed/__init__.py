"""Ranks, device mesh, process groups, parameter shards and pipeline stages."""
