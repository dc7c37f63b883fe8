"""Report at the end of a run; matplotlib, which is slow to import, is imported then."""

import sys
from pathlib import Path

from hlat.config.run import Config
from hlat.study.run_record import load_run_record
from hlat.tracking.run_summary import writes_report


def try_write_report(config: Config, run_dir: Path) -> str:
    """Write the report of a run, or print an error; return the uptime in one line.

    The line is empty if the run had a single attempt.
    """
    record = load_run_record(run_dir)
    if writes_report(config):
        from hlat.report import report_writer

        try:
            report_writer.write_report(run_dir, record)
        except OSError as error:
            print(f"hlat: cannot write the report: {error}", file=sys.stderr)
    ledger = record.time_ledger
    if len(ledger.attempts) == 1:
        return ""
    from hlat.report import goodput_section

    return goodput_section.format_goodput_summary(ledger)
