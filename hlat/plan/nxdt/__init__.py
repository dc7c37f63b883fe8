"""Translation of NeuronX Distributed Training (NxDT) configurations to overrides of hlat."""
