"""Action of `hlat plan` that translates a configuration of NeuronX Distributed Training."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hlat.config.argument_parser import CommandLineParser
from hlat.config.config_errors import ConfigError, ExitCode

_EXAMPLES = """\
Print the command that trains the same model, the settings that the file does not have, and every
other key of the file with the reason why it is not translated. The sizes of an hf model are read
from the config.json that the file names, at its path or beside the file. Interpolations in either
file are not resolved. The exit code is 2 if hlat train would reject the command.

example:
  hlat plan from_nxdt=hf_llama3_8B_config.yaml

docs/nxdt.md lists the keys."""


def run_from_nxdt(argv: Sequence[str]) -> int:
    """Print the overrides of hlat for a configuration of NxDT; return the exit code."""
    parser = CommandLineParser(
        "plan from_nxdt",
        "Translate a configuration of NeuronX Distributed Training to overrides of hlat.",
        _EXAMPLES,
    )
    parser.add_argument("file", type=Path, metavar="FILE.yaml", help="the configuration")
    file = parser.parse(argv).file
    from hlat.config.compose import load_model_presets
    from hlat.config.untrusted_files import format_value, load_untrusted_yaml
    from hlat.plan.nxdt.nxdt_config import parse_nxdt_config
    from hlat.plan.nxdt.nxdt_translation import (
        PLACEHOLDERS,
        format_overrides,
        format_translation,
        translate_nxdt_config,
    )

    tree = load_untrusted_yaml(file)
    try:
        run = parse_nxdt_config(tree)
    except ConfigError as error:
        raise ConfigError(f"{format_value(file, 200)} {error}") from error
    if run.is_hf:
        run = parse_nxdt_config(tree, _load_model_config(file, run.get("model.model_config")))
    translation = translate_nxdt_config(run, load_model_presets())
    overrides = format_overrides(translation.overrides, translation.unset, PLACEHOLDERS)
    refused = _find_problems(overrides)
    print("\n".join(format_translation(file.name, translation, refused)))
    return ExitCode.CONFIGURATION if refused else ExitCode.FINISHED


def _load_model_config(yaml_path: Path, model_config_path: Any) -> Any:
    """Return the content of the config.json of an hf model, or None if it does not exist."""
    from hlat.config.untrusted_files import load_untrusted_json

    if not isinstance(model_config_path, str):
        return None
    candidates = [Path(model_config_path), yaml_path.parent / Path(model_config_path).name]
    for path in filter(os.path.exists, candidates):  # unlike Path.exists, accepts any name
        content = load_untrusted_json(path)
        if not isinstance(content, dict):
            raise ConfigError(f"{path} cannot be read: it is not a JSON object")
        return content
    return None


def _find_problems(overrides: Sequence[str]) -> Sequence[str]:
    """Return the problems for which hlat train would reject these overrides."""
    from hlat.config.compose import compose_config
    from hlat.config.resolve import resolve_config
    from hlat.plan.feasibility import validate_feasibility

    try:
        validate_feasibility(resolve_config(compose_config(overrides)))
    except ConfigError as error:
        return error.problems
    return ()
