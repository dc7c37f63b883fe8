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
from hlat.config.argument_parser import CommandLineParser, run_and_exit, run_command
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
    add("overrides", nargs="*", metavar="OVERRIDE", help="overrides of the run's configuration")
    add("--region", required=True, metavar="NAME", help="AWS region, such as us-west-2")
    add("--subnet", required=True, metavar="ID", help="private subnet of the compute nodes")
    add("--head-subnet", required=True, metavar="ID", help="public subnet of the head node")
    add("--key", required=True, metavar="NAME", help="EC2 key pair for the login")
    scripts = "S3 directory from which nodes read their scripts"
    add("--scripts", required=True, type=_parse_s3_url, metavar="s3://BUCKET/DIR", help=scripts)
    head = "instance type of the head node (default: m6i.4xlarge)"
    add("--head", default="m6i.4xlarge", metavar="TYPE", help=head)
    fsx = "size of FSx for Lustre: 1200 or a multiple of 2400 (default: 9600)"
    add("--fsx-gib", default=9600, type=int, metavar="N", help=fsx)
    output = "directory to write (default: cluster)"
    add("--output", default=Path("cluster"), type=Path, metavar="DIR", help=output)
    return parser


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
    print(_format_price(config))
    return ExitCode.FINISHED


def _format_price(config: DictConfig) -> str:
    hardware = config.hardware
    nodes = f"{hardware.nodes} x {hardware.name} run until you delete the cluster"
    if hardware.price_usd_per_hour is None:
        return f"{nodes}; their price is unknown"
    price = hardware.nodes * hardware.price_usd_per_hour
    return f"{nodes}, for {price:,.2f} USD per hour (price of {hardware.price_date})"


if __name__ == "__main__":
    run_and_exit(main)
