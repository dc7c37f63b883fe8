"""Proposal of a mixture as a phase, and the command that compares it with the base."""

from collections.abc import Sequence
from pathlib import Path

from hlat.config.override_keys import parse_override_key
from hlat.config.recorded_config import select_yaml_values
from hlat.storage.durable_files import replace_file
from hlat.study.mixture_analysis import MixtureAnalysis
from hlat.study.scaling_text import format_interval

PHASE_NAME = "mixture_proposal"
"""Name of the phase and of the study that compares it with phase=base."""
_OMITTED_KEYS = ("phase", "phase.timeline", "run.seed", "run.name", "sweep")
_OMITTED_PREFIXES = ("study.", "hydra.", "hydra/")


def write_proposal(analysis: MixtureAnalysis, output_dir: Path) -> Path:
    """Write the proposal as a choice of the config group `phase`; return the file."""
    proposal = analysis.proposal
    pairs = zip(analysis.points.sources, proposal.weights.tolist(), strict=True)
    weights = "".join(f"      {name}: {weight:g}\n" for name, weight in pairs)
    text = (
        f"# Proposal of hlat mixture from {len(analysis.points):,} models: {proposal.form.value}, "
        f"predicted gain {format_interval(proposal.gain, 3)}\n"
        f"name: {PHASE_NAME}\n"
        f"timeline:\n{_format_first_stage(analysis)}"
        f"  - name: proposal\n    weights:\n{weights}"
    )
    file = output_dir / "phase" / f"{PHASE_NAME}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, text.encode())
    return file


def _format_first_stage(analysis: MixtureAnalysis) -> str:
    """Return the stage before the proposal, in the tokens of the fitted runs; empty without one."""
    start, tokens = analysis.proposal.start, analysis.points.tokens
    if not start:
        return ""
    return (
        f"  # {start:g} of {tokens:,.0f} tokens\n  - {{name: base, tokens: {start * tokens:.0f}}}\n"
    )


def build_comparison_command(analysis: MixtureAnalysis, output_dir: Path) -> list[str]:
    """Return the command that trains proposal and base, with the settings of the fitted runs.

    The verdict is about the mean of the held-out sets, or about the only one of the target.
    """
    shared = _find_shared_overrides([Path(name) for name in analysis.points.names])
    used = [name for name, weight in analysis.settings.target.items() if weight]
    metric = [f"study.metric=heldout_bits_per_byte.{used[0]}"] if len(used) == 1 else []
    flags = ["--config-dir", str(output_dir)]
    return ["hlat", "sweep", *flags, f"+sweep={PHASE_NAME}", *shared, *metric]


def _find_shared_overrides(run_dirs: Sequence[Path]) -> list[str]:
    """Return the overrides that all runs record, without those of their study."""
    recorded = [_load_overrides(run_dir) for run_dir in run_dirs]
    return [
        override
        for override in recorded[0]
        if all(override in each for each in recorded[1:])
        and (key := parse_override_key(override)) is not None
        and key not in _OMITTED_KEYS
        and not key.startswith(_OMITTED_PREFIXES)
    ]


def _load_overrides(run_dir: Path) -> list[str]:
    """Return the overrides of a run; empty if it records none."""
    file = run_dir / "overrides.yaml"
    if not file.is_file():
        return []
    (overrides,) = select_yaml_values(f"overrides:\n{file.read_text()}", str(file), "overrides")
    return [str(override) for override in overrides or []]
