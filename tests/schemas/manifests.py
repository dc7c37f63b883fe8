"""Reads manifests as their publishers' schemas do, and tells what these do not know.

    python manifests.py MANIFEST.yaml...

Runs in .venv-schemas. JobSet: the models of kubeflow_trainer_api. PyTorchJob: those of
kubeflow-training. What lies within them, jobs and pods, and all else: the JSON schemas of
Kubernetes that kubernetes-validate brings, where an unknown field is an error. PodGroup: only its
metadata, as none of these packages has its schema.
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
"""Of Kubernetes."""


def problems(document: dict[str, Any]) -> list[str]:
    """Return what is wrong with a document."""
    try:
        checks = {"JobSet": jobset, "PyTorchJob": pytorch_job, "PodGroup": pod_group}
        return checks.get(document["kind"], known)(document)
    except Exception as error:  # each library has its own
        return [f"{type(error).__name__}: {error}"]


def jobset(document: dict[str, Any]) -> list[str]:
    read = JobsetV1alpha2JobSet.from_dict(document).to_dict()
    return lost(document, read) + [
        problem
        for part in document["spec"]["replicatedJobs"]
        for problem in known({"apiVersion": "batch/v1", "kind": "Job", **part["template"]})
    ]


def pytorch_job(document: dict[str, Any]) -> list[str]:
    client = ApiClient()
    model = client._ApiClient__deserialize(document, "KubeflowOrgV1PyTorchJob")
    return lost(document, client.sanitize_for_serialization(model)) + [
        problem
        for replicas in document["spec"]["pytorchReplicaSpecs"].values()
        for problem in known({"apiVersion": "v1", "kind": "PodTemplate", "template": pod(replicas)})
    ]


def pod_group(document: dict[str, Any]) -> list[str]:
    """Check the metadata; tests/unit/launchers compares the rest with the plugin's documentation."""
    metadata = document["metadata"]
    return known({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})


def pod(replicas: dict[str, Any]) -> dict[str, Any]:
    return replicas["template"]


def known(document: dict[str, Any]) -> list[str]:
    kubernetes_validate.validate(document, VERSION, strict=True)
    return []


def lost(written: Any, read: Any, place: str = "") -> list[str]:
    """Return what a model did not keep, as it knows no such field."""
    if isinstance(written, dict):
        return [
            problem
            for key, value in written.items()
            for problem in (
                lost(value, read[key], f"{place}.{key}")
                if key in read
                else [f"{place}.{key} is unknown"]
            )
        ]
    if isinstance(written, list):
        pairs = enumerate(zip(written, read, strict=True))
        return [problem for i, (w, r) in pairs for problem in lost(w, r, f"{place}[{i}]")]
    return []


if __name__ == "__main__":
    told = [
        [
            problem
            for document in yaml.safe_load_all(Path(file).read_text())
            for problem in problems(document)
        ]
        for file in sys.argv[1:]
    ]
    print(json.dumps(told))
