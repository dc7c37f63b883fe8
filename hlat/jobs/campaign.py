"""Run the stages of a campaign, or submit them as jobs: `hlat campaign`.

    campaign file -> stages -> jobs (validated) -> states -> start, submit or replace jobs

The command is repeated to continue a campaign, also after its file was edited. See
docs/campaigns.md.
"""

import argparse
import json
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hlat.config.argument_parser import (
    CommandLineParser,
    is_launcher_override,
    run_and_exit,
    run_command,
)
from hlat.config.config_errors import ExitCode

if TYPE_CHECKING:
    from hlat.jobs.campaign_state import CampaignLog
    from hlat.jobs.stage_expansion import ExpandedCampaign

_EXAMPLES = """\
examples:
  hlat campaign hlat_tiny                              small stages on this machine, offline
  hlat campaign anneal_tiny                            one trunk and several learning-rate decays
  hlat campaign hlat_70b dry_run=true                  jobs, nodes, hours and price
  hlat campaign hlat_70b hydra/launcher=slurm          submit every stage as a job
  hlat campaign hlat_70b status=true                   the stages with their states
  hlat campaign mine.yaml repeat=average               repeat a finished stage

Repeat a command to continue the campaign, also after its file was edited. Finished and running
stages are kept. See docs/campaigns.md."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = CommandLineParser(
        "campaign",
        "Run the stages of a campaign in order, or submit them as jobs that wait for each other.",
        _EXAMPLES,
        takes_overrides=True,
    )
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="campaign of the package, or path of a YAML file")
    overrides = "hydra/launcher and its settings, for all stages"
    add("overrides", nargs="*", metavar="OVERRIDE", help=overrides)
    add("--dry-run", action="store_true", help="print jobs, nodes, hours and price; start nothing")
    add("--status", action="store_true", help="print the stages with their states")
    add("--json", action="store_true", help="status, dry_run: print JSON")
    add("--repeat", metavar="STAGE", help="repeat a finished stage and those that depend on it")
    add(
        "--wait",
        action="store_true",
        help="wait until the jobs have ended; exit with 1 unless all finished",
    )
    arguments = parser.parse(argv)
    if arguments.name is None or is_launcher_override(arguments.name):
        from hlat.jobs.campaign_file import list_campaigns

        parser.error(f"give a campaign: {', '.join(list_campaigns())}, or the path of a YAML file")
    parser.validate_launcher_overrides(arguments.overrides)
    if arguments.json and not (arguments.status or arguments.dry_run):
        parser.error("json= is for status=true and dry_run=true")
    if sum(map(bool, (arguments.status, arguments.dry_run, arguments.repeat))) > 1:
        parser.error("give one of status=, dry_run= and repeat=")
    return run_command(lambda: _run(arguments), None)


def _run(arguments: argparse.Namespace) -> int:
    from hlat.jobs.campaign_file import find_campaign_file, load_campaign
    from hlat.jobs.campaign_state import CampaignLog
    from hlat.jobs.stage_expansion import expand_campaign

    expanded = expand_campaign(load_campaign(find_campaign_file(arguments.name)))
    if arguments.dry_run:
        return _print_costs(expanded, arguments.json)
    log = CampaignLog(expanded.directory)
    if arguments.status:
        return _print_statuses(expanded, log, arguments.json)
    with log.lock():
        return _continue(expanded, log, arguments)


def _print_costs(expanded: "ExpandedCampaign", as_json: bool) -> int:
    from hlat.jobs.campaign_cost import compute_costs
    from hlat.jobs.campaign_table import format_costs, summarize_costs

    costs = compute_costs(expanded)
    print(json.dumps(summarize_costs(costs), indent=2) if as_json else _join(format_costs(costs)))
    return ExitCode.FINISHED


def _print_statuses(expanded: "ExpandedCampaign", log: "CampaignLog", as_json: bool) -> int:
    from hlat.jobs.campaign_state import load_statuses
    from hlat.jobs.campaign_table import format_statuses, summarize_statuses

    statuses = load_statuses(log, expanded.jobs, log.is_locked)
    table = (expanded.jobs, statuses)
    print(
        json.dumps(summarize_statuses(*table), indent=2)
        if as_json
        else _join(format_statuses(*table))
    )
    return ExitCode.FINISHED


def _continue(
    expanded: "ExpandedCampaign", log: "CampaignLog", arguments: argparse.Namespace
) -> int:
    """Start or submit the jobs that have not started; return the exit code."""
    from hlat.jobs.campaign_execution import CampaignExecution, reset_stage
    from hlat.jobs.campaign_report import write_campaign_report
    from hlat.jobs.campaign_state import load_statuses
    from hlat.jobs.campaign_table import format_statuses
    from hlat.jobs.stage_job import save_jobs

    jobs = expanded.jobs
    statuses = load_statuses(log, jobs, False)
    if arguments.repeat is not None:
        reset_stage(expanded, statuses, log, arguments.repeat)
        statuses = load_statuses(log, jobs, False)
    for job in jobs:
        if statuses[job.name].is_unchangeable:
            command = shlex.join(["hlat", "campaign", arguments.name, f"repeat={job.name}"])
            print(f"{job.name} ran with other settings; it is kept. To repeat it: {command}")
    save_jobs(expanded.directory, jobs)
    execution = CampaignExecution(expanded, log, arguments.overrides)
    code = execution.start()
    if arguments.wait and not code:
        code = execution.wait()
    print(_join(format_statuses(jobs, load_statuses(log, jobs, False))))
    if any(job.kind == "report" for job in jobs):
        write_campaign_report(expanded.directory, is_running=False)
    if code:
        command = shlex.join(["hlat", "campaign", arguments.name, *arguments.overrides])
        print(f"continue with: {command}")
    return code


def _join(lines: Sequence[str]) -> str:
    return "\n".join(lines)


if __name__ == "__main__":
    run_and_exit(main)
