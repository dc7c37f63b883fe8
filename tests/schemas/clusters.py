"""Validate cluster configurations with ParallelCluster, and print the results as JSON.

    python clusters.py CLUSTER.yaml... INSTANCE_TYPE...

Run in .venv-schemas: the schema, the validators, and the CloudFormation template of each file. moto
simulates AWS in this process; other connections are errors. moto has EC2's descriptions of instance
types; the resources that a file names are created first.
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
from moto import mock_aws

IMAGE = {
    "ami_id": "ami-0123456789abcdef0",
    "name": f"aws-parallelcluster-{version('aws-parallelcluster')}-ubuntu-2404-lts-hvm-x86_64",
    "architecture": "x86_64",
    "virtualization_type": "hvm",
    "root_device_type": "ebs",
}
"""Image of ParallelCluster, the only one that moto has."""
BLOCK = "cr-0123456789abcdef0"
NOT_OFFERED = ["trn2u.48xlarge"]
"""Types that moto describes but does not offer in any region."""
SUPPRESSED_VALIDATORS = {
    *("AdditionalIamPolicyValidator", "ComputeResourceLaunchTemplateValidator"),
    *("HeadNodeLaunchTemplateValidator", "KeyPairValidator"),
}
"""Validators that need what moto does not simulate, mainly dry runs."""


def isolate() -> None:
    """Disable connections and AWS variables, and give moto the image."""

    def reject_connection(*arguments: object) -> None:
        raise ConnectionError(f"a connection to {arguments[-1]} was attempted")

    socket.socket.connect = reject_connection
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump([IMAGE], file)
        file.flush()
        os.environ["MOTO_AMIS_PATH"] = file.name
        import_module("moto.ec2")  # reads it


def create_resources(text: str, region: str) -> str:
    """Create the network, key pair and scripts that a file names; return it with moto's ids."""
    ec2, s3 = boto3.client("ec2"), boto3.client("s3")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    for setting in ("EnableDnsHostnames", "EnableDnsSupport"):
        ec2.modify_vpc_attribute(VpcId=vpc, **{setting: {"Value": True}})
    gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
    for i, name in enumerate(sorted(set(re.findall(r"subnet-\w+", text)))):
        block = f"10.0.{16 * i}.0/20"
        made = ec2.create_subnet(VpcId=vpc, CidrBlock=block, AvailabilityZone=f"{region}c")
        text = re.sub(rf"{name}\b", made["Subnet"]["SubnetId"], text)  # moto assigns random ids
    for name in set(re.findall(r"KeyName: ([\w-]+)\n", text)):
        ec2.create_key_pair(KeyName=name)
    for name in set(re.findall(r"sg-\w+", text)):
        made = ec2.create_security_group(GroupName=name, Description=name, VpcId=vpc)
        text = text.replace(name, made["GroupId"])
    for name in set(re.findall(r":secret:([\w-]+)-", text)):
        arn = boto3.client("secretsmanager").create_secret(Name=name, SecretString="x")["ARN"]
        text = re.sub(r"arn:\S+:secret:\S+", arn, text)
    for bucket, key in set(re.findall(r"s3://([^/\s]+)/(\S+)", text)):
        if bucket not in [b["Name"] for b in s3.list_buckets()["Buckets"]]:
            where = {"LocationConstraint": region}
            s3.create_bucket(Bucket=bucket, CreateBucketConfiguration=where)
        s3.put_object(Bucket=bucket, Key=key, Body=b"")
    return text


