"""Validate manifests with the schemas of their publishers, and print the problems as JSON.

    python manifests.py MANIFEST.yaml...

Run in .venv-schemas. JobSet: the models of kubeflow_trainer_api. PyTorchJob: those of
kubeflow-training. Jobs and pods within them, and other manifests: the JSON schemas of Kubernetes in
kubernetes-validate, where an unknown field is an error. PodGroup: only its metadata, as none of
these packages has its schema.
"""

import json
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from kubeflow.training import ApiClient
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

VERSION = "1.34"
"""Version of Kubernetes."""


def find_problems(document: dict[str, Any]) -> list[str]:
    """Return the problems of a document."""
    try:
        checks = {"JobSet": jobset, "PyTorchJob": pytorch_job, "PodGroup": pod_group}
        return checks.get(document["kind"], validate)(document)
    except Exception as error:  # each library raises different classes
        return [f"{type(error).__name__}: {error}"]


def jobset(document: dict[str, Any]) -> list[str]:
    read = JobsetV1alpha2JobSet.from_dict(document).to_dict()
    return find_unknown_fields(document, read) + [
        problem
        for part in document["spec"]["replicatedJobs"]
        for problem in validate({"apiVersion": "batch/v1", "kind": "Job", **part["template"]})
    ]


def pytorch_job(document: dict[str, Any]) -> list[str]:
    client = ApiClient()
    model = client._ApiClient__deserialize(document, "KubeflowOrgV1PyTorchJob")
    return find_unknown_fields(document, client.sanitize_for_serialization(model)) + [
        problem
        for replicas in document["spec"]["pytorchReplicaSpecs"].values()
        for problem in validate(
            {"apiVersion": "v1", "kind": "PodTemplate", "template": pod(replicas)}
        )
    ]


def pod_group(document: dict[str, Any]) -> list[str]:
    """Check the metadata; tests/unit/launchers compares the rest with the plugin's documentation."""
    metadata = document["metadata"]
    return validate({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})


def pod(replicas: dict[str, Any]) -> dict[str, Any]:
    return replicas["template"]


def validate(document: dict[str, Any]) -> list[str]:
    kubernetes_validate.validate(document, VERSION, strict=True)
    return []


def find_unknown_fields(written: Any, read: Any, path: str = "") -> list[str]:
    """Return the fields that a model dropped because they are unknown."""
    if isinstance(written, dict):
        return [
            problem
            for key, value in written.items()
            for problem in (
                find_unknown_fields(value, read[key], f"{path}.{key}")
                if key in read
                else [f"{path}.{key} is unknown"]
            )
        ]
    if isinstance(written, list):
        pairs = enumerate(zip(written, read, strict=True))
        return [
            problem for i, (w, r) in pairs for problem in find_unknown_fields(w, r, f"{path}[{i}]")
        ]
    return []


if __name__ == "__main__":
    results = [
        [
            problem
            for document in yaml.safe_load_all(Path(file).read_text())
            for problem in find_problems(document)
        ]
        for file in sys.argv[1:]
    ]
    print(json.dumps(results))
