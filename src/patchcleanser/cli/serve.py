"""patchcleanser serve: the defended model over HTTP, with a page that shows how it works."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Annotated

import typer

from patchcleanser.cli.options import ClusterOptions, DefenseOptions
from patchcleanser.cli.progress import LOGGER
from patchcleanser.errors import InputError, MissingDependencyError

if TYPE_CHECKING:
    from patchcleanser.service.config import ServiceSettings

API_KEY = "PATCHCLEANSER_API_KEY"
"""Environment variable of the key. Not an option: every user of a machine sees the options of its processes."""


def serve(
    options: DefenseOptions,
    cluster: ClusterOptions,
    data: Annotated[str, typer.Option(help="Samples of the page: sample, folder:PATH, …, or none.")] = "sample",
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0 is any free one.")] = 8000,
    allow_host: Annotated[list[str] | None, typer.Option(help="Another host name of this service; * is any.")] = None,
    proxy: Annotated[list[str] | None, typer.Option(help="Address or network of a proxy that names clients.")] = None,
    root_path: Annotated[str, typer.Option(help="Path prefix under which a proxy serves it, as /patches.")] = "",
    queue: Annotated[int, typer.Option(help="Images that may wait; with more, requests get 503.")] = 256,
    deadline: Annotated[float, typer.Option(help="Seconds after which a request is given up.")] = 30.0,
    max_pixels: Annotated[int, typer.Option(help="Pixels of one image.")] = 16_777_216,
    max_files: Annotated[int, typer.Option(help="Images in one request.")] = 16,
    replicas: Annotated[str, typer.Option(help="With --on ray: how many; 1-8 follows the load.")] = "1",
    keep: Annotated[bool, typer.Option("--keep", help="With --on ray: leave it on the cluster.")] = False,
) -> None:
    """Answer over HTTP until stopped. With PATCHCLEANSER_API_KEY set (keys, with commas between), requests need one."""
    from patchcleanser.service.config import Limits, ServiceSettings

    _require_extra()
    cluster.require_ray({"--keep": keep, "--replicas": replicas != "1"})
    cluster.device(options.device)
    settings = ServiceSettings(
        model=options.model,
        trust_code=options.trust_code,
        threat=options.threat,
        defense=options.defense,
        options=options.of_defenses()[options.defense],
        **options.mask_set_options,
        precision=options.precision,
        device=options.device,
        samples=None if data == "none" else data,
        api_key=tuple(filter(None, os.environ.get(API_KEY, "").split(","))) or None,
        hosts=(*(allow_host or ()), *(() if ":" in host else (host,))),
        proxies=tuple(proxy or ()),
        limits=Limits(
            queue=queue,
            deadline=deadline,
            pixels=max_pixels,
            files=max_files,
            queue_pixels=max(Limits().queue_pixels, 2 * max_pixels),
        ),
    )
    if host not in ("127.0.0.1", "localhost", "::1") and settings.api_key is None:
        LOGGER.warning("%s can be reached by others, and there is no %s", host, API_KEY)
    if cluster.on == "here":
        _serve_here(settings, host, port, root_path)
        return
    from patchcleanser.cluster.deployment import Replicas, deploy

    number = Replicas.parse(replicas, cpus=cluster.cpus, gpus=cluster.gpus)
    deploy(settings, number, address=cluster.address, host=host, port=port, root_path=root_path)
    print(f"http://{host}:{port}{root_path}/" + ("" if keep else " (Ctrl-C stops it)"), file=sys.stderr)
    if not keep:
        _wait_for_stop()


def _require_extra() -> None:
    """MissingDependencyError without the extra `serve`, which Ray's replicas need too."""
    try:
        import uvicorn  # noqa: F401

        import patchcleanser.service.app  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingDependencyError.of(error.name or "fastapi", "serve") from error


def _serve_here(settings: ServiceSettings, host: str, port: int, root_path: str) -> None:
    """Serve in this process, until a signal stops it."""
    import uvicorn

    from patchcleanser.service.app import create_app
    from patchcleanser.service.middleware import configure_logging
    from patchcleanser.service.protocol import server_config

    listening = _listen(host, port)
    app = create_app(settings)
    if settings.samples and not app.state.service.model.samples:
        LOGGER.warning("no picture of %s has room for a %s; none is offered", settings.samples, settings.threat)
    configure_logging(sys.stderr)
    for number in (signal.SIGINT, signal.SIGTERM):
        # The server catches these, finishes the requests it accepted, and raises them again.
        signal.signal(number, lambda *_: None)
    at = f"{host}:{listening.getsockname()[1]}"
    print(f"http://{at}{root_path}/ (Ctrl-C stops it)", file=sys.stderr)
    uvicorn.Server(server_config(app, root_path=root_path)).run(sockets=[listening])


def _wait_for_stop() -> None:
    """Wait for Ctrl-C while Ray Serve answers, then undeploy."""
    from patchcleanser.cluster.deployment import undeploy

    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    stopped.wait()
    undeploy()


def _listen(host: str, port: int) -> socket.socket:
    """Take the port before the model is loaded, so that a wrong one fails at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror  # Python adds to it
        option = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise InputError(f"cannot listen at {host}:{port}: {reason}; use another {option}") from error
