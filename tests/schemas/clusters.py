"""Reads clusters' configurations as ParallelCluster would, and tells what it says of each.

    python clusters.py CLUSTER.yaml...

Runs in .venv-schemas: its schema, its validators, and the CloudFormation template that it makes of
the file. AWS is played by moto, in this process; every connection to elsewhere is refused. moto has
EC2's own descriptions of instance types; what the file names is made in it first.
"""

import asyncio
import json
import os
import re
import socket
import sys
import tempfile
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import boto3
import yaml
from marshmallow import ValidationError

IMAGE = {
    "ami_id": "ami-0123456789abcdef0",
    "name": f"aws-parallelcluster-{version('aws-parallelcluster')}-ubuntu-2404-lts-hvm-x86_64",
    "architecture": "x86_64",
    "virtualization_type": "hvm",
    "root_device_type": "ebs",
}
"""The only image in the world: ParallelCluster's own."""
UNANSWERED = {
    *("AdditionalIamPolicyValidator", "ComputeResourceLaunchTemplateValidator"),
    *("HeadNodeLaunchTemplateValidator", "KeyPairValidator"),
}
"""Validators that ask for what moto does not play, dry runs above all."""


def isolate() -> None:
    """Let nothing out of this process, and let moto know of the image alone."""

    def refuse(*words: object) -> None:
        raise ConnectionError(f"a connection to {words[-1]} was attempted")

    socket.socket.connect = refuse
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump([IMAGE], file)
        file.flush()
        os.environ["MOTO_AMIS_PATH"] = file.name
        import_module("moto.ec2")  # reads it


def make_world(text: str, region: str) -> str:
    """Make the network, key pair and scripts that a file names; return it with moto's names."""
    ec2, s3 = boto3.client("ec2"), boto3.client("s3")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    for setting in ("EnableDnsHostnames", "EnableDnsSupport"):
        ec2.modify_vpc_attribute(VpcId=vpc, **{setting: {"Value": True}})
    gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
    for i, name in enumerate(sorted(set(re.findall(r"subnet-\w+", text)))):
        block = f"10.0.{16 * i}.0/20"
        made = ec2.create_subnet(VpcId=vpc, CidrBlock=block, AvailabilityZone=f"{region}c")
        text = text.replace(name, made["Subnet"]["SubnetId"])
    for name in set(re.findall(r"KeyName: ([\w-]+)\n", text)):
        ec2.create_key_pair(KeyName=name)
    for bucket, key in set(re.findall(r"s3://([^/\s]+)/(\S+)", text)):
        if bucket not in [b["Name"] for b in s3.list_buckets()["Buckets"]]:
            where = {"LocationConstraint": region}
            s3.create_bucket(Bucket=bucket, CreateBucketConfiguration=where)
        s3.put_object(Bucket=bucket, Key=key, Body=b"")
    return text


def examine(file: Path) -> dict[str, object]:
    """Return what the schema and the validators say, and what would be started."""
    from moto import mock_aws
    from pcluster.aws.aws_api import AWSApi
    from pcluster.config.common import TypeMatchValidatorsSuppressor
    from pcluster.schemas.cluster_schema import ClusterSchema

    text = file.read_text()
    region = os.environ["AWS_DEFAULT_REGION"] = yaml.safe_load(text)["Region"]
    with mock_aws():
        AWSApi.reset()
        try:
            plain = yaml.safe_load(make_world(text, region))
            config = ClusterSchema(cluster_name="hlat").load(plain)
        except ValidationError as error:
            return {"schema": error.messages}
        asyncio.set_event_loop(asyncio.new_event_loop())
        found = config.validate({TypeMatchValidatorsSuppressor(UNANSWERED)})
        if errors := [f.message for f in found if f.level.name == "ERROR"]:
            return {"errors": errors}
        noted = sorted(f.validator_type for f in found)
        return {"noted": noted, **started(config, region)}


def started(config: object, region: str) -> dict[str, object]:
    """Return how compute nodes are started, as CloudFormation is told of it."""
    from pcluster.models.s3_bucket import S3Bucket
    from pcluster.templates.cdk_builder import CDKTemplateBuilder

    boto3.client("s3").create_bucket(
        Bucket="cluster", CreateBucketConfiguration={"LocationConstraint": region}
    )
    bucket = S3Bucket("hlat", "hlat", "clusters/hlat", name="cluster")
    _, stacks = CDKTemplateBuilder.build_cluster_template(config, bucket, "hlat")
    (template,) = [
        resource["Properties"]["LaunchTemplateData"]
        for stack in stacks
        for resource in stack["content"]["Resources"].values()
        if resource["Type"] == "AWS::EC2::LaunchTemplate"
    ]
    kinds = [interface.get("InterfaceType") for interface in template["NetworkInterfaces"]]
    return {"interfaces": kinds, "placed": "GroupName" in template["Placement"]}


if __name__ == "__main__":
    isolate()
    print(json.dumps([examine(Path(file)) for file in sys.argv[1:]]))
