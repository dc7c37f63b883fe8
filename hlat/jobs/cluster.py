"""Write the configuration of an AWS ParallelCluster: `hlat cluster`.

    overrides of the run (hardware, compiler) + settings -> cluster.yaml and the nodes' scripts

Nothing is created: the command prints the commands that do so, with the price of the nodes.
"""

import argparse
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from hlat.config import compose
from hlat.config.argument_parser import (
    CommandLineParser,
    parse_positive_int,
    run_and_exit,
    run_command,
)
from hlat.config.config_errors import ExitCode

_EXAMPLES = """\
example:
  hlat cluster experiment=hlat_70b hardware.nodes=64 region=us-west-2 \\
    subnet=subnet-0aaa head_subnet=subnet-0bbb key=my-key scripts=s3://my-bucket/hlat

Only hardware and compiler.neuron_sdk of the run's configuration are used.
docs/parallelcluster.md leads from an empty account to a running job."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files and print the commands that use them; return the exit code."""
    arguments = _build_parser().parse(argv)
    return run_command(
        lambda: _write_cluster(compose.compose_config(arguments.overrides), arguments),
        f"output={arguments.output}",
    )


def _build_parser() -> CommandLineParser:
    parser = CommandLineParser(
        "cluster",
        "Write the configuration of an AWS ParallelCluster for a run, and its scripts.",
        _EXAMPLES,
        takes_overrides=True,
    )
    add = parser.add_argument
    parser.add_overrides("overrides of the run's configuration")
    region = "AWS region, such as us-west-2"
    add("--region", required=True, type=_parse_region, metavar="NAME", help=region)
    add("--subnet", required=True, metavar="ID", help="private subnet of the compute nodes")
    add("--head-subnet", required=True, metavar="ID", help="public subnet of the head node")
    add("--key", required=True, metavar="NAME", help="EC2 key pair for the login")
    scripts = "S3 directory from which nodes read their scripts"
    add("--scripts", required=True, type=_parse_s3_url, metavar="s3://BUCKET/DIR", help=scripts)
    head = "instance type of the head node (default: m6i.4xlarge)"
    add("--head", default="m6i.4xlarge", metavar="TYPE", help=head)
    fsx = "size of FSx for Lustre: 1200 or a multiple of 2400 (default: 9600)"
    add("--fsx-gib", default=9600, type=_parse_fsx_size, metavar="N", help=fsx)
    _add_reservation_settings(parser)
    _add_database_settings(parser)
    output = "directory to write (default: cluster)"
    add("--output", default=Path("cluster"), type=Path, metavar="DIR", help=output)
    return parser


def _add_reservation_settings(parser: CommandLineParser) -> None:
    add = parser.add_argument
    reservation = "capacity reservation: its id, or the ARN of a resource group"
    add("--capacity-reservation", metavar="ID", help=reservation)
    block = "the reservation is a capacity block for ML"
    add("--capacity-block", action="store_true", help=block)


def _add_database_settings(parser: CommandLineParser) -> None:
    add = parser.add_argument
    database = "MySQL server for Slurm's accounting, reachable from the head node"
    add("--database", metavar="HOST[:PORT]", help=database)
    add("--database-user", metavar="NAME", help="user of the database")
    arn = "ARN of the user's password in AWS Secrets Manager"
    add("--database-password-secret", metavar="ARN", help=arn)
    name = "name of the database (default: derived from the cluster's name)"
    add("--database-name", metavar="NAME", help=name)
    group = "security group of the head node that may connect to the database"
    add("--database-security-group", metavar="ID", help=group)


def _parse_region(text: str) -> str:
    if not re.fullmatch(r"[a-z]{2,4}(-[a-z]+)+-\d{1,2}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not an AWS region, such as us-west-2")
    return text


def _parse_fsx_size(text: str) -> int:
    """Return a capacity in GiB that FSx for Lustre accepts (AWS, CreateFileSystem)."""
    size = parse_positive_int(text)
    if size != 1200 and size % 2400:
        raise argparse.ArgumentTypeError(f"{text} is neither 1200 nor a multiple of 2400")
    return size


def _parse_s3_url(url: str) -> str:
    if not re.fullmatch(r"s3://[a-z0-9.-]+/.*[^/]", url):
        raise argparse.ArgumentTypeError(f"{url} is not of the form s3://BUCKET/DIR")
    return url


def _write_cluster(config: DictConfig, arguments: argparse.Namespace) -> int:
    launcher = compose.import_launcher_module("parallelcluster._cluster_config")
    hardware = OmegaConf.to_object(config.hardware)
    compiler = OmegaConf.to_object(config.compiler)
    site = {field.name: getattr(arguments, field.name) for field in fields(launcher.ClusterSite)}
    described = launcher.build_cluster_config(hardware, compiler, launcher.ClusterSite(**site))
    output = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    (output / "cluster.yaml").write_text(
        compose.import_launcher_module("_yaml_writer").format_yaml(described)
    )
    for script in sorted(launcher.SCRIPTS_DIR.glob("*.sh")):
        shutil.copy(script, output)
    copy = ("aws", "s3", "cp", "--recursive", "--exclude", "*", "--include", "*.sh")
    create = ("pcluster", "create-cluster", "--cluster-name", "hlat", "--region", arguments.region)
    print(shlex.join((*copy, str(output), arguments.scripts)))
    print(shlex.join((*create, "--cluster-configuration", str(output / "cluster.yaml"))))
    cost = compose.import_launcher_module("_hourly_cost").format_hourly_cost(hardware)
    print(f"{cost}; the nodes run until you delete the cluster")
    return ExitCode.FINISHED


if __name__ == "__main__":
    run_and_exit(main)
