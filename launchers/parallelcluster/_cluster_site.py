"""Location and resources of a cluster, with their validation before a file is written.

Messages contain no value of database_password_secret, which may be a password by mistake.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hlat.config.hardware import HardwareConfig

from .._job_spec import NODE_TYPES

MAX_CAPACITY_BLOCK_NODES = 64
"""Instances of one capacity block
(https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-capacity-blocks.html)."""
_RESERVATION_ID = re.compile(r"cr-[0-9a-f]{8,}")
_RESERVATION_GROUP = re.compile(r"arn:aws[a-z-]*:resource-groups:([a-z0-9-]+):\d{12}:group/.+")
_SECRET = re.compile(r"arn:aws[a-z-]*:secretsmanager:([a-z0-9-]+):\d{12}:secret:.+")
_DATABASE_URI = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*(:\d{1,5})?")
_DATABASE_NAME = re.compile(r"[0-9a-z_]{1,64}")
"""DatabaseName in ParallelCluster's schema."""
_SECURITY_GROUP = re.compile(r"sg-[0-9a-z]+")


@dataclass(frozen=True)
class ClusterSite:
    """Location and resources of a cluster: settings of `hlat cluster`.

    The subnet of the compute nodes is private, as nodes with several network cards get no public
    address; `scripts` is the s3://bucket/directory with the scripts of the nodes. `database` is
    HOST[:PORT] of a MySQL server for Slurm's accounting, and `capacity_reservation` an id or the
    ARN of a resource group.
    """

    region: str
    subnet: str
    head_subnet: str
    key: str
    scripts: str
    head: str
    fsx_gib: int
    capacity_reservation: str | None = None
    capacity_block: bool = False
    database: str | None = None
    database_user: str | None = None
    database_password_secret: str | None = None
    database_name: str | None = None
    database_security_group: str | None = None

    @property
    def uses_reservation_id(self) -> bool:
        """Return True if the reservation is an id, and not a resource group."""
        return _RESERVATION_ID.fullmatch(self.capacity_reservation or "") is not None


def find_site_problems(site: ClusterSite, hardware: HardwareConfig) -> list[str]:
    """Return the contradictions between the settings, or with the hardware."""
    return [*_find_reservation_problems(site, hardware), *_find_database_problems(site)]


def _find_reservation_problems(site: ClusterSite, hardware: HardwareConfig) -> Iterator[str]:
    reservation = site.capacity_reservation
    group = _RESERVATION_GROUP.fullmatch(reservation or "")
    if reservation is not None and not site.uses_reservation_id:
        if group is None:
            yield (
                f"capacity_reservation={reservation} is neither an id nor a resource group; use "
                "cr-0123456789abcdef0 or arn:aws:resource-groups:REGION:ACCOUNT:group/NAME"
            )
        elif group[1] != site.region:
            yield _format_region_problem("capacity_reservation", group[1], site.region)
    if site.capacity_block:
        yield from _find_capacity_block_problems(site, hardware, is_group=group is not None)


def _find_capacity_block_problems(
    site: ClusterSite, hardware: HardwareConfig, is_group: bool
) -> Iterator[str]:
    if site.capacity_reservation is None:
        yield "capacity_block=true needs a reservation; set capacity_reservation=cr-..."
    elif is_group:
        yield (
            f"capacity_block=true and capacity_reservation={site.capacity_reservation}: "
            "ParallelCluster accepts a capacity block by id only; set capacity_reservation=cr-..."
        )
    node_type = NODE_TYPES.get(hardware.name)
    if node_type is not None and not node_type.has_capacity_blocks:
        names = [name for name, other in NODE_TYPES.items() if other.has_capacity_blocks]
        yield (
            f"capacity_block=true, but EC2 has no capacity blocks of hardware.name={hardware.name};"
            f" use {', '.join(names)}, or set capacity_block=false"
        )
    if hardware.nodes > MAX_CAPACITY_BLOCK_NODES:
        yield (
            f"hardware.nodes={hardware.nodes} exceeds the {MAX_CAPACITY_BLOCK_NODES} instances of a"
            f" capacity block; set hardware.nodes={MAX_CAPACITY_BLOCK_NODES}, or "
            "capacity_block=false with an on-demand capacity reservation"
        )


def _find_database_problems(site: ClusterSite) -> Iterator[str]:
    required = {
        "database": site.database,
        "database_user": site.database_user,
        "database_password_secret": site.database_password_secret,
    }
    optional = {
        "database_name": site.database_name,
        "database_security_group": site.database_security_group,
    }
    given = [key for key, value in (required | optional).items() if value is not None]
    missing = [key for key, value in required.items() if value is None]
    if given and missing:
        yield (
            f"{', '.join(f'{key}=' for key in given)} given without "
            f"{' and '.join(f'{key}=' for key in missing)}; set all of {', '.join(required)}"
        )
    if site.database is not None and not _DATABASE_URI.fullmatch(site.database):
        yield f"database={site.database} is not of the form HOST or HOST:PORT, without a scheme"
    if site.database_password_secret is not None:
        yield from _find_secret_problems(site.database_password_secret, site.region)
    if site.database_name is not None and not _DATABASE_NAME.fullmatch(site.database_name):
        yield (
            f"database_name={site.database_name} is not a name of a database; use at most 64 "
            "lower-case letters, digits and _"
        )
    group = site.database_security_group
    if group is not None and not _SECURITY_GROUP.fullmatch(group):
        yield f"database_security_group={group} is not an id of a security group, such as sg-0aaa"


def _find_secret_problems(secret: str, region: str) -> Iterator[str]:
    arn = _SECRET.fullmatch(secret)
    if arn is None:
        yield (
            "database_password_secret is not the ARN of a secret; store the password in AWS Secrets"
            " Manager and set arn:aws:secretsmanager:REGION:ACCOUNT:secret:NAME"
        )
    elif arn[1] != region:
        yield _format_region_problem("database_password_secret", arn[1], region)


def _format_region_problem(key: str, region: str, cluster_region: str) -> str:
    return (
        f"{key} is in region {region}, but region={cluster_region}; use one of {cluster_region}, "
        f"or set region={region}"
    )
