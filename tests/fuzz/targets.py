"""Table of the readers of foreign bytes."""

from tests.fuzz import (
    checkpoint_targets,
    command_targets,
    data_targets,
    run_targets,
    scaling_targets,
)

MODULES = (data_targets, checkpoint_targets, run_targets, command_targets, scaling_targets)
TARGETS = {target.name: target for module in MODULES for target in module.TARGETS}
