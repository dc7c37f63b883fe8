"""Every parameter of every model size: shape, initial standard deviation, decay, plan rule.

The parameters of all experts of a layer are one line.
"""

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hlat.config.package_dirs import find_package_dir
from hlat.model.decoder_spec import compute_init_std, list_parameter_specs
from hlat.model.parameter_spec import Initialization

GOLDEN = Path(__file__).parent / "parameters"
EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)\n")
SIZES = sorted(file.stem for file in (find_package_dir("conf") / "model").glob("*.yaml"))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.slow_after(8)
def test_inventory_is_as_recorded(size, compose, pytestconfig):
    config = OmegaConf.to_object(compose(f"model={size}"))
    now = _merge_experts([_line(one, config) for one in list_parameter_specs(config.model)])
    file = GOLDEN / f"{size}.txt"
    if pytestconfig.getoption("--update"):
        GOLDEN.mkdir(exist_ok=True)
        file.write_text(now)
    assert now == file.read_text(), (
        f"{size} changed; if that is meant: pytest tests/golden --update"
    )


def _merge_experts(lines):
    """Return the lines, with one for the equal parameters of all experts of a layer."""
    experts = {}
    for line in lines:
        name, index, rest = EXPERT.match(line).groups() if EXPERT.match(line) else (line, "", "")
        experts.setdefault((name, rest), []).append(index)
    merged = []
    for (name, rest), indices in experts.items():
        assert indices == [""] or indices == [str(i) for i in range(len(indices))], name
        merged.append(f"{name}*{rest}  x {len(indices)}\n" if rest else name)
    return "".join(merged)


def _line(parameter, config):
    std = compute_init_std(parameter, config.model)
    shape = "x".join(map(str, parameter.shape))
    is_normal = parameter.init is Initialization.normal
    initial = f"normal({std:.6g})" if is_normal else parameter.init.value
    decay = f"decay {config.optimizer.weight_decay}"
    return f"{parameter.name} {shape} {initial} {decay} {parameter.sharding.value}\n"
