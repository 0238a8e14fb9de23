"""What goes wrong, in the form of the OpenAI API: status, message, type, the field that is wrong,
and a code.

Owns the table from exceptions to responses, and the wording of what pydantic finds. Every response
that is not a success is made here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from octavo.base import CapacityError, ConfigError, OctavoError, UnsupportedError
from octavo.engine.errors import (
    EngineClosedError,
    EngineDeadError,
    InvalidNumbersError,
    QueueFullError,
    RequestFailedError,
    StepFailedError,
)
from octavo.server.fields import IMAGES, TEXT_ONLY
from octavo.server.requests import (
    MISSPELT,
    NO_TEXT,
    REFUSED,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
)
from octavo.server.responses import ErrorBody, ErrorDetail

INVALID, SERVER = "invalid_request_error", "server_error"
RETRY_CLOSING = 5
"""Seconds after which a client may try again: by then another server has taken over, or this one is
back.
"""

DEAD = "the engine has stopped; the server must be started again"
CRASHED = "the step that computed this request crashed; it may work when sent again"
FAILED = "something broke in the server while it handled this request"
INVALID_NUMBERS = "the model computed NaN or infinity for this request: there is no answer"
"""What went wrong inside is in the server's log and is nothing for clients."""

GONE = 499
"""Status of a response that nobody will read."""

UNSUPPORTED = "unsupported_parameter"
"""Code of a field or value that octavo knows and does not do."""

FIELDS = frozenset(
    name
    for model in (CompletionRequest, ChatRequest, DetokenizeRequest, Message)
    for name in model.model_fields
)
"""Words that a message may begin with because they are fields."""

SAYS = 200
"""Most characters of a client's own words that a message repeats."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One error response."""

    status: int
    message: str
    type: str = INVALID
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> str:
        """As JSON. Lone surrogates, which JSON may carry and UTF-8 may not, are written out."""
        message, param = (
            None if text is None else _encodable(text) for text in (self.message, self.param)
        )
        detail = ErrorDetail(message=message or "", type=self.type, param=param, code=self.code)
        return ErrorBody(error=detail).model_dump_json()

    def response(self) -> Response:
        """As a response of its own."""
        return Response(self.body(), self.status, dict(self.headers), "application/json")


class ModelNotFoundError(Exception):
    """A request names a model that is not served here."""


class UnhealthyError(Exception):
    """The engine is dead, and somebody asked how it is."""


def describe(error: Exception, source: str | None = None) -> Failure:
    """What to tell a client. source: the field that the input came in, for messages that begin with
    no field's name.
    """
    message = str(error)
    match error:
        case ModelNotFoundError():
            return Failure(status=404, message=message, param="model", code="model_not_found")
        case CapacityError():
            return Failure(
                status=400, message=message, param=source, code="context_length_exceeded"
            )
        case ConfigError() | UnsupportedError():
            first = message.partition(" ")[0].rstrip(":")
            return Failure(status=400, message=message, param=first if first in FIELDS else source)
        case QueueFullError():
            wait = {"retry-after": str(max(1, ceil(error.retry_after)))}
            return Failure(
                status=429,
                message=message,
                type="rate_limit_error",
                code="queue_full",
                headers=wait,
            )
        case EngineClosedError():
            wait = {"retry-after": str(RETRY_CLOSING)}
            return Failure(
                status=503, message=message, type=SERVER, code="shutting_down", headers=wait
            )
        case UnhealthyError():
            return Failure(status=503, message=DEAD, type=SERVER, code="engine_dead")
        case StepFailedError():
            return Failure(status=500, message=CRASHED, type=SERVER, code="step_failed")
        case RequestFailedError():
            return Failure(status=500, message=FAILED, type=SERVER, code="request_failed")
        case InvalidNumbersError():
            return Failure(status=500, message=INVALID_NUMBERS, type=SERVER, code="invalid_numbers")
        case EngineDeadError():
            return Failure(status=500, message=DEAD, type=SERVER, code="engine_dead")
    return Failure(
        status=500,
        message="the server made a mistake; its log says which",
        type=SERVER,
        code="internal_error",
    )


