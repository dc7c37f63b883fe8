"""Tokens of a budget, and the compute-optimal model."""

import json

import pytest
from omegaconf import OmegaConf
from scipy import optimize

from hlat.config.config_errors import ConfigError
from hlat.model.decoder_spec import compute_flops_per_token
from hlat.plan import __main__ as plan
from hlat.plan.layout_search import search_layouts
from hlat.plan.scaling_law import PUBLISHED_LAW, ScalingLaw, load_law
from hlat.plan.training_budget import Price, get_hardware_price, plan_budget

RUN = ("model=llama_tiny", "hardware=a100_p4d", "precision=bf16")
PRICE = Price("spot", 10.0, "a test")


@pytest.fixture
def config(compose):
    return lambda *overrides: OmegaConf.to_object(compose(*overrides))


def _find_optimum(law, flops):
    """Return the parameters with the lowest loss, by a search over sizes."""

    def compute_loss(log_parameters):
        parameters = 10**log_parameters
        tokens = flops / law.flops_factor / parameters
        return law.E + law.A / parameters**law.alpha + law.B / tokens**law.beta

    found = optimize.minimize_scalar(
        compute_loss, bounds=(5, 14), method="bounded", options={"xatol": 1e-10}
    )
    return 10**found.x


def test_published_law_has_the_optimum_of_chinchilla():
    """With 5.76e23 FLOPs, about 20 tokens per parameter (arXiv 2404.10102, section 5)."""
    parameters, tokens = PUBLISHED_LAW.allocate(5.76e23)
    assert parameters * tokens * 6 == pytest.approx(5.76e23)
    assert 15 < tokens / parameters < 25
    assert 60e9 < parameters < 80e9


@pytest.mark.parametrize("flops", [1e18, 1e22, 1e25])
def test_optimum_has_the_lowest_loss(flops):
    other = ScalingLaw("a test", 0.5, 3.0, 0.2, 40.0, 0.3, flops_factor=7.5)
    for law in (PUBLISHED_LAW, other):
        assert law.allocate(flops)[0] == pytest.approx(_find_optimum(law, flops), rel=1e-4)


def test_tokens_of_a_budget(config):
    """Compare with the price of the steps of the fastest layout on each number of nodes."""
    run = config(*RUN, "batch.global_batch_size=64")
    found = plan_budget(run, 100.0, None, [PRICE], PUBLISHED_LAW)
    assert [one.nodes for one in found.options][:4] == [1, 2, 4, 8]
    for one in found.options:
        nodes = config(*RUN, "batch.global_batch_size=64", f"hardware.nodes={one.nodes}")
        step_s = search_layouts(nodes)[0].step_s
        steps = one.tokens / run.batch.tokens_per_step
        assert steps * step_s / 3600 * 10.0 * one.nodes == pytest.approx(100.0)
        assert one.days == pytest.approx(steps * step_s / 86400)
        assert one.cost_usd == 100.0
    assert found.best.tokens == max(one.tokens for one in found.options)
    low, high = found.tokens_interval
    assert low < found.best.tokens < high
    flops = found.best.tokens * compute_flops_per_token(run.model, run.batch.sequence_length)
    assert found.optimum.flops == pytest.approx(flops)
    assert found.optimum.parameters == PUBLISHED_LAW.allocate(flops)[0]


def test_days_limit_the_tokens_and_the_cost(config):
    run = config(*RUN, "batch.global_batch_size=64")
    found = plan_budget(run, 100.0, 0.25, [PRICE], PUBLISHED_LAW)
    first = found.options[0]
    assert (first.nodes, first.days, first.cost_usd) == (1, 0.25, 60.0)
    assert first.is_efficient  # the cheapest
    assert all(one.days <= 0.25 and one.cost_usd <= 100.0 for one in found.options)
    for one in found.options:
        is_dominated = any(
            other.days <= one.days
            and other.cost_usd <= one.cost_usd
            and other.tokens >= one.tokens
            and other is not one
            for other in found.options
        )
        assert one.is_efficient is not is_dominated


def test_prices_of_the_hardware(config):
    price = get_hardware_price(config("hardware=h100_p5"), False)
    assert (price.name, price.usd_per_hour) == ("on-demand", 55.04)
    assert price.origin.endswith("aws/ec2/p5.48xlarge (2025-12-21)")
    assert get_hardware_price(config("hardware=trn2_48xl"), False).name == "capacity block"
    assert get_hardware_price(config("hardware=h100_hgx"), False) is None
    given = get_hardware_price(config("hardware=h100_hgx", "hardware.price_usd_per_hour=9"), True)
    assert (given.name, given.usd_per_hour) == ("given", 9)


