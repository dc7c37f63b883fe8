"""Make the report of a run: `python -m hlat.report RUN_FOLDER`.

A run writes its report when it ends. This entry makes it for one that was killed or still goes on.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hlat.config.errors import ConfigError, Exit


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report; print uptime and goodput, and in the last line where it is.

    Args:
        argv: Arguments of the command line; None: those of this process.

    Returns:
        0, or 2 if the folder is no run folder or cannot be written to.
    """
    parser = argparse.ArgumentParser(
        prog="python -m hlat.report",
        description="Write report.html and figures/*.svg of a run into its folder, from its"
        " metrics.jsonl, events.jsonl, config.yaml and provenance.json. The run may be finished,"
        " killed or still going on.",
        epilog="example: python -m hlat.report runs/tiny",
    )
    parser.add_argument("run_folder", type=Path, help="folder of the run, such as runs/<run.name>")
    folder = parser.parse_args(argv).run_folder
    from hlat.reporting.lifetime import sentence  # drawing is slow to import; --help is not
    from hlat.reporting.record import read
    from hlat.reporting.report import write

    try:
        record = read(folder)
        page = write(record, folder)
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return Exit.CONFIGURATION
    print("\n".join(filter(None, [sentence(record.lifetime), str(page)])))
    return Exit.FINISHED


if __name__ == "__main__":
    sys.exit(main())
