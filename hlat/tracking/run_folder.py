"""The folder of a run: made, checked for writing, and described, before anything is computed."""

import json
from pathlib import Path
from typing import Any

from hlat.config.errors import ConfigError
from hlat.config.run import Run


def make(run: Run) -> Path:
    """Return `<run.root>/<run.name>`, existing and writable.

    Raises:
        ConfigError: It cannot be made or written to.
    """
    assert run.name is not None, "resolve names every run"
    path = Path(run.root) / run.name
    probe = path / ".writable"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.write_text("x")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"run.root={run.root}: cannot write to {path} ({error.strerror}); "
            "set run.root to a folder with room that you may write to"
        ) from error
    return path


def describe(
    folder: Path, config_yaml: str, overrides: list[str], provenance: dict[str, Any]
) -> None:
    """Write config.yaml, overrides.yaml and provenance.json; the newest start of the run counts."""
    (folder / "config.yaml").write_text(config_yaml)
    # A list of JSON strings is a YAML list, and needs no YAML library here
    (folder / "overrides.yaml").write_text(
        "".join(f"- {json.dumps(override)}\n" for override in overrides)
    )
    (folder / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")