def test_errors_of_budgets(config):
    with pytest.raises(ConfigError, match=r"hardware=h100_hgx has no price; set hardware\.price"):
        plan_budget(config("hardware=h100_hgx"), 1.0, None, [], PUBLISHED_LAW)
    with pytest.raises(
        ConfigError, match=r"hardware=cpu has no constants .* its step time is unknown"
    ):
        plan_budget(config("hardware=cpu"), 1.0, None, [PRICE], PUBLISHED_LAW)
    large = config("model=llama_tiny", "hardware=a100", "hardware.memory_gib=0.001")
    with pytest.raises(ConfigError, match="llama_tiny fits on no number of nodes of a100 up to"):
        plan_budget(large, 1.0, None, [PRICE], PUBLISHED_LAW)


FIT = {
    "points": 40,
    "source": "runs",
    "law": {
        "constants": {
            name: {"value": value, "low": None, "high": None}
            for name, value in {"E": 0.5, "A": 3, "alpha": 0.2, "B": 40, "beta": 0.3}.items()
        },
        "flops_per_parameter_and_token": 7.5,
    },
    "warnings": ["the optimum is outside of the fitted sizes"],
}


def test_a_fitted_law_is_loaded(tmp_path, capsys):
    file = tmp_path / "fit.json"
    file.write_text(json.dumps(FIT))
    law = load_law(file)
    assert (law.E, law.A, law.alpha, law.B, law.beta) == (0.5, 3.0, 0.2, 40.0, 0.3)
    assert law.flops_factor == 7.5
    assert plan.main([*RUN, "batch.global_batch_size=8", "budget_usd=10", f"law={file}"]) == 0
    out = capsys.readouterr().out
    assert f"law: {file}, fitted to 40 points of runs\n" in out
    assert "WARNING: the optimum is outside of the fitted sizes" in out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read: "),
        ("[]", "contains no law; write it with hlat fit runs json=true"),
        ('{"law": {"constants": {"E": {"value": -1}}}}', "has E=-1, which is not a number above 0"),
        (
            json.dumps({"law": {**FIT["law"], "flops_per_parameter_and_token": True}}),
            "has flops_per_parameter_and_token=true, which is not a number above 0",
        ),
    ],
)
def test_invalid_laws_are_errors(tmp_path, content, message):
    file = tmp_path / "fit.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match="fit.json.*" + message):
        load_law(file)


def test_output_of_a_budget(capsys):
    arguments = [*RUN, "batch.global_batch_size=8", "budget_usd=100", "days=1", "prices=spot:9"]
    assert plan.main(arguments) == 0
    out = capsys.readouterr().out
    assert out.startswith("llama_tiny, ")
    assert "; $100, 1 days at most, without failures\n" in out
    assert "spot: $9.00 a node and hour, prices=\n" in out
    assert "on-demand: $21.96 a node and hour, EC2 on-demand, us-east-1" in out
    assert "compute-optimal for these" in out
    assert "arXiv 2404.10102" in out
    assert plan.main([*arguments, "json=true"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {one["price"]["name"] for one in result["options"]} == {"spot", "on-demand"}
    assert result["best"]["cost_usd"] <= 100
    assert result["optimum"]["law"]["A"] == 482.01


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("days=3", "days= is for a budget; add budget_usd=, or remove it"),
        ("law=x.json", "law= is for a budget; add budget_usd=, or remove it"),
        (
            "budget_usd=5 search=true",
            "budget_usd=5 plans one model in its fastest layouts; remove search=",
        ),
        (
            "budget_usd=5 run.seed=1,2",
            "budget_usd=5 plans one model in its fastest layouts; remove the",
        ),
        (
            "hardware=h100_hgx budget_usd=5",
            "hardware=h100_hgx has no price; set hardware.price_usd_",
        ),
        ("hardware=h100_p5 budget_usd=5 law=no.json", "no.json cannot be read: it does not exist"),
    ],
)
def test_errors_of_combined_settings(capsys, arguments, message):
    assert plan.main(arguments.split()) == 2
    assert capsys.readouterr().err.startswith(f"hlat: {message}")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("budget_usd=-1", "budget_usd: -1 is not a number above 0"),
        ("days=0", "days: 0 is not a number above 0"),
        ("prices=20", "prices: 20 is not NAME:USD, such as spot:20"),
        ("prices=spot:x", "prices: x is not a number above 0"),
        ("prices=spot:1,spot:2", "prices: spot:2 is not NAME:USD, such as spot:20"),
    ],
)
def test_values_out_of_range(capsys, setting, message):
    with pytest.raises(SystemExit) as end:
        plan.main(["model=tiny", setting])
    assert end.value.code == 2
    assert capsys.readouterr().err == f"hlat plan: {message}\n"
