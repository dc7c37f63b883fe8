"""Runs of NeuronX Distributed Training (NxDT), from the YAML of one to overrides of hlat."""
