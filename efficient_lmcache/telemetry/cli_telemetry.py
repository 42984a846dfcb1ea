"""`efficient-lmcache telemetry …`: the engines of a deployment, live in a terminal or for Prometheus."""

from __future__ import annotations

import importlib.util
import json
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console

from efficient_lmcache.telemetry import redis_keys
from efficient_lmcache.telemetry.cluster import FORGET_AFTER_S, ClusterView
from efficient_lmcache.telemetry.redis_feed import RedisFeed
from efficient_lmcache.telemetry.redis_settings import PASSWORD_VARIABLE, RedisSettings
from efficient_lmcache.telemetry.status import ClusterStatus, cluster_status
from efficient_lmcache.telemetry.watch import notes, table
from efficient_lmcache.telemetry.watch import watch as watch_live

telemetry_app = typer.Typer(help="What all engines of a deployment say, over Redis.", no_args_is_help=True)

_CONNECT_S = 10.0
_USER_ERROR_STATUS = 2

Url = Annotated[str, typer.Option("--redis", metavar="URL", help="redis://, rediss:// or unix://, without a password.")]
PasswordFile = Annotated[
    str | None, typer.Option("--redis-password-file", help=f"Holds the password; else {PASSWORD_VARIABLE} is used.")
]
Deployment = Annotated[str, typer.Option(help="As in efficient.telemetry.deployment.")]
MaxAge = Annotated[
    float,
    typer.Option(
        "--max-age",
        min=0.1,
        max=FORGET_AFTER_S,
        help="Seconds of silence after which an engine is left out.",
    ),
]


@telemetry_app.command()
def watch(
    redis: Url,
    redis_password_file: PasswordFile = None,
    deployment: Deployment = "default",
    max_age: MaxAge = 10.0,
    once: Annotated[bool, typer.Option("--once", help="Print the table once.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print once, as JSON.")] = False,
) -> None:
    """Show every engine's tier and pool, and the whole pool, until Ctrl-C."""
    console = Console()
    # What is wrong stands in the live view, and ends the others.
    logging.getLogger("efficient_lmcache").addHandler(logging.NullHandler())
    with _connected(redis, redis_password_file, deployment) as (view, feed, name):

        def status() -> ClusterStatus:
            return cluster_status(view, max_age)

        if as_json:
            typer.echo(json.dumps(status().record(deployment), indent=2))
        elif once or not console.is_terminal:
            now = status()
            console.print(table(now), *notes(now), sep="\n")
        else:
            try:
                watch_live(console, status, feed, f"deployment {deployment} at {name}")
            except KeyboardInterrupt:
                return


@telemetry_app.command()
def export(
    redis: Url,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Serves /metrics; 0 takes a free one.")],
    redis_password_file: PasswordFile = None,
    deployment: Deployment = "default",
    max_age: MaxAge = 10.0,
    address: Annotated[str, typer.Option(help="Listens here.")] = "0.0.0.0",
) -> None:
    """Serve the cluster view to Prometheus until it is stopped. Redis may come and go."""
    from prometheus_client import CollectorRegistry, start_http_server

    from efficient_lmcache.telemetry.exporter import ClusterCollector, in_plain_text

    stopping = threading.Event()
    # As the first process of a container, nothing else would end it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    with _connected(redis, redis_password_file, deployment, must=False) as (view, feed, name):
        registry = CollectorRegistry()
        registry.register(ClusterCollector(deployment, lambda: cluster_status(view, max_age), lambda: feed.connected))
        host = f"[{address}]" if ":" in address else address
        try:
            server, thread = start_http_server(port, address, registry)
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port} ({error.strerror})") from None
        server.set_app(in_plain_text(server.get_app()))
        typer.echo(f"deployment {deployment} at {name}: http://{host}:{server.server_port}/metrics", err=True)
        stopping.wait()
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def _connected(
    url: str, password_file: str | None, deployment: str, must: bool = True
) -> Iterator[tuple[ClusterView, RedisFeed, str]]:
    """A view that is fed, the feed, and the URL's name. Ends in one line on stderr and status 2 what a user did wrong.

    Args:
        must: whether a Redis that cannot be reached is an error already.
    """
    try:
        if importlib.util.find_spec("redis") is None:
            raise ValueError("the redis package is not installed; pip install 'efficient-lmcache[redis]'")
        keys = redis_keys.all_of(deployment)
        settings = RedisSettings(url, password_file)
        settings.password()
        view = ClusterView()
        feed = RedisFeed(settings, deployment, keys, view.receive)
        try:
            if must and not feed.wait(_CONNECT_S):
                raise OSError(f"{settings.name}: {feed.error or f'no answer within {_CONNECT_S:g} s'}")
            yield view, feed, settings.name
        finally:
            feed.close()
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(_USER_ERROR_STATUS) from None