def create_reservation(plain: dict, region: str) -> None:
    """Add the capacity reservation of the nodes to the caches of ParallelCluster: moto has none.

    BLOCK is the id of a capacity block; all other ids, and those of a group, are on demand.
    """
    from pcluster.aws.aws_api import AWSApi
    from pcluster.aws.aws_resources import CapacityReservationInfo

    (nodes,) = plain["Scheduling"]["SlurmQueues"][0]["ComputeResources"]
    if (target := nodes.get("CapacityReservationTarget")) is None:
        return
    api = AWSApi.instance()
    name = target.get("CapacityReservationId", "cr-0of0a0group")
    api.ec2.capacity_reservations_cache[name] = CapacityReservationInfo(
        {
            "CapacityReservationId": name,
            "CapacityReservationArn": f"arn:aws:ec2:{region}:123456789012:capacity-reservation/{name}",
            "InstanceType": nodes["InstanceType"],
            "InstancePlatform": "Linux/UNIX",
            "AvailabilityZone": f"{region}c",
            "ReservationType": "capacity-block" if name == BLOCK else "default",
            "State": "active",
            "TotalInstanceCount": 4,
            "AvailableInstanceCount": 4,
        }
    )
    pool = {
        "GroupConfiguration": {"Configuration": [{"Type": "AWS::EC2::CapacityReservationPool"}]}
    }
    api.resource_groups.get_capacity_reservation_ids_from_group_resources = lambda group: [name]
    api.resource_groups.get_group_configuration = lambda group: pool


def validate_cluster(file: Path) -> dict[str, object]:
    """Return errors of the schema or the validators, or else warnings and the launch template."""
    from pcluster.aws.aws_api import AWSApi
    from pcluster.config.common import TypeMatchValidatorsSuppressor
    from pcluster.schemas.cluster_schema import ClusterSchema

    text = file.read_text()
    region = os.environ["AWS_DEFAULT_REGION"] = yaml.safe_load(text)["Region"]
    with mock_aws():
        AWSApi.reset()
        try:
            plain = yaml.safe_load(create_resources(text, region))
            create_reservation(plain, region)
            ec2 = AWSApi.instance().ec2
            offered = [*ec2.list_instance_types(), *NOT_OFFERED]
            ec2.list_instance_types = lambda: offered
            config = ClusterSchema(cluster_name="hlat").load(plain)
        except ValidationError as error:
            return {"schema": error.messages}
        asyncio.set_event_loop(asyncio.new_event_loop())
        found = config.validate({TypeMatchValidatorsSuppressor(SUPPRESSED_VALIDATORS)})
        if errors := [f.message for f in found if f.level.name == "ERROR"]:
            return {"errors": errors}
        noted = sorted(f.validator_type for f in found)
        return {"noted": noted, **build_launch_template(config, region)}


def build_launch_template(config: object, region: str) -> dict[str, object]:
    """Return the settings of the launch template of compute nodes."""
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
    interfaces = [interface.get("InterfaceType") for interface in template["NetworkInterfaces"]]
    return {
        "interfaces": interfaces,
        "placed": "GroupName" in template.get("Placement", {}),
        "reservation": template.get("CapacityReservationSpecification"),
        "market": template.get("InstanceMarketOptions"),
    }


def read_instance_type(instance_type: str) -> dict[str, object]:
    """Return the properties of an instance type in EC2 that hlat has too."""
    with mock_aws():
        ec2 = boto3.client("ec2", region_name="us-east-2")
        (found,) = ec2.describe_instance_types(InstanceTypes=[instance_type])["InstanceTypes"]
    chips = found.get("GpuInfo", {}).get("Gpus") or found.get("NeuronInfo", {}).get("NeuronDevices")
    return {
        "chips": sum(chip["Count"] for chip in chips) if chips else None,
        "efa": found["NetworkInfo"]["EfaInfo"]["MaximumEfaInterfaces"],
        "blocks": "capacity-block" in found["SupportedUsageClasses"],
        "memory_gib": found["MemoryInfo"]["SizeInMiB"] / 1024,
        "vcpus": found["VCpuInfo"]["DefaultVCpus"],
        "placed": "cluster" in found["PlacementGroupInfo"]["SupportedStrategies"],
    }


if __name__ == "__main__":
    isolate()
    print(
        json.dumps(
            [
                validate_cluster(Path(argument))
                if argument.endswith(".yaml")
                else read_instance_type(argument)
                for argument in sys.argv[1:]
            ]
        )
    )
