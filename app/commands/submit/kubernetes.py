"""Kubernetes: an indexed Job with a pod for each machine, and a headless Service by which they find the first."""

import json
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from app.commands.submit.engine import Engine, advice, called, watching
from app.commands.submit.job import PORT, Job
from app.commands.submit.job_file import TEMPLATES, in_yaml, list_in_yaml
from app.errors import UserError
from app.launching import program
from app.storage.addresses import address

if TYPE_CHECKING:
    from app.commands.submit.command import Options

_LONGEST = 52  # letters; Kubernetes adds the number of a pod, and allows 63 in all
_OF_RUN = "samestep/run"
"""The annotation of a Job that names its run."""


class Fields(NamedTuple):
    """What a template for Kubernetes may name."""

    name: str
    nodes: int
    processes: int
    run: str
    image: str
    port: int
    launch: str
    training: str
    secret: str
    """The container's envFrom."""
    gpus: str
    """A line of the container's limits."""
    mounts: str
    volumes: str


class Kubernetes(Engine):
    """Kubernetes, by kubectl."""

    client = "kubectl"
    suffix = ".kubernetes.yaml"
    template = TEMPLATES / "kubernetes.yaml"
    options = ("image", "volume", "secret")

    def job_name(self, text: str) -> str:
        """Keep small letters, digits and dashes, and as many as a host name may have."""
        name = re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-")[:_LONGEST].rstrip("-")
        return name if name and name[0].isalpha() else f"run-{name}"[:_LONGEST].rstrip("-")

    def fields(self, job: Job, options: "Options") -> NamedTuple:
        """Name the profile and the recipe as the user did: they lie in the image."""
        if not options.image:
            raise UserError("--image is missing: name the container image with this project, such as --image lab/train")
        claim, _, place = options.volume.partition(":")
        if options.volume and not (re.fullmatch(r"[a-z0-9][a-z0-9.-]*", claim) and place.startswith("/")):
            raise UserError(f"--volume {options.volume}: give CLAIM:/FOLDER, such as runs:/runs")
        if options.secret and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", options.secret):
            raise UserError(f"--secret {options.secret}: give the name of a Secret, not what is in it")
        _check_kept(job.run, place)
        launch = job.launch(program.name().split(), job.given)
        return Fields(
            job.name,
            job.nodes,
            job.processes,
            in_yaml(job.run),
            in_yaml(options.image),
            PORT,
            list_in_yaml(list(map(_literal, launch))),
            list_in_yaml(list(map(_literal, job.training))),
            f"- secretRef: {{ name: {in_yaml(options.secret)} }}" if options.secret else "",
            f"nvidia.com/gpu: {job.gpus}" if job.gpus else "",
            f"- {{ name: runs, mountPath: {in_yaml(place)} }}" if place else "",
            f"- {{ name: runs, persistentVolumeClaim: {{ claimName: {in_yaml(claim)} }} }}" if claim else "",
        )

    def submit(self, file: Path, job: Job) -> str:
        """Apply it with kubectl, in the place of a Job of the run that has ended."""
        words = ["kubectl", "apply", "-f", str(file)]
        if not self.is_here:
            return self.by_hand(file, words)
        there = _there(job)
        said = f"the job {job.name} is there already"
        if there != "runs":
            if there == "ended":  # Kubernetes starts no pod of it again
                called(["kubectl", "delete", "job", job.name, "--wait=true"])
            called(words)
            said = f"submitted as the job {job.name}"
        watch = [f"kubectl get pods -l job-name={job.name}", f"kubectl logs -f -l job-name={job.name} --prefix"]
        watch += [watching(job.run)] if address(job.run) else []
        return f"{said}\n{advice(watch, f'kubectl delete job {job.name}')}"


def _check_kept(run: str, mounted: str) -> None:
    """Refuse a run's folder that would be lost with its pod.

    Args:
        mounted: where the volume is; empty if there is none.

    Raises:
        UserError: it lies neither in a bucket nor on the volume.
    """
    if address(run):
        return
    if not mounted or not PurePosixPath(run).is_relative_to(mounted) or ".." in PurePosixPath(run).parts:
        where = f"{mounted}/NAME" if mounted else "a folder of a --volume"
        raise UserError(
            f"--run.dir {run}: it would be lost with the pod: give {where}, or a bucket, such as s3://bucket/runs/NAME"
        )


def _literal(word: str) -> str:
    """Return a word as a container's command has it: Kubernetes replaces $(NAME), and reads $$ as $."""
    return word.replace("$", "$$")


def _there(job: Job) -> str:
    """Tell whether a job's name is free in the cluster (empty), or its Job "runs", or has "ended".

    Raises:
        UserError: the name is that of a Job of another run.
    """
    found = called(["kubectl", "get", "job", job.name, "--ignore-not-found", "--output=json"]).strip()
    if not found:
        return ""
    try:
        there: dict[str, Any] = json.loads(found)
        run = there["metadata"].get("annotations", {}).get(_OF_RUN)
        conditions = there.get("status", {}).get("conditions") or []
    except (ValueError, LookupError, AttributeError, TypeError):
        raise UserError(f"kubectl get job {job.name} has answered something other than a Job") from None
    if run != job.run:
        raise UserError(f"the cluster has a job {job.name} that is not this run's: give another --name")
    ended = any(each.get("type") in ("Complete", "Failed") and each.get("status") == "True" for each in conditions)
    return "ended" if ended else "runs"
