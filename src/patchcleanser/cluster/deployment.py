"""The HTTP app as a Ray Serve deployment: replicas, autoscaling, rolling updates, health."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from typing import Any

from patchcleanser.errors import ClusterError, InputError, MissingDependencyError
from patchcleanser.service.config import ServiceSettings

try:
    from ray import serve
except ImportError as error:
    raise MissingDependencyError.of("ray", "ray") from error

from patchcleanser.cluster.runner import connect, worker_count

NAME = "patchcleanser"
"""The application's name in Ray Serve: deploying under it again is a rolling update."""


@dataclass(frozen=True)
class Replicas:
    """How many processes with the model, and what each has."""

    least: int = 1
    most: int = 1
    """More than `least`: as many as the load needs."""
    cpus: int = 1
    gpus: float = 0
    ongoing: int = 16
    """Requests at a replica that call for another one."""

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise InputError(f"replicas are 1 or more, from the least to the most, got {self.least}-{self.most}")

    @classmethod
    def parse(cls, text: str, **resources: Any) -> Replicas:
        """2, or 1-8 to follow the load.

        >>> Replicas.parse("1-8").most
        8
        """
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
        if match is None:
            raise InputError(f"--replicas is a number, or a range as 1-8, got {text!r}")
        return cls(int(match[1]), int(match[2] or match[1]), **resources)

    @property
    def options(self) -> dict[str, Any]:
        """As Ray Serve has them."""
        resources = {"num_cpus": self.cpus, "num_gpus": self.gpus}
        if self.least == self.most:
            return {"num_replicas": self.least, "ray_actor_options": resources}
        scaling = {"min_replicas": self.least, "max_replicas": self.most, "target_ongoing_requests": self.ongoing}
        return {"autoscaling_config": scaling, "ray_actor_options": resources}


def deploy(
    settings: ServiceSettings,
    replicas: Replicas | None = None,
    *,
    address: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    root_path: str = "",
) -> None:
    """Serve the app on a Ray cluster. If it is deployed there already this is a rolling update: old replicas answer
    until new ones, with the new weights, are ready.

    Every replica loads the model for itself, so what `settings` names must be there on every node.
    """
    replicas = replicas or Replicas()
    connect(address)
    if NAME not in serve.status().applications:
        worker_count(replicas.least, cpus=replicas.cpus, gpus=replicas.gpus)
    serve.start(proxy_location="EveryNode", http_options={"host": host, "port": port})
    settings = replace(settings, device="cuda" if replicas.gpus else "cpu")
    try:
        serve.run(_application(settings, replicas), name=NAME, route_prefix=root_path or "/")
    except RuntimeError as error:
        raise ClusterError(f"the replicas do not start: {_failure() or str(error)[:500]}") from error


def undeploy() -> None:
    """Stop serving; what was accepted is answered first."""
    serve.delete(NAME)


def _application(settings: ServiceSettings, replicas: Replicas) -> Any:
    services: list[Any] = []

    def build() -> Any:
        """The plain app, on the replica."""
        from patchcleanser.service.app import create_app

        app = create_app(settings)
        services.append(app.state.service)
        return app

    class Defended:
        """One replica."""

        def check_health(self) -> None:
            """Called now and then by Ray Serve, which replaces a replica that does not answer or raises."""
            if any(not service.closing and not service.scheduler.alive for service in services):
                raise ClusterError("the thread that runs the model is dead")

    deployed = serve.deployment(serve.ingress(build)(Defended)).options(
        name=NAME,
        max_ongoing_requests=settings.limits.queue,
        graceful_shutdown_timeout_s=settings.limits.deadline,
        health_check_period_s=5,
        **replicas.options,
    )
    return deployed.bind()


def _failure() -> str:
    """The last line of the replicas' messages that names an error; they may take a moment to arrive."""
    for _ in range(25):
        application = serve.status().applications.get(NAME)
        messages = [status.message for status in application.deployments.values()] if application else []
        lines = [line.strip() for line in "\n".join(messages).splitlines() if "Error" in line]
        if lines:
            return lines[-1][:500]
        time.sleep(0.2)
    return ""
