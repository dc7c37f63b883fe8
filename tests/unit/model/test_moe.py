"""Mixture of experts: routing, combination, precision, parameters and FLOPs."""

import dataclasses
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from hlat.config.model import ModelConfig
from hlat.model.auxiliary_loss import set_loss_factor
from hlat.model.computation_settings import replace_settings
from hlat.model.decoder import Decoder
from hlat.model.decoder_spec import (
    compute_flops_per_token,
    compute_layer_flops,
    count_active_parameters,
    count_parameters,
    find_conflicts,
    list_parameter_specs,
)
from hlat.model.mlp_spec import BalanceScope, MLPConfig, MoEConfig, RouterScoring, get_mlp_spec
from hlat.model.moe import MoE, Router
from hlat.model.moe_spec import list_sparse_layers
from hlat.model.parameter_spec import ParameterRole

MODEL = ModelConfig(
    name="moe",
    num_layers=2,
    hidden_size=12,
    intermediate_size=20,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=50,
    mlp=MLPConfig(kind="moe", moe=MoEConfig(num_experts=5, experts_per_token=2)),
)


def build_moe(model: ModelConfig = MODEL) -> MoE:
    """Return a module with random weights, the same in each call."""
    moe, generator = MoE(model), torch.Generator().manual_seed(0)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return moe


def sample_input() -> Tensor:
    """Return hidden states [3, 7, 12], the same in each call."""
    return torch.randn(3, 7, 12, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def apply_token_by_token(moe: MoE, x_BSH: Tensor, normalize: bool) -> Tensor:
    """Return the output computed with one token and one expert at a time, in fp64."""
    moe, outputs = moe.double(), []
    for x_H in x_BSH.double().flatten(0, 1):
        probs = torch.exp(moe.gate.weight @ x_H)
        probs = probs / probs.sum()
        selected = sorted(range(len(probs)), key=lambda n: -float(probs[n]))[:2]
        total = sum(float(probs[n]) for n in selected) if normalize else 1.0
        experts = [probs[n] / total * moe.experts[n](x_H.view(1, -1))[0] for n in selected]
        outputs.append(torch.stack(experts).sum(0))
    return torch.stack(outputs).view(x_BSH.shape)


@pytest.mark.parametrize("normalize", [False, True])
def test_output_is_that_of_single_tokens(normalize: bool) -> None:
    model = replace_settings(MODEL, {"mlp.moe.normalize_top_k": normalize})
    x_BSH = sample_input()
    output = build_moe(model)(x_BSH)
    expected = apply_token_by_token(build_moe(model), x_BSH, normalize)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-6)


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    moe = build_moe()
    with torch.no_grad():
        moe.gate.weight[3] = -100 * torch.ones(12)
    moe(sample_input().abs()).sum().backward()
    gradient = moe.experts[3].down_proj.weight.grad
    assert gradient is not None
    assert not gradient.any()
    assert moe.gate.weight.grad is not None
    assert moe.gate.weight.grad.any()


def test_router_computes_in_fp32_if_weights_are_bf16() -> None:
    router = build_moe().gate.bfloat16()
    x_TH = sample_input().flatten(0, 1).bfloat16()
    weights_TK = router(x_TH.unsqueeze(0))[0].squeeze(0)
    logits_TE = x_TH.double() @ router.weight.double().T
    expected_TK = logits_TE.softmax(-1).topk(2).values
    expected_TK = expected_TK / expected_TK.sum(-1, keepdim=True)
    assert weights_TK.dtype is torch.float32
    torch.testing.assert_close(weights_TK.double(), expected_TK, rtol=1e-6, atol=1e-6)


def test_parameters_and_active_parameters() -> None:
    expert, router = 3 * 12 * 20, 5 * 12
    dense = dataclasses.replace(MODEL, mlp=MLPConfig())
    others = count_parameters(dense) - 2 * expert
    assert count_parameters(MODEL) == others + 2 * (5 * expert + router)
    assert count_active_parameters(MODEL) == others + 2 * (2 * expert + router)
    assert count_active_parameters(dense) == count_parameters(dense)
    extra = compute_layer_flops(MODEL, 0, 8).total - compute_layer_flops(dense, 0, 8).total
    assert extra == pytest.approx(2 * (expert + router), rel=1e-12)
    roles = {spec.name: spec.role for spec in list_parameter_specs(MODEL)}
    assert roles["model.layers.1.mlp.gate.weight"] is ParameterRole.router
    assert roles["model.layers.1.mlp.experts.4.down_proj.weight"] is ParameterRole.residual


