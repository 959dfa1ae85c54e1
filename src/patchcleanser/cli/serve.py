"""patchcleanser serve: the defended model over HTTP, with a page to watch it work."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Annotated

import typer

from patchcleanser.cli.options import (
    PATCH,
    Address,
    Cpus,
    Device,
    Gpus,
    Grid,
    Masks,
    Model,
    On,
    Patches,
    Place,
    Precision,
    Stride,
    Threshold,
    TrustCode,
    defense_options,
    pair_if,
    threat_of,
)
from patchcleanser.errors import InputError, MissingDependencyError

if TYPE_CHECKING:
    from patchcleanser.service.config import Limits, ServiceSettings

API_KEY = "PATCHCLEANSER_API_KEY"
"""Where the key is looked for. Not an option: every user of a machine sees the options of its processes."""


def serve(
    model: Model = "zoo:tiny",
    threat: Annotated[
        str, typer.Option("--threat", "--patch", help="Threat: 32, 2%, 12x83, any:1% or any:502.")
    ] = PATCH,
    patches: Patches = 1,
    masks: Masks = None,
    stride: Stride = None,
    grid: Grid = None,
    defense: Annotated[str, typer.Option(help="double-masking, challenger-masking or minority-reports.")] = (
        "double-masking"
    ),
    threshold: Threshold = None,
    data: Annotated[str, typer.Option(help="Samples of the page: sample, folder:PATH, …, or none.")] = "sample",
    device: Device = "auto",
    precision: Precision = "exact",
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at.", min=0, max=65535)] = 8000,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Name this service is reached by, besides localhost, IP addresses and --host; * is any."),
    ] = None,
    proxy: Annotated[
        list[str] | None, typer.Option(help="Address or network of a proxy; its X-Forwarded-For names the client.")
    ] = None,
    root_path: Annotated[str, typer.Option(help="Prefix under which a proxy serves it, as /patches.")] = "",
    queue: Annotated[int, typer.Option(help="Images that may wait; with more, requests get 503.")] = 256,
    deadline: Annotated[float, typer.Option(help="Seconds after which a request is given up.")] = 30.0,
    max_pixels: Annotated[int, typer.Option(help="Pixels of one image.")] = 16_777_216,
    max_files: Annotated[int, typer.Option(help="Images in one request.")] = 16,
    on: On = "here",
    address: Address = None,
    replicas: Annotated[str, typer.Option(help="With --on ray: how many; 1-8 follows the load.")] = "1",
    gpus: Gpus = 0,
    cpus: Cpus = 1,
    keep: Annotated[
        bool,
        typer.Option("--keep", help="With --on ray: leave it on the cluster; again with another model updates it."),
    ] = False,
    trust_code: TrustCode = False,
) -> None:
    """Answer over HTTP until stopped. With PATCHCLEANSER_API_KEY set (keys, with commas between), requests need one."""
    from patchcleanser.service.config import ServiceSettings

    _require_extra()
    if on == "here" and (replicas != "1" or keep):
        raise InputError(f"{'--keep' if keep else '--replicas'} belongs to --on ray")
    Place(on, address, None, gpus, cpus).device(device)
    settings = ServiceSettings(
        model=model,
        trust_code=trust_code,
        threat=threat_of(threat, patches, grid),
        defense=defense,
        options=defense_options(defense, threshold)[defense],
        masks=pair_if(masks, "masks"),
        stride=pair_if(stride, "stride"),
        precision=precision,
        device=device,
        samples=None if data == "none" else data,
        api_key=tuple(filter(None, os.environ.get(API_KEY, "").split(","))) or None,
        hosts=(*(allow_host or ()), *(() if ":" in host else (host,))),
        proxies=tuple(proxy or ()),
        limits=_limits(queue, deadline, max_pixels, max_files),
    )
    if host not in ("127.0.0.1", "localhost", "::1") and settings.api_key is None:
        print(f"note: {host} can be reached by others, and there is no {API_KEY}", file=sys.stderr)
    if on == "here":
        _serve_here(settings, host, port, root_path)
        return
    from patchcleanser.cluster.deployment import Replicas, deploy

    many = Replicas.parse(replicas, cpus=cpus, gpus=gpus)
    deploy(settings, many, address=address, host=host, port=port, root_path=root_path)
    print(f"http://{host}:{port}{root_path}/" + ("" if keep else " (Ctrl-C stops it)"), file=sys.stderr)
    if not keep:
        _until_stopped()


def _require_extra() -> None:
    """What serves must be there, also where Ray's replicas do the work."""
    try:
        import uvicorn  # noqa: F401

        import patchcleanser.service.app  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingDependencyError.of(error.name or "fastapi", "serve") from error


def _serve_here(settings: ServiceSettings, host: str, port: int, root_path: str) -> None:
    """In this process, until it is told to stop."""
    import uvicorn

    from patchcleanser.service.app import create_app
    from patchcleanser.service.middleware import configure_logging
    from patchcleanser.service.protocol import server_config

    listening = _listen(host, port)
    app = create_app(settings)
    if settings.samples and not app.state.service.model.samples:
        print(
            f"note: no picture of {settings.samples} has room for a {settings.threat}; none is offered", file=sys.stderr
        )
    configure_logging(sys.stderr)
    for number in (signal.SIGINT, signal.SIGTERM):
        # The server catches these, finishes what it accepted, and raises them again; then all is done.
        signal.signal(number, lambda *_: None)
    at = f"{host}:{listening.getsockname()[1]}"
    print(f"http://{at}{root_path}/ (Ctrl-C stops it)", file=sys.stderr)
    uvicorn.Server(server_config(app, root_path=root_path)).run(sockets=[listening])


def _until_stopped() -> None:
    """Ray Serve works elsewhere; this process waits for Ctrl-C."""
    from patchcleanser.cluster.deployment import undeploy

    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    stopped.wait()
    undeploy()


def _listen(host: str, port: int) -> socket.socket:
    """The port is taken before the model is loaded, so that a wrong one is said at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror  # Python adds to it
        raise InputError(f"cannot listen at {host}:{port}: {reason}; use another --port") from error


def _limits(queue: int, deadline: float, pixels: int, files: int) -> Limits:
    """The limits that the options name; what they imply grows with them."""
    from patchcleanser.service.config import Limits

    plain = Limits()
    return Limits(
        queue=queue, deadline=deadline, pixels=pixels, files=files, queue_pixels=max(plain.queue_pixels, 2 * pixels)
    )
