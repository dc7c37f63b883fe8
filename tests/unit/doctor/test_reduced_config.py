"""A reduced configuration runs the same code as the original one."""

from dataclasses import replace

import numpy as np
import pytest

from hlat.config.config_errors import ConfigError
from hlat.config.config_validation import VALIDATORS
from hlat.config.phase_steps import compute_stage_starts
from hlat.config.resolve import resolve_config
from hlat.distributed.parameter_shards import count_kv_replicas
from hlat.doctor.reduced_config import move_axis_to_dp, reduce_config, to_single_process
from hlat.doctor.reference_model import compute_mean_loss
from hlat.doctor.sampled_inputs import sample_batch, sample_weights
from hlat.model.attention_spec import get_layer_type
from hlat.model.decoder_spec import count_parameters
from hlat.model.mlp_spec import get_layer_mlp_kind
from hlat.model.rope_spec import RopeScaling, has_rope

RUNS = {
    "quickstart": [],
    "1b": ["model=1b", "parallelism.dp=4", "parallelism.zero=2"],
    "7b": ["model=7b", "parallelism.tp=8"],
    "70b": ["model=70b", "parallelism.tp=4", "parallelism.pp=4", "parallelism.dp=1"],
    "copies of heads": ["parallelism.tp=4", "parallelism.sequence_parallel=true"],
    "unequal stages": ["model.num_layers=6", "parallelism.pp=4", "batch.micro_batch_size=1"],
    "odd vocabulary": ["model.vocab_size=4099", "parallelism.tp=4"],
    "interleaved": [
        *("parallelism.pp=2", "parallelism.stages_per_rank=2", "batch.micro_batch_size=1"),
        "parallelism.pipeline_schedule=interleaved",
    ],
    "upcycled": [
        *("model.mlp.kind=moe", "model.mlp.moe.upcycling_noise=0.1", "model.init_from=dense"),
        "model.mlp.moe.intermediate_size=176",
    ],
    "nxd": ["model=7b", "engine=nxd", "compiler=neuron_2_28", "parallelism.tp=8"],
}


COMPONENTS = {
    "wide heads": ["model.attention.head_dim=64"],
    "narrow heads": ["model.attention.head_dim=16", "model.attention.scale=0.0625"],
    "window": ["model.attention.sliding_window=100"],
    "window over stages": [
        *("model.attention.sliding_window=100", "model.num_layers=9", "parallelism.pp=4"),
        *("model.attention.layer_pattern=[sliding,sliding,full]", "batch.micro_batch_size=1"),
    ],
    "long pattern": [
        *("model.num_layers=18", "model.attention.sliding_window=64"),
        f"model.attention.layer_pattern=[{'sliding,' * 12}full]",
        "model.rope.layer_pattern=[true,true,false]",
    ],
    "no rotation": ["model.rope.layer_pattern=[true,true,true,false]"],
    "softcap": ["model.attention.logit_softcap=50", "model.head.logit_softcap=30"],
    **{
        scaling: [
            *(f"model.rope.scaling={scaling}", "model.rope.factor=8", "model.rope_theta=500000"),
            "model.rope.original_max_positions=8192",
        ]
        for scaling in ("llama3", "yarn", "dynamic")
    },
    "partial rotation": [
        "model.rope.partial_rotary_factor=0.5",
        "model.rope.scaling=linear",
        "model.rope.factor=8",
    ],
    "partial rotation of many heads": [
        *("model.rope.partial_rotary_factor=0.25", "model.num_attention_heads=16"),
        *("model.num_key_value_heads=8", "model.hidden_size=256", "parallelism.tp=8"),
    ],
    "dense first layers": [
        *("model.mlp.kind=moe", "model.num_layers=8", "model.mlp.moe.num_dense_layers=3"),
        "model.mlp.moe.num_experts=4",
    ],
    "sparse layers": [
        *("model.mlp.kind=moe", "model.num_layers=9", "model.mlp.moe.num_dense_layers=4"),
        *("model.mlp.moe.num_experts=4", "model.mlp.moe.every=4"),
    ],
}
"""Settings of components, each of which affects the reduced model."""


def _broken(config) -> list[str]:
    return [problem for rule in VALIDATORS for problem in rule(config)]


@pytest.mark.parametrize("name", RUNS | COMPONENTS)
def test_reduced_configuration_is_valid(compose, name: str) -> None:
    config = resolve_config(compose(*(RUNS | COMPONENTS)[name]))
    small = reduce_config(config)
    others = [to_single_process(small)]
    others += [move_axis_to_dp(small, "tp")] if small.parallelism.tp > 1 else []
    others += [move_axis_to_dp(small, "pp")] if small.parallelism.pp > 1 else []
    for one in (small, *others):
        assert not _broken(one)
        assert one.num_processes in (1, small.num_processes)
    assert count_parameters(small.model) < 500_000


