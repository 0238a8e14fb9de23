"""The application: which path leads where, and what the OpenAPI document says of it.

Owns ``create_app``. Knows every endpoint's function, and no engine beyond what the page and the
metrics ask.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import FileResponse
from fastapi.security import HTTPBearer

from octavo import __version__
from octavo.base import ConfigError
from octavo.engine.errors import EngineClosedError
from octavo.observe.http import CountResponses
from octavo.observe.metrics import CONTENT_TYPE, Metrics
from octavo.server import chat, completions, errors
from octavo.server.answers.asked import told
from octavo.server.limits import ApiKey, BodyLimit
from octavo.server.logprobs import token_name
from octavo.server.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from octavo.server.responses import (
    Chat,
    Completion,
    ErrorBody,
    Health,
    Model,
    ModelList,
    TextOf,
    Tokens,
    Version,
)
from octavo.server.serving import Serving, encode

if TYPE_CHECKING:
    from octavo.engine.aio import AsyncLLM

MAX_BODY_BYTES = 32 << 20
SHUTDOWN_TIMEOUT = 30.0
PAGE = Path(__file__).with_name("page.html")

ERRORS: Final = {
    400: "A field is wrong; `param` names it.",
    401: "The API key is missing or wrong.",
    404: "There is no such model or path.",
    413: "The body is beyond the server's limit.",
    429: "The queue is full; `retry-after` says when to try again.",
    500: "The server made a mistake.",
    503: "The server is shutting down, or its engine has stopped.",
    "4XX": "Any other request that cannot be answered.",
}
EVENTS: Final = {
    "text/event-stream": {
        "schema": {"description": "Where `stream` is true: chunks as server-sent events."}
    }
}
"""No type: readers of the document do not agree on whether it is that of the whole body or of an
event.
"""


def create_app(
    engine: AsyncLLM,
    *,
    model_name: str | None = None,
    api_key: str | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    metrics: Metrics | None = None,
    shutdown_timeout: float = SHUTDOWN_TIMEOUT,
    answer_format: str = "auto",
) -> FastAPI:
    """An application around a running engine, which it closes when it ends.

    model_name: what clients call the model; by default its own name. api_key: what every request
        but ``/`` and ``/health`` must
    bring. metrics: the engine's recorder. shutdown_timeout: seconds that running requests get to
    finish. answer_format: how the model writes thoughts and calls, ``auto`` for what its chat
    template tells. Raises ConfigError for an engine without a tokenizer and for an empty key.
    """
    if engine.tokenizer is None:
        raise ConfigError("a server needs the tokenizer; leave skip_tokenizer_init off")
    if api_key is not None and not api_key.strip():
        raise ConfigError("api_key must not be empty; leave it out to serve without a key")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await engine.close(timeout=shutdown_timeout)

    app = FastAPI(
        title="octavo",
        version=__version__,
        lifespan=lifespan,
        redoc_url=None,
        redirect_slashes=False,
    )
    metrics = metrics or Metrics()
    errors.install(app)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    if api_key is not None:
        # A key out of a file often ends with a line break, which no header can carry.
        app.add_middleware(ApiKey, key=api_key.strip())
    app.add_middleware(CountResponses, metrics=metrics)
    serving = Serving(
        engine=engine,
        name=model_name or engine.model_name,
        created=int(time.time()),
        answer_format=answer_format,
    )
    # A format that there is not is told here.
    _ = serving.form
    responses: Any = {
        status: {"model": ErrorBody, "description": said} for status, said in ERRORS.items()
    }
    keyed = APIRouter(
        responses=responses, dependencies=[Depends(HTTPBearer(auto_error=False))] if api_key else []
    )
    _add_generation(keyed, serving)
    _add_tokens(keyed, serving)
    _add_models(keyed, serving)
    _add_inside(keyed, serving, metrics)
    app.include_router(keyed)
    app.include_router(_open_routes(serving, responses))
    return app


def _add_generation(router: APIRouter, serving: Serving) -> None:
    @router.post("/v1/completions", responses={200: {"model": Completion, "content": EVENTS}})
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue prompts."""
        return await completions.complete(serving, body, request)

    @router.post("/v1/chat/completions", responses={200: {"model": Chat, "content": EVENTS}})
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await chat.chat(serving, body, request)


def _add_tokens(router: APIRouter, serving: Serving) -> None:
    @router.post("/tokenize", response_model_exclude_unset=True)
    async def tokenize(body: TokenizeRequest) -> Tokens:
        """Token ids of a prompt or of a conversation."""
        serving.receive(body, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ConfigError("prompt or messages must be given, and not both")
        if body.prompt is None:
            tools = None if not body.tools else [told(tool) for tool in body.tools]
            ids, _ = await chat.render(serving.tokenizer, body, tools=tools)
        else:
            ids = await encode(
                serving.tokenizer, body.prompt, special=body.add_special_tokens is not False
            )
        names = (
            {"token_strs": [token_name(serving.tokenizer, token) for token in ids]}
            if body.return_token_strs
            else {}
        )
        return Tokens(
            count=len(ids), max_model_len=serving.engine.max_model_len, tokens=ids, **names
        )

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> TextOf:
        """Text of token ids. Special tokens have none."""
        serving.receive(body, body.model)
        vocab = serving.engine.vocab_size
        for token in body.tokens:
            if token >= vocab:
                raise ConfigError(
                    f"tokens: token id {token} is outside the model's vocabulary of {vocab}"
                )
        return TextOf(prompt=serving.tokenizer.decode(body.tokens))


def _add_models(router: APIRouter, serving: Serving) -> None:
    def served() -> Model:
        limit = serving.engine.max_model_len
        return Model(
            id=serving.name,
            object="model",
            created=serving.created,
            owned_by="octavo",
            max_model_len=limit,
        )

    @router.get("/v1/models")
    async def list_models() -> ModelList:
        """The one model there is."""
        return ModelList(object="list", data=[served()])

    @router.get("/v1/models/{model:path}")
    async def retrieve_model(model: str) -> Model:
        """One model."""
        serving.check_model(model)
        return served()


def _add_inside(router: APIRouter, serving: Serving, metrics: Metrics) -> None:
    @router.get(
        "/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}}
    )
    async def read_metrics() -> Response:
        """Numbers for Prometheus."""
        return Response(
            metrics.exposition(await serving.engine.counters()), media_type=CONTENT_TYPE
        )

    @router.get("/cache", response_model=dict[str, Any])
    async def read_cache() -> Response:
        """What the cache looks like now; docs/inspecting.md says what it means."""
        return Response(
            json.dumps(await serving.engine.snapshot(), default=vars), media_type="application/json"
        )

    @router.get("/version")
    async def read_version() -> Version:
        """Version of octavo."""
        return Version(version=__version__)


def _open_routes(serving: Serving, responses: Any) -> APIRouter:
    """What needs no key."""
    router = APIRouter(responses={503: responses[503], "4XX": responses["4XX"]})

    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    async def health() -> Health:
        """200 while requests are taken, 503 otherwise."""
        if serving.engine.closing:
            raise EngineClosedError("the server is shutting down")
        if not serving.engine.is_alive:
            raise errors.UnhealthyError
        return Health(status="ok")

    @router.get("/", response_class=FileResponse, include_in_schema=False)
    async def page() -> FileResponse:
        """The cache, live, for people."""
        return FileResponse(PAGE, media_type="text/html")

    return router
