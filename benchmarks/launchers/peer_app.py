"""A Hydra application without training, with points that fail if `fail` is set."""

import os
import time

import hydra
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path=None)
def main(config: DictConfig) -> None:
    """Raise an exception in point 1, and kill the process in point 2."""
    if config.point == 1 and config.fail:
        raise RuntimeError("point 1")
    if config.point == 2 and config.fail:
        os.kill(os.getpid(), 9)
    time.sleep(1)


if __name__ == "__main__":
    main()
