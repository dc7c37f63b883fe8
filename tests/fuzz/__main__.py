"""Fuzz the readers of foreign bytes, and print executions and findings of each.

Usage: PYTHONPATH=. python -m tests.fuzz --seconds 3600 --output build/fuzz.json

The time is divided between the targets. The smallest content of each finding is written to
build/fuzz/<target>/; move it to tests/fuzz/regressions/<target>/ when the reader is corrected.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import hypothesis

from tests.fuzz.fuzzer import TargetResult, fuzz
from tests.fuzz.targets import TARGETS


def main(argv: Sequence[str]) -> int:
    """Fuzz the chosen targets; return 1 if there are findings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="default: all")
    parser.add_argument("--output", type=Path, default=Path("build/fuzz.json"))
    arguments = parser.parse_args(argv)
    names = arguments.target or [*TARGETS]
    total_weight = sum(TARGETS[name].weight for name in names)
    results = []
    for name in names:
        result = fuzz(TARGETS[name], arguments.seconds * TARGETS[name].weight / total_weight)
        print(_format_row(result), flush=True)
        for finding in result.findings:
            finding.save(arguments.output.with_suffix("") / name)
            print(f"    {finding.kind}: {finding.message!r}", flush=True)
        results.append(result)
    executions = sum(result.executions for result in results)
    num_findings = sum(len(result.findings) for result in results)
    print(f"{len(results)} targets, {executions:,} executions, {num_findings} findings")
    document = {
        "hypothesis": hypothesis.__version__,
        "seconds": arguments.seconds,
        "executions": executions,
        "findings": num_findings,
        "targets": [result.to_json() for result in results],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if num_findings else 0


def _format_row(result: TargetResult) -> str:
    num_findings = len(result.findings)
    return f"{result.name:24} {result.executions:9,} executions {num_findings:3} findings"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