def build_peer(name: str, **settings) -> torch.nn.Module:
    """Return a layer of transformers with random weights."""
    transformers = pytest.importorskip("transformers")
    family = name.lower().replace("v3", "_v3").replace("moe", "_moe")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = getattr(transformers, f"{name}Config")(
        hidden_size=12, num_attention_heads=2, num_key_value_heads=2, **settings
    )
    config._experts_implementation = "eager"
    layer = getattr(module, {"Qwen2Moe": "Qwen2MoeSparseMoeBlock"}.get(name, f"{name}MoE"))(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return layer


def copy_weights(moe: MoE, peer: torch.nn.Module, shared: str) -> None:
    """Copy the weights of a layer of transformers, whose experts are 3-D tensors."""
    with torch.no_grad():
        moe.gate.weight.copy_(peer.gate.weight)
        for i, expert in enumerate(moe.experts):
            copy_network(expert, peer.experts.gate_up_proj[i], peer.experts.down_proj[i])
        network = getattr(peer, shared)
        joint = torch.cat([network.gate_proj.weight, network.up_proj.weight])
        copy_network(moe.shared_expert, joint, network.down_proj.weight)
        if moe.shared_expert_gate is not None:
            moe.shared_expert_gate.weight.copy_(peer.shared_expert_gate.weight)


def copy_network(network: torch.nn.Module, gate_up: Tensor, down: Tensor) -> None:
    size, block = down.shape[1], network.activation.block_size
    pairs = zip(*(half.split(block) for half in gate_up.split(size)), strict=True)
    network.gate_up_proj.weight.copy_(torch.cat([part for pair in pairs for part in pair]))
    network.down_proj.weight.copy_(down)


def assert_equal_layers(moe: MoE, peer: torch.nn.Module) -> None:
    """Compare outputs, and gradients of the input and the router."""
    results = []
    for layer in (moe, peer):
        x_BSH = sample_input().requires_grad_()
        y_BSH = layer(x_BSH)
        y_BSH = y_BSH[0] if isinstance(y_BSH, tuple) else y_BSH
        (y_BSH * sample_input().flip(0)).sum().backward()
        results.append((y_BSH, x_BSH.grad, layer.gate.weight.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normalize", [False, True])
def test_shared_expert_with_gate_is_that_of_qwen2_moe(normalize: bool) -> None:
    peer = build_peer(
        "Qwen2Moe",
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=10,
        shared_expert_intermediate_size=14,
        norm_topk_prob=normalize,
    )
    moe = MoEConfig(
        num_experts=6,
        experts_per_token=3,
        intermediate_size=10,
        normalize_top_k=normalize,
        shared_size=14,
        shared_gate=True,
    )
    layer = MoE(dataclasses.replace(MODEL, mlp=MLPConfig(kind="moe", moe=moe)))
    copy_weights(layer, peer, "shared_expert")
    assert_equal_layers(layer, peer)


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("normalize", [False, True])
def test_sigmoid_router_with_groups_is_that_of_deepseek_v3(groups: int, normalize: bool) -> None:
    peer = build_peer(
        "DeepseekV3",
        n_routed_experts=12,
        num_experts_per_tok=4,
        n_group=3,
        topk_group=groups,
        n_shared_experts=2,
        moe_intermediate_size=10,
        routed_scaling_factor=2.5,
        norm_topk_prob=normalize,
    )
    peer.gate.e_score_correction_bias.zero_()
    moe = MoEConfig(
        num_experts=12,
        experts_per_token=4,
        intermediate_size=10,
        normalize_top_k=normalize,
        scoring=RouterScoring.sigmoid,
        routed_scale=2.5,
        num_groups=3,
        groups_per_token=groups,
        shared_size=20,
    )
    layer = MoE(dataclasses.replace(MODEL, mlp=MLPConfig(kind="moe", moe=moe)))
    copy_weights(layer, peer, "shared_experts")
    assert_equal_layers(layer, peer)


def test_the_best_expert_rates_a_group_of_softmax_scores() -> None:
    moe = MoEConfig(num_experts=6, experts_per_token=2, num_groups=3, groups_per_token=1)
    router = Router(dataclasses.replace(MODEL, mlp=MLPConfig(kind="moe", moe=moe)))
    logits = torch.tensor([[0.0, 3.0, 2.0, 2.0, 1.0, 1.0], [0.0, 1.0, 2.0, 2.0, 3.0, -9.0]])
    with torch.no_grad():
        router.weight.copy_(torch.eye(6, 12))
        _, experts_1SK = router(torch.nn.functional.pad(logits, (0, 6)).unsqueeze(0))
    assert [sorted(row) for row in experts_1SK[0].tolist()] == [[0, 1], [4, 5]]


@pytest.mark.parametrize("scoring", RouterScoring)
@pytest.mark.parametrize("top_k", [1, 3])
def test_balance_loss_of_one_sequence_is_that_of_transformers(scoring, top_k: int) -> None:
    """transformers counts each of the selected experts of a token as a whole token."""
    name = "transformers.models.mixtral.modeling_mixtral"
    load_balancing_loss_func = pytest.importorskip(name).load_balancing_loss_func
    moe = MoEConfig(num_experts=5, experts_per_token=top_k, scoring=scoring, balance_loss=0.7)
    router = Router(dataclasses.replace(MODEL, mlp=MLPConfig(kind="moe", moe=moe)))
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    x_BSH = sample_input()[:1]
    logits_SE = torch.nn.functional.linear(x_BSH[0], router.weight)
    if scoring is RouterScoring.sigmoid:  # normalized sigmoid scores are a softmax of their log
        logits_SE = torch.nn.functional.logsigmoid(logits_SE)
    expected = load_balancing_loss_func((logits_SE,), 5, top_k) / top_k
    (expected_gradient,) = torch.autograd.grad(expected, router.weight)
    set_loss_factor([router], 2.0)
    weights_BSK, _ = router(x_BSH)
    (gradient,) = torch.autograd.grad(weights_BSK.sum() * 0, router.weight)
    torch.testing.assert_close(gradient, 1.4 * expected_gradient, rtol=1e-5, atol=1e-6)


def build_balanced(scope: BalanceScope, z_loss: float = 0.0) -> MoE:
    """Return a module with a balance loss of weight 0.5."""
    moe = MoEConfig(
        num_experts=5, experts_per_token=2, balance_loss=0.5, balance_scope=scope, z_loss=z_loss
    )
    return build_moe(dataclasses.replace(MODEL, mlp=MLPConfig(kind="moe", moe=moe)))


@pytest.mark.parametrize("scope", [BalanceScope.sequence, BalanceScope.previous_step])
def test_losses_of_sequences_do_not_depend_on_their_micro_batch(scope: BalanceScope) -> None:
    layer, gradients = build_balanced(scope, z_loss=0.25), []
    if layer.gate.previous_load is not None:
        layer.gate.previous_load.copy_(torch.tensor([0.0, 2.0, 1.0, 0.5, 1.5]))
    for size in (1, 3):
        set_loss_factor([layer], 1 / 3)
        layer.zero_grad()
        for x_BSH in sample_input().split(size):
            (0 * layer(x_BSH)).sum().backward()
        gradients.append(layer.gate.weight.grad.clone())
    assert gradients[0].abs().max() > 1e-3
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


def test_balance_loss_of_a_micro_batch_is_that_of_transformers() -> None:
    name = "transformers.models.mixtral.modeling_mixtral"
    load_balancing_loss_func = pytest.importorskip(name).load_balancing_loss_func
    layer, x_BSH = build_balanced(BalanceScope.micro_batch), sample_input()
    set_loss_factor([layer], 1 / 3)  # the mean over the sequences
    (0 * layer(x_BSH)).sum().backward()
    weight = layer.gate.weight.detach().clone().requires_grad_()
    logits_TE = (x_BSH @ weight.T).flatten(0, 1)
    (0.5 * load_balancing_loss_func((logits_TE,), 5, 2) / 2).backward()
    torch.testing.assert_close(layer.gate.weight.grad, weight.grad, rtol=1e-5, atol=1e-7)
    other = build_balanced(BalanceScope.sequence)
    set_loss_factor([other], 1 / 3)
    (0 * other(x_BSH)).sum().backward()
    assert (other.gate.weight.grad - weight.grad).abs().max() > 1e-4


def test_load_of_the_previous_step_weights_the_mean_scores() -> None:
    layer, x_BSH = build_balanced(BalanceScope.previous_step), sample_input()
    set_loss_factor([layer], 1.0)
    (0 * layer(x_BSH)).sum().backward()
    assert layer.gate.weight.grad.abs().max() < 1e-7  # a balanced load
    counts = torch.tensor([0, 8, 4, 2, 6, 3])
    layer.gate.statistics.update_buffers(counts, torch.tensor(True))
    assert layer.gate.previous_load.tolist() == [1.0] * 5
    layer.gate.statistics.update_buffers(counts, torch.tensor(False))
    assert layer.gate.previous_load.tolist() == [0.0, 2.0, 1.0, 0.5, 1.5]
    layer.zero_grad()
    (0 * layer(x_BSH)).sum().backward()
    weight = layer.gate.weight.detach().clone().requires_grad_()
    means_BE = (x_BSH @ weight.T).softmax(-1).mean(1)
    (0.5 * (means_BE @ layer.gate.previous_load)).sum().backward()
    torch.testing.assert_close(layer.gate.weight.grad, weight.grad, rtol=1e-5, atol=1e-6)


def test_router_z_loss_is_the_mean_square_of_the_log_partition_function() -> None:
    moe = MoEConfig(num_experts=5, experts_per_token=2, z_loss=0.25)
    layer = build_moe(dataclasses.replace(MODEL, mlp=MLPConfig(kind="moe", moe=moe)))
    set_loss_factor([layer], 2.0)
    (0 * layer(sample_input())).sum().backward()
    weight = layer.gate.weight.detach().clone().requires_grad_()
    logits = sample_input() @ weight.T
    (2.0 * 0.25 * logits.logsumexp(-1).square().mean(1).sum()).backward()
    torch.testing.assert_close(layer.gate.weight.grad, weight.grad, rtol=1e-5, atol=1e-6)


def test_evaluation_computes_no_loss() -> None:
    moe = MoEConfig(num_experts=5, experts_per_token=2, balance_loss=0.5)
    layer = build_moe(dataclasses.replace(MODEL, mlp=MLPConfig(kind="moe", moe=moe)))
    plain = build_moe()(sample_input())
    set_loss_factor([layer], 1.0)
    with torch.no_grad():
        assert not layer.gate.loss.is_active
        assert torch.equal(layer(sample_input()), plain)
    set_loss_factor([layer], 0.0)
    assert not layer.gate.loss.is_active


def test_the_shared_network_counts_for_every_token() -> None:
    settings = {"mlp.moe.shared_size": 7, "mlp.moe.shared_gate": True}
    model = replace_settings(MODEL, settings)
    extra = 3 * 12 * 7 + 12
    assert count_parameters(model) - count_parameters(MODEL) == 2 * extra
    assert count_active_parameters(model) - count_active_parameters(MODEL) == 2 * extra


@pytest.mark.parametrize(
    ("num_dense_layers", "every", "expected"),
    [(0, 1, [0, 1, 2, 3, 4]), (2, 1, [2, 3, 4]), (0, 2, [1, 3]), (2, 2, [3]), (1, 5, [4])],
)
def test_dense_and_sparse_layers(num_dense_layers: int, every: int, expected: list[int]) -> None:
    settings = {"mlp.moe.num_dense_layers": num_dense_layers, "mlp.moe.every": every}
    model = replace_settings(MODEL, settings | {"num_layers": 5})
    layers = Decoder(model).layers.values()
    assert [n for n, layer in enumerate(layers) if isinstance(layer.mlp, MoE)] == expected
    assert list_sparse_layers(model) == expected
    expert, router = 3 * 12 * 20, 5 * 12
    dense = dataclasses.replace(model, mlp=MLPConfig())
    extra = count_parameters(model) - count_parameters(dense)
    assert extra == len(expected) * (4 * expert + router)
    flops = [compute_flops_per_token(one, 8) for one in (model, dense)]
    assert flops[0] - flops[1] == pytest.approx(6 * len(expected) * (expert + router))
    moe_spec = get_mlp_spec(replace_settings(model, {"mlp.moe.intermediate_size": 6}))
    sizes = moe_spec.list_sharded_sizes(replace_settings(model, {"mlp.moe.intermediate_size": 6}))
    assert ("model.intermediate_size" in sizes) == (len(expected) < 5)
    assert sizes["model.mlp.moe.intermediate_size"] == 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"experts_per_token": 6},
            "model.mlp.moe.experts_per_token=6 exceeds the 5 experts of "
            "model.mlp.moe.num_experts=5; use at most 5",
        ),
        (
            {"num_dense_layers": 1, "every": 3},
            "model.mlp.moe.num_dense_layers=1 and model.mlp.moe.every=3 leave no layer with "
            "experts of model.num_layers=2; reduce one of them",
        ),
        (
            {"num_groups": 2},
            "model.mlp.moe.num_groups=2 does not divide model.mlp.moe.num_experts=5; use a divisor",
        ),
        (
            {"groups_per_token": 2},
            "model.mlp.moe.groups_per_token=2 exceeds model.mlp.moe.num_groups=1; use at most 1",
        ),
        (
            {"num_experts": 6, "num_groups": 6, "groups_per_token": 6, "scoring": "sigmoid"},
            "model.mlp.moe.num_groups=6 leaves groups of one expert, and sigmoid scores rate the "
            "two best; use at most 3",
        ),
        (
            {"num_experts": 6, "num_groups": 3, "experts_per_token": 3},
            "model.mlp.moe.experts_per_token=3 exceeds the 2 experts in 1 groups of "
            "model.mlp.moe.num_experts=6; use at most 2",
        ),
        (
            {"shared_gate": True},
            "model.mlp.moe.shared_gate=true has no effect without model.mlp.moe.shared_size; set "
            "it",
        ),
    ],
)
def test_refused_settings(settings: dict[str, Any], message: str) -> None:
    if "scoring" in settings:
        settings = settings | {"scoring": RouterScoring(settings["scoring"])}
    values = {f"mlp.moe.{key}": value for key, value in settings.items()}
    assert list(find_conflicts(replace_settings(MODEL, values))) == [message]
