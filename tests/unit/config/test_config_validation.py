"""Every rule rejects exactly its violations, with the key, the two values and a remedy."""

from collections.abc import Callable

import pytest
from omegaconf import DictConfig

from hlat.config.config_errors import ConfigError
from hlat.config.resolve import resolve_config

Compose = Callable[..., DictConfig]

REFUSED = [
    (
        ["profiler.steps=[5,41]", "run.steps=40"],
        "profiler.steps contains 41, and the run ends at step 40; use steps from 1 to 40",
    ),
    (["profiler.steps=[0]"], "profiler.steps.0=0 is too small; use 1 or more"),
    (
        ["profiler.steps=[5]", "profiler.ranks=[0,1]"],
        "profiler.ranks contains 1, and the run has 1 process; use ranks from 0 to 0",
    ),
    (
        ["profiler.steps=[5]", "profiler.ranks=[4]", "parallelism.tp=2", "parallelism.dp=2"],
        "profiler.ranks contains 4, and the run has 4 processes; use ranks from 0 to 3",
    ),
    (["profiler.steps=[5]", "profiler.ranks=[-1]"], "profiler.ranks.0=-1 is too small"),
    (
        ["profiler.steps=[5]", "profiler.ranks=[]"],
        "profiler.ranks is empty, and profiler.steps is not; use profiler.ranks=[0]",
    ),
    (
        ["profiler.steps=[5]", "engine=nxd"],
        "profiler.steps=[5] is not supported by engine=nxd: torch.profiler records the tracing of a "
        "graph, not its execution on the device; use neuron-profile, engine=native, or "
        "profiler.steps=[]",
    ),
    (
        ["batch.global_batch_size=10", "batch.micro_batch_size=4"],
        "batch.global_batch_size=10 is not a multiple of batch.micro_batch_size=4 x dp=1; "
        "use batch.micro_batch_size 1, 2, 5 or 10, or batch.global_batch_size=8",
    ),
    (
        ["model.num_attention_heads=32", "model.num_key_value_heads=32", "parallelism.tp=6"],
        "parallelism.tp=6 does not divide model.num_attention_heads=32; use 1, 2, 4, 8, 16 or 32",
    ),
    (
        [
            "model=70b",
            "parallelism.tp=16",
            "model.num_key_value_heads=32",
            "model.num_attention_heads=32",
            "parallelism.tp=32",
            "model.num_key_value_heads=8",
            "model.intermediate_size=1001",
        ],
        "parallelism.tp=32 does not divide model.intermediate_size=1001; use 1, 7, 11, 13, 77, 91, 143 or 1001",
    ),
    (
        [
            "model.num_attention_heads=12",
            "model.hidden_size=96",
            "model.num_key_value_heads=4",
            "parallelism.tp=6",
        ],
        "parallelism.tp=6 is neither a divisor nor a multiple of model.num_key_value_heads=4; use 1, 2, 4 or 12",
    ),
    (
        ["model.num_attention_heads=5"],
        "model.num_attention_heads=5 does not divide model.hidden_size=128; use 1, 2, 4, 8, 16, 32, 64 or 128",
    ),
    (
        ["model.num_key_value_heads=3"],
        "model.num_key_value_heads=3 does not divide model.num_attention_heads=4; use 1, 2 or 4",
    ),
    (
        ["model.num_attention_heads=128", "model.num_key_value_heads=1"],
        "a head size of 1 x model.rope.partial_rotary_factor=1 is 1",
    ),
    (["parallelism.sequence_parallel=true"], "needs parallelism.tp > 1; set it to false"),
    (
        [
            "compiler=neuron_2_28",
            "+compiler.environment.NEURON_EXPERIMENTAL_COMPRESS_RG='1'",
            "parallelism.tp=4",
        ],
        "compiler.environment.NEURON_EXPERIMENTAL_COMPRESS_RG=1 needs tensor-parallel groups of "
        "consecutive ranks",
    ),
    (
        [
            *("engine=nxd", "hardware=trn1_32xl", "compiler=neuron_2_28", "parallelism.tp=4"),
            *("parallelism.pp=2", "batch.global_batch_size=16", "batch.micro_batch_size=2"),
        ],
        "parallelism.tp=4 on trn1.32xlarge with engine=nxd needs a multiple of 8 data-parallel "
        "ranks, and parallelism.pp=2 leaves 4; use hardware.nodes=2",
    ),
    (
        ["parallelism.sequence_parallel=true", "parallelism.tp=4", "batch.sequence_length=254"],
        "parallelism.tp=4 does not divide batch.sequence_length=254",
    ),
    (
        ["parallelism.ep=2", "parallelism.dp=2"],
        "parallelism.ep=2 splits experts, and model.mlp.kind=dense has none; set parallelism.ep=1",
    ),
    (
        ["model=mixtral_tiny", "parallelism.ep=16", "parallelism.dp=16"],
        "parallelism.ep=16 exceeds model.mlp.moe.num_experts=8; use at most 8",
    ),
    (
        ["model=mixtral_tiny", "parallelism.ep=2", "parallelism.dp=3"],
        "parallelism.ep=2 does not divide parallelism.dp=3; use 1 or 3",
    ),
    (
        [
            *("model=mixtral_tiny", "parallelism.ep=4", "parallelism.dp=4", "parallelism.zero=3"),
            "parallelism.dp_replicate=2",
        ],
        "parallelism.ep=4 does not divide parallelism.dp / parallelism.dp_replicate=2; use 1 or 2",
    ),
    (
        ["parallelism.dp=4", "parallelism.dp_replicate=2"],
        "parallelism.dp_replicate=2 needs parallelism.zero >= 1, which shards each replica; set "
        "parallelism.zero=3, or parallelism.dp_replicate=1",
    ),
    (
        ["parallelism.dp=4", "parallelism.dp_replicate=3", "parallelism.zero=3"],
        "parallelism.dp_replicate=3 does not divide parallelism.dp=4; use 1, 2 or 4",
    ),
    (
        ["parallelism.dp=4", "parallelism.dp_replicate=4", "parallelism.zero=3"],
        "parallelism.dp_replicate=4 leaves one of parallelism.dp=4 ranks to each replica, so that "
        "nothing is sharded; set parallelism.dp_replicate=1 parallelism.zero=0",
    ),
    (
        ["engine=nxd", "parallelism.dp=4", "parallelism.dp_replicate=2", "parallelism.zero=1"],
        "parallelism.dp_replicate=2 is not supported by engine=nxd: NxD shards over all "
        "data-parallel ranks; use 1, or engine=native",
    ),
    (
        ["model=mixtral_tiny", "parallelism.ep=4", "hardware.processes_per_node=2"],
        "parallelism.ep=4 does not divide parallelism.dp=2; use 1 or 2",
    ),
    (
        ["engine=nxd", "model=mixtral_tiny", "parallelism.ep=2", "parallelism.dp=2"],
        "parallelism.ep=2 is not supported by engine=nxd: the components of Llama have no experts; "
        "use 1, or engine=native",
    ),
    (
        [
            *("model=mixtral_tiny", "parallelism.ep=2", "parallelism.dp=2"),
            "evaluation.samples.prompts=[a]",
        ],
        "evaluation.samples.prompts with parallelism.ep=2 is not supported by engine=native: "
        "data-parallel ranks decode different prompts",
    ),
    (["parallelism.pp=5"], "parallelism.pp=5 exceeds model.num_layers=4; use at most 4"),
    (
        ["parallelism.tp=2", "hardware.processes_per_node=3"],
        "parallelism.tp=2 x pp=1 needs a multiple of 2 processes, hardware.nodes=1 x "
        "processes_per_node=3 gives 3; use more nodes or a smaller layout, such as parallelism=single",
    ),
    (
        ["parallelism.dp=2", "hardware.processes_per_node=1"],
        "is 2 processes, hardware.nodes=1 x processes_per_node=1 gives 1",
    ),
    (["hardware.nodes=2"], "hardware.nodes=2 needs hardware.processes_per_node, which is null"),
    (["parallelism.zero=4"], "parallelism.zero=4 is outside [0, 3]"),
    (
        ["parallelism.zero=2", "precision=bf16_sr_master"],
        "parallelism.zero=2 with precision.rounding=stochastic with precision.master_weight_dtype=fp32 is not "
        "supported by engine=native: FSDP2 rounds master weights to nearest; use parallelism.zero=1",
    ),
    (
        [
            "parallelism.zero=3",
            "parallelism.pp=2",
            "parallelism.pipeline_schedule=zero_bubble",
            "batch.micro_batch_size=1",
        ],
        "parallelism.zero=3 with parallelism.pipeline_schedule=zero_bubble is not supported by engine=native",
    ),
    (
        ["parallelism.pp=2", "parallelism.stages_per_rank=2"],
        "parallelism.stages_per_rank=2 needs parallelism.pipeline_schedule=interleaved",
    ),
    (
        ["parallelism.pipeline_schedule=interleaved"],
        "parallelism.pipeline_schedule=interleaved needs parallelism.pp > 1; use one_f_one_b",
    ),
    (
        [
            "parallelism.pp=2",
            "parallelism.pipeline_schedule=interleaved",
            "parallelism.stages_per_rank=3",
        ],
        "parallelism.pp=2 x stages_per_rank=3 is 6 stages, and model.num_layers=4; use fewer",
    ),
    (
        [
            "parallelism.pp=2",
            "parallelism.pipeline_schedule=interleaved",
            "batch.micro_batch_size=8",
        ],
        "needs a multiple of parallelism.pp=2 micro batches, and a step has 1; change",
    ),
    (
        ["parallelism.pp=2", "parallelism.pipeline_schedule=zero_bubble", "precision=mixed"],
        "parallelism.pipeline_schedule=zero_bubble with precision.name=mixed is not supported by engine=native",
    ),
    (
        ["engine=nxd", "model.attention.qk_norm=true"],
        "model.attention.qk_norm=true is not supported by engine=nxd: it has the components of Llama; use "
        "engine=native, or set model.attention.qk_norm=false",
    ),
    (
        ["model.attention.layer_pattern=[sliding,full]"],
        "model.attention.layer_pattern has sliding layers, and model.attention.sliding_window is null",
    ),
    (
        ["model.attention.sliding_window=8", "model.attention.layer_pattern=[full]"],
        "model.attention.sliding_window=8 has no effect",
    ),
    (["model.rope.factor=8"], "model.rope.factor=8 has no effect with model.rope.scaling=none"),
    (
        ["model.rope.scaling=llama3", "model.rope.factor=8"],
        "model.rope.scaling=llama3 needs model.rope.original_max_positions",
    ),
    (["schedule.warmup_steps=400"], "is not below schedule.total_steps=256"),
    (
        ["schedule.name=wsd"],
        "schedule.name=wsd reads schedule.decay_steps, which is null; set it, for example to 51",
    ),
    (
        ["schedule.decay_steps=10"],
        "schedule.name=cosine does not read schedule.decay_steps=10; use schedule.decay_steps=null",
    ),
    (
        ["schedule=linear", "schedule.min_lr_ratio=null"],
        "schedule.name=linear reads schedule.min_lr_ratio, which is null; set it, for example to 0.1",
    ),
    (
        ["schedule.name=constant"],
        "schedule.name=constant does not read schedule.min_lr_ratio=0.1; use schedule.min_lr_ratio=null",
    ),
    (
        ["schedule=wsd", "schedule.decay_steps=240"],
        "schedule.decay_steps=240 exceeds the 192 steps between schedule.warmup_steps=64 and "
        "schedule.total_steps=256; use 192 or less",
    ),
    (["schedule=wsd", "schedule.decay_steps=0"], "schedule.decay_steps=0 is too small; use 1"),
    (
        ["phase.timeline=[{name: a, lr: -1e-4}]"],
        "phase.timeline.0.lr=-0.0001 is outside [0, inf)",
    ),
    (
        ["phase.timeline=[{name: a, lr: 1e-4, end_lr: inf}]"],
        "phase.timeline.0.end_lr=inf is outside [0, inf)",
    ),
    (
        ["phase.timeline=[{name: a, end_lr: 1e-4}]"],
        "phase.timeline.0.end_lr=0.0001 needs phase.timeline.0.lr, which is null; "
        "set it to the learning rate at the start of the stage",
    ),
    (
        ["phase.timeline=[{name: a, tokens: 524288},{name: b, tokens: 2049, lr: 1e-4, end_lr: 0}]"],
        "phase.timeline.1.end_lr=0.0 is reached at step 258, and the run ends at "
        "schedule.total_steps=256; use schedule.total_steps=258 or shorter stages",
    ),
    (["schedule.min_lr_ratio=1.5"], "schedule.min_lr_ratio=1.5 is outside [0, 1]"),
    (["recovery.min_speed_share=2"], "recovery.min_speed_share=2.0 is outside [0, 1]"),
    (["recovery.max_clock_skew_s=0"], "recovery.max_clock_skew_s=0.0 is outside (0, inf)"),
    (
        ["checkpoint.start_from=a", "model.init_from=b"],
        "checkpoint.start_from=a and model.init_from=b are both the initial state of the run; set one of them to null",
    ),
    (
        ["checkpoint.trusted_keys=a.pub"],
        "checkpoint.trusted_keys=a.pub with checkpoint.signing_key=null: the run could not resume from its own checkpoints; set checkpoint.signing_key to a private key file",
    ),
    (
        ["checkpoint.every_steps=20", "checkpoint.keep_every_steps=50"],
        "checkpoint.keep_every_steps=50 is not a multiple of checkpoint.every_steps=20, so most of its steps have no checkpoint; use 40",
    ),
    (
        ["checkpoint.keep_every_steps=0"],
        "checkpoint.keep_every_steps=0 is too small; use 1 or more",
    ),
    (["optimizer.lr=0"], "optimizer.lr=0.0 is outside (0, inf)"),
    (["optimizer.beta2=1"], "optimizer.beta2=1.0 is outside [0, 1)"),
    (["optimizer.eps=nan"], "optimizer.eps=nan is outside (0, inf)"),
    (["run.steps=0"], "run.steps=0 is too small; use 1 or more"),
    (["run.steps=400"], "run.steps=400 exceeds schedule.total_steps=256"),
    (["model.rope_theta=0"], "model.rope_theta=0.0 is outside (0, inf)"),
    (["+hardware.peak_tflops.fp32=0"], "hardware.peak_tflops.fp32=0.0 is outside (0, inf)"),
    (["model.name=../x"], "model.name='../x' is not a valid directory name"),
    (["+data.sources.code.foo=1"], "data.sources.code.foo is not a key"),
    (["+phase.timeline.0.foo=1"], "phase.timeline.0.foo is not a key"),
    (["data=files"], "data.sources.files.paths is not set; give it a value"),
    (["run.log_every=0"], "run.log_every=0 is too small"),
    (["run.name=a/b"], "run.name='a/b' is not a valid directory name"),
    (["run.name=.."], "run.name='..' is not a valid directory name"),
    (["data.sources.code.weight=-1"], "data.sources.code.weight=-1.0 is outside [0, inf)"),
    (
        [f"data.sources.{name}.weight=0" for name in ("code", "prose", "data")],
        "data.sources.*.weight are all zero",
    ),
    (
        ["phase=hlat_70b"],
        "phase.timeline.1.weights.arxiv: data=python has no source arxiv, only code, prose, data; use phase=base",
    ),
    (["phase.timeline=[]"], "phase.timeline is empty; use phase=base"),
    (
        ["phase.timeline=[{name: a},{name: b}]"],
        "phase.timeline.0.tokens is null; only the last stage may be open-ended",
    ),
    (
        ["precision.allow_replica_divergence=true"],
        "precision.allow_replica_divergence=true is not supported by engine=native: all replicas of a weight are "
        "bitwise equal; set it to false",
    ),
    (
        ["engine=nxd", "parallelism.zero=2", "parallelism.dp=2"],
        "parallelism.zero=2 is not supported by engine=nxd: NxD implements ZeRO-1 only; use 0 or 1, or engine=native",
    ),
    (
        ["engine=nxd", "parallelism.pp=2", "parallelism.pipeline_schedule=interleaved"],
        "parallelism.pipeline_schedule=interleaved is not supported by engine=nxd: the evaluation hangs in NxD with other schedules; use one_f_one_b",
    ),
    (
        ["engine=nxd", "model.tie_embeddings=true"],
        "model.tie_embeddings=true is not supported by engine=nxd",
    ),
    (
        ["engine=nxd", "parallelism.tp=2", "model.vocab_size=4097"],
        "parallelism.tp=2 with model.vocab_size=4097 is not supported by engine=nxd: NxD's embedding shards "
        "the vocabulary evenly; "
        "set model.vocab_size=4098, or use engine=native",
    ),
    (
        ["engine=nxd", "data.document_mask=true"],
        "data.document_mask=true is not supported by engine=nxd: NxD's pipeline passes no attention mask",
    ),
    (
        ["engine=nxd", "precision=mixed"],
        "parallelism.zero=0 with precision.name=mixed is not supported by engine=nxd: only NxD's ZeRO-1 "
        "optimizer has master weights and a separate accumulation dtype; "
        "set parallelism.zero=1",
    ),
    (
        ["engine=nxd", "precision=mixed", "parallelism.zero=1", "precision.reduce_dtype=bf16"],
        "precision.grad_accum_dtype=fp32 with precision.reduce_dtype=bf16 is not supported by engine=nxd",
    ),
    (
        ["engine=nxd", "precision.allow_replica_divergence=true"],
        "precision.allow_replica_divergence=true with precision.rounding=nearest is not supported by engine=nxd",
    ),
    (
        ["engine=nxd", "precision=bf16_sr"],
        "precision.rounding=stochastic with compiler.neuron_sdk=null is not supported by engine=nxd: the "
        "hardware rounds, in the mode that the environment of a pinned SDK sets; use "
        "compiler=neuron_2_28 or another pin",
    ),
    (
        ["engine=nxd", "engine.device=cpu"],
        "engine.device=cpu is not supported by engine=nxd: NxD runs on PyTorch/XLA's device only; use xla",
    ),
    (
        ["engine=nxd", "compiler=neuron_2_33"],
        "compiler.neuron_sdk=2.33.1 is not supported by engine=nxd",
    ),
    (
        ["precision=mixed", "precision.compute_dtype=fp32"],
        "precision.compute_dtype=fp32 differs from precision.param_dtype=bf16; use precision.compute_dtype=bf16",
    ),
    (
        ["precision=mixed", "precision.grad_dtype=fp32"],
        "precision.grad_dtype=fp32 differs from precision.param_dtype=bf16",
    ),
    (
        ["precision=mixed", "precision.optimizer_state_dtype=bf16"],
        "precision.optimizer_state_dtype=bf16 differs from precision.master_weight_dtype=fp32; "
        "use precision.optimizer_state_dtype=fp32",
    ),
    (
        ["precision=bf16", "precision.optimizer_state_dtype=fp32"],
        "precision.optimizer_state_dtype=fp32 differs from precision.param_dtype=bf16",
    ),
    (
        ["precision=fp32", "precision.master_weight_dtype=fp32"],
        "precision.master_weight_dtype=fp32 repeats precision.param_dtype; use precision.master_weight_dtype=null",
    ),
    (
        ["precision=fp32", "precision.master_weight_dtype=bf16"],
        "precision.master_weight_dtype=bf16 is narrower than precision.param_dtype=fp32",
    ),
    (
        ["precision=fp32", "precision.grad_accum_dtype=bf16"],
        "precision.grad_accum_dtype=bf16 differs from precision.grad_dtype=fp32",
    ),
    (
        ["precision=fp32", "precision.rounding=stochastic"],
        "precision.rounding=stochastic applies to bf16 weights, and precision.param_dtype=fp32; "
        "use precision.rounding=nearest",
    ),
    (
        ["precision=mixed", "precision.fp32_operators=[norm,loss]"],
        "precision.fp32_operators contains only loss of logits and loss, which are one fused "
        "computation; name both or neither",
    ),
    (
        ["compiler=inductor", "compiler.neuron_sdk=2.28"],
        "compiler.torch_compile=true with compiler.neuron_sdk=2.28 is not supported by engine=native: "
        "SDK 2.33 is the first release of TorchNeuron",
    ),
    (
        ["compiler=inductor", "engine=nxd"],
        "compiler.torch_compile=true is not supported by engine=nxd",
    ),
    (
        ["+optimizer.beta3=1"],
        "optimizer.beta3 is not a key of the configuration; did you mean optimizer.beta2?",
    ),
    (["~model"], "model.num_layers is not set; give it a value"),
]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    REFUSED,
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_name_keys_values_and_remedies(
    compose: Compose, overrides: list[str], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config(compose(*overrides))
    assert sentence in str(caught.value)


def test_all_violations_are_reported_at_once(compose: Compose) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config(
            compose("model=70b", "precision.compute_dtype=fp32", "hardware.processes_per_node=1")
        )
    message = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 2
    for key in ("parallelism.tp=32", "precision.compute_dtype=fp32"):
        assert key in message


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        *([f"precision={name}"] for name in ("fp32", "bf16", "bf16_sr", "bf16_sr_master", "mixed")),
        *([f"schedule={name}"] for name in ("constant", "linear", "wsd", "small", "hlat")),
        ["schedule=wsd", "schedule.decay_steps=192"],
        ["phase.timeline=[{name: a, tokens: 4096},{name: b, lr: 0, end_lr: 1e-4}]"],
        ["parallelism.activation_checkpointing=selective"],
        ["compiler=inductor"],
        ["compiler=neuron_2_33_compiled"],
        ["model=160m"],
        ["model=1b"],
        ["profiler.steps=[1,20]", "run.steps=20", "profiler.ranks=[0,1]", "parallelism.dp=2"],
        ["profiler.ranks=[7]"],
        ["experiment=quickstart"],
    ],
)
def test_valid_configurations_are_accepted(compose: Compose, overrides: list[str]) -> None:
    assert resolve_config(compose(*overrides)).run.name


def test_tensor_parallel_above_the_kv_heads_is_no_violation(compose: Compose) -> None:
    config = resolve_config(compose("experiment=hlat_70b", "engine=native", "compiler=none"))
    assert config.parallelism.tp > config.model.num_key_value_heads
