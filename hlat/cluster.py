"""Writes what AWS ParallelCluster makes a cluster of: `python -m hlat.cluster`.

    the run's overrides (hardware, compiler) + flags -> cluster.yaml and the scripts of its nodes

Nothing is sent anywhere: the commands that do so are printed, with the price of what they start.
"""

import argparse
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from hlat.config import compose
from hlat.config.arguments import Parser, leave
from hlat.config.errors import ConfigError, Exit

_EXAMPLES = """\
example:
  python -m hlat.cluster experiment=hlat_70b hardware.nodes=64 --region us-west-2 \\
    --subnet subnet-0aaa --head-subnet subnet-0bbb --key my-key --scripts s3://my-bucket/hlat

Of the run's configuration only hardware and compiler.neuron_sdk count.
docs/parallelcluster.md tells the way from an empty account to a running job."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files, print what to do with them, and return the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return _write(compose.composed(arguments.overrides), arguments)
    except ConfigError as error:
        for problem in error.problems:
            print(f"hlat: {problem}", file=sys.stderr)
        return Exit.CONFIGURATION
    except OSError as error:
        print(f"hlat: {error.filename}: {error.strerror}", file=sys.stderr)
        return Exit.FAILED


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m hlat.cluster",
        description="Write the configuration of an AWS ParallelCluster for a run, and its scripts.",
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="OVERRIDE", help="those of the run")
    add("--region", required=True, help="of AWS, such as us-west-2")
    add("--subnet", required=True, metavar="ID", help="private subnet of the compute nodes")
    add("--head-subnet", required=True, metavar="ID", help="public subnet of the head node")
    add("--key", required=True, metavar="NAME", help="key pair to log in with")
    scripts = "where the nodes will find their scripts: s3://BUCKET/FOLDER"
    add("--scripts", required=True, type=_folder_in_s3, metavar="URL", help=scripts)
    head = "instance type of the head node (default: m6i.4xlarge)"
    add("--head", default="m6i.4xlarge", metavar="TYPE", help=head)
    fsx = "size of FSx for Lustre: 1200 or a multiple of 2400 (default: 9600)"
    add("--fsx-gib", default=9600, type=int, metavar="N", help=fsx)
    output = "folder to write (default: cluster)"
    add("--output", default=Path("cluster"), type=Path, metavar="DIR", help=output)
    return parser


def _folder_in_s3(text: str) -> str:
    if not re.fullmatch(r"s3://[a-z0-9.-]+/.*[^/]", text):
        raise argparse.ArgumentTypeError(f"{text} is not of the form s3://BUCKET/FOLDER")
    return text


def _write(config: DictConfig, arguments: argparse.Namespace) -> int:
    launcher = compose.launcher_module("_parallelcluster")
    hardware = OmegaConf.to_object(config.hardware)
    compiler = OmegaConf.to_object(config.compiler)
    site = {field.name: getattr(arguments, field.name) for field in fields(launcher.Site)}
    described = launcher.describe(hardware, compiler, launcher.Site(**site))
    output = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    (output / "cluster.yaml").write_text(compose.launcher_module("_yaml").as_yaml(described))
    for script in sorted(launcher.SCRIPTS.glob("*.sh")):
        shutil.copy(script, output)
    copy = ("aws", "s3", "cp", "--recursive", "--exclude", "*", "--include", "*.sh")
    create = ("pcluster", "create-cluster", "--cluster-name", "hlat", "--region", arguments.region)
    print(shlex.join((*copy, str(output), arguments.scripts)))
    print(shlex.join((*create, "--cluster-configuration", str(output / "cluster.yaml"))))
    print(_price(config))
    return Exit.FINISHED


def _price(config: DictConfig) -> str:
    hardware = config.hardware
    nodes = f"{hardware.nodes} x {hardware.name} run until you delete the cluster"
    if hardware.price_usd_per_hour is None:
        return f"{nodes}; their price is not known here"
    price = hardware.nodes * hardware.price_usd_per_hour
    return f"{nodes}, for {price:,.2f} USD per hour (price of {hardware.price_date})"


if __name__ == "__main__":
    leave(main)
