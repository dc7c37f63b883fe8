"""Report at the end of a run; matplotlib, which is slow to import, is imported then."""

import sys
from pathlib import Path


def try_write_report(run_dir: Path) -> str:
    """Write the report of a run, or print an error; return the uptime in one line.

    The line is empty if the run had a single attempt.
    """
    from hlat.report import goodput_section, report_writer
    from hlat.study.run_record import load_run_record

    record = load_run_record(run_dir)
    try:
        report_writer.write_report(run_dir, record)
    except OSError as error:
        print(f"hlat: cannot write the report: {error}", file=sys.stderr)
    ledger = record.time_ledger
    return goodput_section.format_goodput_summary(ledger) if len(ledger.attempts) > 1 else ""
