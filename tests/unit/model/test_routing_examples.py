"""Routers of examples/ against all experts applied to all tokens."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hlat.config import components, extensions
from hlat.config.compose import compose_config, register_configs
from hlat.config.model import ModelConfig
from hlat.config.resolve import resolve_config
from hlat.doctor.reduced_config import reduce_config
from hlat.model.auxiliary_loss import set_loss_factor
from hlat.model.decoder import Decoder
from hlat.model.decoder_spec import find_conflicts, list_module_parameters
from hlat.model.mlp_spec import MLPConfig, MoEConfig
from hlat.model.moe import MoE
from tests.conftest import REPOSITORY

NUM_EXPERTS, LENGTH = 4, 6


@pytest.fixture(autouse=True)
def _load_examples(monkeypatch) -> Iterator[None]:
    before = components.list_registered()
    monkeypatch.setattr(extensions, "_loaded", {})
    for name in ("relu_routing", "expert_choice"):
        file = str(REPOSITORY / f"examples/{name}.py")
        extensions.load_extension(file, file)
    yield
    components.remove_components(components.list_registered() - before)
    register_configs()  # the schema without them


def build_model(kind: str, **settings: float) -> ModelConfig:
    moe = MoEConfig(num_experts=NUM_EXPERTS, shared_size=8, **settings)
    return ModelConfig(
        name="routed",
        num_layers=2,
        hidden_size=12,
        intermediate_size=20,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=50,
        mlp=MLPConfig(kind=kind, moe=moe),
    )


def build_network(model: ModelConfig) -> MoE:
    """Return a network with random weights in fp64, the same in each call."""
    network = components.get_implementation("model.mlp", model.mlp.kind)(model).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return network


def sample_input() -> Tensor:
    """Return hidden states [3, S, 12], the same in each call."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, LENGTH, 12, generator=generator, dtype=torch.float64)


def compute_relu(scores_BSE: Tensor) -> Tensor:
    return scores_BSE.clamp(min=0)


def compute_expert_choice(scores_BSE: Tensor) -> Tensor:
    """Return softmax scores of the 3 = 6 x 2 / 4 tokens of a sequence that an expert selects."""
    probs_BSE = scores_BSE.softmax(-1)
    return probs_BSE * (probs_BSE >= probs_BSE.sort(1, descending=True).values[:, [2]])


@pytest.mark.parametrize(
    ("kind", "compute_weights"), [("relu", compute_relu), ("expert_choice", compute_expert_choice)]
)
def test_output_is_the_weighted_sum_of_all_experts(kind, compute_weights) -> None:
    network, x_BSH = build_network(build_model(kind)), sample_input()
    weights_BSE = compute_weights(x_BSH @ network.gate.weight.T)
    assert (weights_BSE == 0).any()
    outputs = [weights_BSE[..., [n]] * network.experts[n](x_BSH) for n in range(NUM_EXPERTS)]
    expected = torch.stack(outputs).sum(0) + network.shared_expert(x_BSH)
    torch.testing.assert_close(network(x_BSH), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["relu", "expert_choice"])
def test_only_some_layers_have_experts(kind) -> None:
    model = build_model(kind, every=2)
    with torch.device("meta"):
        decoder = Decoder(model)
    assert [isinstance(block.mlp, MoE) for block in decoder.layers.values()] == [False, True]
    assert {parameter.name for parameter in list_module_parameters(model)} == {
        name for name, _ in decoder.named_parameters()
    }


def test_l1_loss_is_weighted_by_loads() -> None:
    network = build_network(build_model("relu", balance_loss=0.5))
    set_loss_factor([network], 2.0)
    (0 * network(sample_input())).sum().backward()
    weight = network.gate.weight.detach().clone().requires_grad_()
    scores_BSE, loss = compute_relu(sample_input() @ weight.T), torch.zeros(())
    for scores_SE in scores_BSE:
        for scores_S in scores_SE.T:
            load = (scores_S > 0).sum() * NUM_EXPERTS / (2 * LENGTH)
            loss = loss + load * scores_S.sum() / LENGTH
    (2.0 * 0.5 * loss).backward()
    torch.testing.assert_close(network.gate.weight.grad, weight.grad, rtol=1e-5, atol=1e-6)


def test_the_doctor_reduces_the_experts() -> None:
    config = resolve_config(compose_config(["model=qwen3_moe_tiny", "model.mlp.kind=relu"]))
    moe = reduce_config(config).model.mlp.moe
    assert (moe.num_experts, moe.experts_per_token) == (8, 2)


def test_relu_routing_refuses_settings_without_effect() -> None:
    (message,) = find_conflicts(build_model("relu", bias_update_rate=0.1))
    assert message.startswith("model.mlp.moe.bias_update_rate has no effect")
