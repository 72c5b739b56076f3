"""From a model's name to a server on a port."""

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from moesaic import __version__
from moesaic.config import EngineConfig
from moesaic.engine.process import CoreFactory, ProcessEngineClient, load_core
from moesaic.errors import ConfigError
from moesaic.kv.geometry import kv_text
from moesaic.log import configure_logging
from moesaic.models.files import load_tokenizer, resolve_model_path
from moesaic.server import page
from moesaic.server.app import create_app
from moesaic.server.drain import LAST_WORDS_S, DrainingServer
from moesaic.server.limits import http_limits
from moesaic.server.served_model import ServedModel, read_defaults
from moesaic.server.settings import ServerConfig

if TYPE_CHECKING:
    from moesaic.engine.core import EngineCore


def serve(model: str, config: EngineConfig, settings: ServerConfig, *, make_core: CoreFactory = load_core) -> int:
    """Load ``model`` into a process of its own and serve it until a signal ends this one; return the exit code.

    0 after a clean stop, 1 if the engine died and was not started again.
    Raises: ``ConfigError`` (also for an address that cannot be bound, before anything is loaded), ``ModelLoadError``.
    """
    configure_logging(settings.log, "server")
    console = Console(stderr=True, highlight=False)
    with _bound(settings.host, settings.port) as listener:
        with _progress(console) as report:
            path = resolve_model_path(model, progress=report)
            restarts = settings.restart_engine
            engine = ProcessEngineClient(
                path, config, partial(load_tokenizer, path), restarts=restarts, make_core=make_core, log=settings.log
            )
            stats = engine.launch(report)
        app = create_app(engine, served_model(model, path, stats["max_model_len"], settings), config, settings)
        listener.listen()  # before the address is shown: who reads it may connect at once
        console.print(startup_block(model, stats, _url(listener), settings), markup=False)
        options = uvicorn.Config(
            app, log_config=None, access_log=False, timeout_graceful_shutdown=LAST_WORDS_S, **http_limits(settings)
        )
        DrainingServer(options, engine, settings.drain_timeout_s).run(sockets=[listener])
    return engine.exit_code


def load_app(
    model: str,
    config: EngineConfig,
    settings: ServerConfig | None = None,
    *,
    progress: Callable[[str, float], None] | None = None,
) -> "tuple[FastAPI, EngineCore]":
    """Return the application over a model loaded into this process, and its core, to be read until it starts."""
    from moesaic.engine.core import EngineCore
    from moesaic.engine.thread_client import ThreadEngineClient

    settings = ServerConfig() if settings is None else settings
    path = resolve_model_path(model, progress=progress)
    core = EngineCore.from_path(path, config, progress)
    core.prepare_grammars()
    served = served_model(model, path, core.max_model_len, settings)
    return create_app(ThreadEngineClient(core, load_tokenizer(path)), served, config, settings), core


def served_model(model: str, path: Path, max_model_len: int, settings: ServerConfig) -> ServedModel:
    """Return the model in ``path`` as clients of this server know it."""
    return ServedModel(
        names=settings.served_model_name or (model,),
        root=str(path) if Path(model).is_dir() else model,
        max_model_len=max_model_len,
        tokenizer=load_tokenizer(path),
        defaults=read_defaults(path),
        tool_call_parser=settings.tool_call_parser,
        reasoning_parser=settings.reasoning_parser,
        trust_request_chat_template=settings.trust_request_chat_template,
    )


def startup_block(model: str, stats: Mapping[str, Any], url: str, settings: ServerConfig | None = None) -> str:
    """Return what an operator wants to see at start-up: the model, the KV budget, the features, where to go.

    ``stats`` are the engine's (Any: JSON values).
    """
    rows = [
        ("model", f"{model}, context {stats['max_model_len']} tokens"),
        ("KV", kv_text(stats["kv_blocks_total"], stats["kv_block_size_tokens"], stats["kv_bytes"])),
        *((name.replace("_", " "), _feature(feature)) for name, feature in stats["features"].items()),
        ("URL", f"{url}/v1"),
        *((("page", f"{url}{page.PATH}"),) if settings is not None and settings.ui else ()),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join([f"Moesaic {__version__}", *(f"  {name:<{width}}  {text}" for name, text in rows)])


def _feature(feature: Mapping[str, Any]) -> str:
    requested, active = _shown(feature["requested"]), _shown(feature["active"])
    asked = "" if requested == active else f" (requested: {requested})"
    return f"{active}{asked}: {feature['reason']}"


def _shown(value: bool | str) -> str:
    return {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else value


@contextlib.contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """Bind before loading: a port that is taken must not cost the time to load. Until then connections are refused."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen on {host}:{port} ({error}); choose another --host or --port") from error
        yield listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Callable[[str, float], None]]:
    """Show the stages of loading as bars that vanish when all is loaded."""
    columns = TextColumn("{task.description}"), BarColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def report(what: str, fraction: float) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=1.0)
            bars.update(tasks[what], completed=fraction)

        yield report
