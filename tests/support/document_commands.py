"""Commands in the code blocks of Markdown pages."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from hlat.config.config_validation import VALIDATORS

REPOSITORY = Path(__file__).resolve().parent.parent.parent
_BLOCK = re.compile(r"^( *)```(?:bash|sh)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
# These depend on the machine or the number of processes that a job has
_NEEDS_OTHER_MACHINE = ("cannot be executed by this version", "needs a multiple of")


def find_shell_blocks(page: Path) -> list[str]:
    """Return the text of every shell block of a page."""
    return [block for _, block in _BLOCK.findall(page.read_text())]


def list_commands(block: str) -> list[str]:
    """Return the commands of a shell block without comments, with continued lines joined."""
    lines = (line.split("  #")[0].strip() for line in block.replace("\\\n", " ").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def find_config_problems(command: str, compose: Callable[..., DictConfig]) -> list[str]:
    """Compose the first point of a training command; return its problems on a suitable machine."""
    words = [word for word in shlex.split(command) if re.match(r"[+~]?[a-z]", word) and "=" in word]
    overrides = [word for word in words if not re.match(r"\+?hydra[./]", word)]
    overrides = [re.sub(r"=.*interval\(([^,]+),.*", r"=\1", word) for word in overrides]
    first_point = [word.split(",")[0] if "[" not in word else word for word in overrides]
    config = OmegaConf.to_object(compose(*first_point))
    problems = [problem for rule in VALIDATORS for problem in rule(config)]
    return [p for p in problems if not any(words in p for words in _NEEDS_OTHER_MACHINE)]