@pytest.mark.parametrize("name", RUNS | COMPONENTS)
def test_reduced_model_has_the_same_relations_to_the_layout(compose, name: str) -> None:
    config = resolve_config(compose(*(RUNS | COMPONENTS)[name]))
    small, tp = reduce_config(config), config.parallelism.tp
    assert count_kv_replicas(small.model, tp) == count_kv_replicas(config.model, tp)
    assert (small.model.num_key_value_groups > 1) == (config.model.num_key_value_groups > 1)
    assert small.model.vocab_size % tp == config.model.vocab_size % tp
    assert (small.num_micro_batches < small.parallelism.pp) == (
        config.num_micro_batches < config.parallelism.pp
    )
    stages = config.parallelism.pp * config.parallelism.stages_per_rank
    if small.model.num_layers > 2:
        unequal = config.model.num_layers % stages > 0
        assert (small.model.num_layers % stages > 0) == unequal
    assert (small.precision, small.optimizer, small.schedule, small.compiler) == (
        *(config.precision, config.optimizer, config.schedule, config.compiler),
    )


@pytest.mark.parametrize("name", COMPONENTS)
def test_reduced_model_has_each_layer_type(compose, name: str) -> None:
    model = resolve_config(compose(*COMPONENTS[name])).model
    small = reduce_config(resolve_config(compose(*COMPONENTS[name]))).model
    kinds, small_kinds = (
        {
            (get_layer_type(one, n), has_rope(one, n), get_layer_mlp_kind(one, n))
            for n in range(one.num_layers)
        }
        for one in (model, small)
    )
    assert small_kinds == kinds
    ratios = [one.num_attention_heads * one.head_dim / one.hidden_size for one in (model, small)]
    assert np.sign(ratios[0] - 1) == np.sign(ratios[1] - 1)


@pytest.mark.parametrize("name", [name for name in COMPONENTS if "heads" not in name])
def test_reduced_settings_affect_the_loss(compose, name: str) -> None:
    config = reduce_config(resolve_config(compose(*COMPONENTS[name])))
    model, weights, tokens = config.model, sample_weights(config), sample_batch(config)
    attention, rope = model.attention, model.rope
    others = [
        replace(model, attention=replace(attention, sliding_window=config.batch.sequence_length)),
        replace(model, attention=replace(attention, logit_softcap=None)),
        replace(model, attention=replace(attention, scale=None)),
        replace(model, head=replace(model.head, logit_softcap=None)),
        replace(model, rope=replace(rope, scaling=RopeScaling.none)),
        replace(model, rope=replace(rope, layer_pattern=[])),
        replace(model, rope=replace(rope, partial_rotary_factor=1.0)),
    ]
    loss = compute_mean_loss(model, weights, tokens)
    for other in others:
        if other != model and (attention.sliding_window or not other.attention.sliding_window):
            assert abs(compute_mean_loss(other, weights, tokens) - loss) > 1e-3


def test_number_of_replicas_with_and_without_torchrun(compose) -> None:
    config = resolve_config(compose("parallelism.dp=8", "parallelism.tp=2"))
    assert reduce_config(config).num_processes == 4
    assert reduce_config(config, num_started_processes=16).num_processes == 16


def test_too_large_layouts_are_rejected_with_a_remedy(compose) -> None:
    config = resolve_config(compose("model=70b", "parallelism.dp=4"))
    with pytest.raises(ConfigError, match=r"tp=32 x pp=8 x dp=2 needs 512 .* srun or torchrun"):
        reduce_config(config)


def test_paths_of_the_run_are_replaced(compose) -> None:
    small = reduce_config(
        resolve_config(compose("run.root=there", "checkpoint.start_from=elsewhere"))
    )
    assert small.run.root == "there/doctor"
    assert small.checkpoint.start_from is None
    assert small.model.init_from is None


def test_stages_keep_their_number_of_steps(compose) -> None:
    timeline = "phase.timeline=[{name:a,tokens:128000},{name:b,tokens:1000000},{name:c}]"
    config = resolve_config(compose(timeline))
    reduced = reduce_config(config)
    assert reduced.batch.tokens_per_step < config.batch.tokens_per_step
    starts = [compute_stage_starts(one.phase, one.batch) for one in (config, reduced)]
    assert np.abs(np.subtract(*starts)).max() <= 1
    assert len(starts[1]) == 3


@pytest.mark.parametrize(
    ("precision", "selected", "groups"), [("fp32", 2, 1), ("mixed", 8, 2), ("bf16_sr", 8, 2)]
)
def test_router_selects_all_experts_in_low_precision(
    compose, precision: str, selected: int, groups: int
) -> None:
    overrides = ["model.mlp.moe.num_groups=4", "model.mlp.moe.groups_per_token=2"]
    config = resolve_config(compose("model=qwen3_moe_tiny", f"precision={precision}", *overrides))
    moe = reduce_config(config).model.mlp.moe
    assert (moe.num_experts, moe.num_groups) == (8, 2)
    assert (moe.experts_per_token, moe.groups_per_token) == (selected, groups)
