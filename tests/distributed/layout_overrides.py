"""Overrides of layouts that tests of the doctor share."""

MICRO = "batch.micro_batch_size=2 batch.global_batch_size=8"
SP = "parallelism.tp=2 parallelism.sequence_parallel=true"
DP, TP, KV = "parallelism.dp=2", "parallelism.tp=2", "parallelism.tp=4"
HSDP = "parallelism.dp=4 parallelism.zero=3 parallelism.dp_replicate=2"
PP = f"parallelism.pp=2 {MICRO}"
EP = "model=mixtral_tiny parallelism.ep=2 parallelism.dp=2"
EP_DP = "model=mixtral_tiny parallelism.ep=2 parallelism.dp=4"
