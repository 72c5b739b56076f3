"""The HTTP interface: routes and nothing else; the work is in the modules they call."""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, PlainTextResponse

from moesaic import __version__
from moesaic.config import EngineConfig
from moesaic.engine.client import EngineClient
from moesaic.errors import RequestError
from moesaic.server import errors, labels, page
from moesaic.server.auth import KeyGate
from moesaic.server.chat import ChatWriter
from moesaic.server.completions import CompletionWriter
from moesaic.server.generation import respond
from moesaic.server.limits import BodyLimit, check_num_prompts
from moesaic.server.metrics import MetricsPage, RequestMeters
from moesaic.server.observed import ObservedClient
from moesaic.server.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from moesaic.server.replies import ChatCompletion, Completion, ErrorReply, ModelCard, ModelList, Reply
from moesaic.server.request_log import RequestLog
from moesaic.server.served_model import ServedModel
from moesaic.server.settings import ServerConfig
from moesaic.server.sse import EventStream
from moesaic.server.tokenization import (
    DetokenizeReply,
    DetokenizeRequest,
    TokenizeReply,
    TokenizeRequest,
    detokenize,
    tokenize,
)
from moesaic.server.watch import StepsReply, StepWatchers

if TYPE_CHECKING:
    from moesaic.server.tracing import RequestTracer

logger = logging.getLogger(__name__)

_ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": ErrorReply} for status in (400, 401, 404, 413, 500, 503)}


def create_app(
    client: EngineClient, model: ServedModel, config: EngineConfig, settings: ServerConfig | None = None
) -> FastAPI:
    """Return the application over an engine; it starts ``client`` when it starts and closes it when it ends.

    Raises: ``ConfigError`` if the file of keys cannot be read.
    """
    settings = ServerConfig() if settings is None else settings
    meters = RequestMeters()
    tracer = _tracer(settings, model)
    client = ObservedClient(client, [meters, RequestLog(), *(() if tracer is None else (tracer,))])

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await client.start()
        try:
            yield
        finally:
            await client.close()
            if tracer is not None:
                await asyncio.to_thread(tracer.close)

    # The pages of documentation load scripts from elsewhere; /openapi.json is all that is ours.
    app = FastAPI(title="Moesaic", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    errors.install(app)
    _add_guards(app, settings)
    _add_generation(app, client, model, settings)
    _add_models(app, model)
    _add_tokenization(app, model)
    _add_state(app, client, model, config, settings)
    _add_metrics(app, MetricsPage(client, meters, model.names[0]))
    if settings.ui:
        _add_page(app, client, settings)
    return app


def _tracer(settings: ServerConfig, model: ServedModel) -> "RequestTracer | None":
    if settings.otlp_traces_endpoint is None:
        return None
    from moesaic.server.tracing import RequestTracer

    return RequestTracer(settings.otlp_traces_endpoint, model.names[0])


def _add_guards(app: FastAPI, settings: ServerConfig) -> None:
    """Add what a request passes before its route. The last one added is passed first."""
    if settings.otlp_traces_endpoint is not None:
        from moesaic.server.tracing import TraceParents

        app.add_middleware(TraceParents)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    if keys := settings.keys():
        app.add_middleware(KeyGate, keys=keys)
    if settings.allowed_origins:  # before the keys: a browser's preflight has none
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=(labels.HEADER, "Retry-After"),
        )
    app.add_middleware(labels.RequestLabels)


def _add_generation(app: FastAPI, client: EngineClient, model: ServedModel, settings: ServerConfig) -> None:
    unknown = UnknownFields(is_strict=settings.strict_api)
    ping_s = settings.sse_ping_interval_s

    @app.post("/v1/completions", response_model=Completion, responses=_ERRORS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        unknown.note(body)
        check_num_prompts(body, settings.max_prompts_per_request)
        return await respond(await CompletionWriter.of(body, model), client, request.receive, ping_s)

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=_ERRORS)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        unknown.note(body)
        return await respond(await ChatWriter.of(body, model), client, request.receive, ping_s)


def _add_models(app: FastAPI, model: ServedModel) -> None:
    @app.get("/v1/models", response_model=ModelList)
    async def models() -> Response:
        return _json(ModelList(object="list", data=[model.card(name) for name in model.names]))

    # A path: names of models have slashes.
    @app.get("/v1/models/{name:path}", response_model=ModelCard, responses=_ERRORS)
    async def retrieve_model(name: str) -> Response:
        return _json(model.card(name))


def _add_tokenization(app: FastAPI, model: ServedModel) -> None:
    @app.post("/tokenize", response_model=TokenizeReply, responses=_ERRORS)
    async def tokenize_text(body: TokenizeRequest) -> Response:
        return _json(await tokenize(body, model))

    @app.post("/detokenize", response_model=DetokenizeReply, responses=_ERRORS)
    async def detokenize_ids(body: DetokenizeRequest) -> Response:
        return _json(detokenize(body, model))


def _add_state(
    app: FastAPI, client: EngineClient, model: ServedModel, config: EngineConfig, settings: ServerConfig
) -> None:
    @app.get("/health", responses={503: {"model": ErrorReply}})
    async def health() -> dict[str, str]:
        if (error := client.error) is not None:
            raise error
        return {"status": "ok"}

    @app.get("/v1/stats", responses=_ERRORS)
    async def stats() -> dict[str, Any]:
        return await client.stats()

    @app.get("/v1/config", responses=_ERRORS)
    async def configuration() -> dict[str, Any]:
        features = (await client.stats())["features"] | model.chat.features()
        served = {"names": model.names, "root": model.root, "max_model_len": model.max_model_len}
        sampling = {"sampling_defaults": dict(model.defaults)}
        engine, server = dataclasses.asdict(config), settings.shown()
        return {"model": served | sampling, "config": engine, "server": server, "features": features}

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}


def _add_metrics(app: FastAPI, page: MetricsPage) -> None:
    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        content, content_type = await page.render(request.headers.get("accept", ""))
        return Response(content, headers={"Content-Type": content_type})


def _add_page(app: FastAPI, client: EngineClient, settings: ServerConfig) -> None:
    watchers, shown = StepWatchers(client), page.load()

    @app.get("/v1/steps", response_model=StepsReply, responses=_ERRORS)
    async def steps() -> Response:
        return EventStream(watchers.events(), watchers.place(), settings.sse_ping_interval_s)

    @app.get(page.PATH, response_class=HTMLResponse)
    async def ui() -> Response:
        return HTMLResponse(shown.html, headers=shown.headers)


class UnknownFields:
    """Logs each field that clients send and no one reads, once; not for ever, since clients choose the names."""

    MOST = 64

    def __init__(self, *, is_strict: bool) -> None:
        self._is_strict = is_strict
        self._seen: set[str] = set()

    def note(self, body: GenerationRequest) -> None:
        """Log the names in ``body`` that are new.

        Raises: ``RequestError`` instead if the server is strict.
        """
        for name in body.unknown_fields():
            if self._is_strict:
                raise RequestError(f"field {name!r:.80} is unknown and this server is strict; leave it out", param=name)
            if name not in self._seen and len(self._seen) < self.MOST:
                self._seen.add(name)
                logger.info("unknown request field ignored: name=%.80r", name)


def _json(reply: Reply) -> Response:
    return Response(reply.json_bytes(), media_type="application/json")