def install(app: FastAPI) -> None:
    """Answer every error of an app in this form."""
    app.add_exception_handler(OctavoError, _failed)
    app.add_exception_handler(ModelNotFoundError, _failed)
    app.add_exception_handler(UnhealthyError, _failed)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _failed)


async def _failed(request: Request, error: Exception) -> Response:
    source = "messages" if "chat" in request.url.path else "prompt"
    return describe(error, source).response()


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=GONE)


async def _refused(request: Request, error: Exception) -> Response:
    """Errors of routing, and of bodies that cannot be read."""
    assert isinstance(error, HTTPException)
    says = {
        400: "the body is not JSON that can be read",
        404: f"there is no {request.url.path[:SAYS]} here",
        405: f"{request.method} does not work on {request.url.path[:SAYS]}",
    }
    message = says.get(error.status_code, error.detail)
    code = {404: "unknown_url", 405: "method_not_allowed", 413: "request_too_large"}.get(
        error.status_code
    )
    return Failure(
        status=error.status_code, message=message, code=code, headers=error.headers or {}
    ).response()


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    if not isinstance(error.body, dict):
        detail = (
            found[0].get("ctx", {}).get("error", "")
            if found and found[0]["type"] == "json_invalid"
            else ""
        )
        message = "the body must be a JSON object, sent with content-type application/json"
        return Failure(
            status=400, message=f"{message}: {detail}" if detail else message, code="invalid_json"
        ).response()
    path, first = _worst(found, error.body)
    code = UNSUPPORTED if first[0]["type"] == REFUSED or _foreign(path, first[0]) else None
    return Failure(
        status=400, message=_wording(path, first), param=path or None, code=code
    ).response()


def _worst(found: Sequence[Any], body: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """(path, errors there) of the first field that is wrong. A union's types all complain; who gets
    furthest knows best.
    """
    paths = [_named(_path(one["loc"][1:], body), one) for one in found]
    top = _top(paths[0])
    path = max(
        (path for path in paths if _top(path) == top),
        key=lambda path: path.count(".") + path.count("["),
    )
    return path, [one for one, where in zip(found, paths, strict=True) if where == path]


def _named(path: str, error: Any) -> str:
    """The path of a field, where an error is about one that the model at ``path`` does not have."""
    if error["type"] not in (REFUSED, MISSPELT, NO_TEXT):
        return path
    name = str(error["ctx"]["name"])[:SAYS]
    return f"{path}.{name}" if path else name


def _top(path: str) -> str:
    return path.split(".")[0].split("[")[0]


def _wording(path: str, found: Sequence[Any]) -> str:
    """What is wrong at a path, in one line."""
    kind, says = found[0]["type"], found[0].get("ctx", {}).get("says", "")
    if kind == REFUSED:
        return f"{path} is not supported: {says}"
    if kind == MISSPELT:
        return f"{path} is not a field of this request; did you mean {says}?"
    if kind == NO_TEXT:
        return f"{path} is not text: it has a lone surrogate, which no unicode string may have"
    if kind == "missing":
        return f"{path} is missing"
    if foreign := _foreign(path, found[0]):
        return f"{path}: {foreign}"
    return (
        f"{path[:SAYS] or 'the body'}: {', or: '.join(dict.fromkeys(one['msg'] for one in found))}"
    )


FOREIGN: Final = {"image": IMAGES, "video": TEXT_ONLY, "audio": TEXT_ONLY, "file": TEXT_ONLY}
"""What to say of content parts, by a word that is in the name of their type."""


def _foreign(path: str, error: Any) -> str | None:
    """What to say of a content part that is no text; None for every other error."""
    if not (path.startswith("messages[") and path.endswith("].type")):
        return None
    return next((says for word, says in FOREIGN.items() if word in str(error["input"])), None)


def _path(loc: Sequence[Any], body: Any) -> str:
    """Where in the body an error is, as ``messages[0].content``; steps into a union's types are
    left out.
    """
    path = ""
    for step in loc:
        if isinstance(body, list) and isinstance(step, int) and step < len(body):
            path, body = f"{path}[{step}]", body[step]
        elif isinstance(body, dict) and isinstance(step, str):
            path, body = f"{path}.{step}" if path else step, body.get(step)
    return path


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
