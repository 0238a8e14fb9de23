"""What was asked of a scheduler since it was made, as data: enough to ask it again.

Owns ``Record`` and its form as JSON. Nothing in a record tells what a request was about: tokens,
salts and ids are pseudonyms, of which only equality is kept, and the secret that prefix keys are
made with is left out. Knows no engine and no runner; ``sim/replay.py`` asks again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Final

from octavo.base import ConfigError
from octavo.cache.layout import CacheLayout, GroupLayout
from octavo.memory.layout import ArenaLayout
from octavo.sched.request import Request, branch_id
from octavo.sched.sampling import SamplingParams
from octavo.sched.scheduler import SchedulerOptions
from octavo.spec.group import FieldSlot, Group, Member, PageFormat
from octavo.spec.law import Law
from octavo.spec.stream import Field, Stream

FORMAT = 1
"""Changes with the meaning of a record."""

PLAIN: Final = ("n", "max_tokens", "min_tokens", "ignore_eos", "logprobs", "prompt_logprobs")
"""Sampling parameters that scheduler and cache look at, beside stop tokens and penalties."""


@dataclass(frozen=True, kw_only=True)
class Begun:
    """How far a continuation was when the record began: its generated tokens, its scores, and
    whether it had been admitted before.
    """

    branch: int
    tokens: int
    scored: int
    admitted: bool


@dataclass(frozen=True, kw_only=True)
class RecordedRequest:
    """A request as a scheduler sees it, under a number for a name.

    outputs: (branch, tokens) of every continuation, all that were ever sampled. penalized: earlier
        tokens change the choice of the next. begun: where its continuations stood; empty for a
        request that came later. The rest is as in ``Request`` and ``SamplingParams``.
    """

    number: int
    prompt: tuple[int, ...]
    outputs: tuple[tuple[int, tuple[int, ...]], ...]
    params: tuple[tuple[str, int | bool | None], ...]
    stop_token_ids: tuple[int, ...]
    penalized: bool
    eos_token_ids: tuple[int, ...]
    priority: int
    salt: int
    marks: tuple[int, ...]
    begun: tuple[Begun, ...]

    def request(self) -> Request:
        """A new request of this shape, named ``rN``."""
        params = SamplingParams(
            **dict(self.params),  # type: ignore[arg-type]
            stop_token_ids=self.stop_token_ids,
            presence_penalty=float(self.penalized),
        )
        return Request(
            request_id=f"r{self.number}",
            prompt_token_ids=self.prompt,
            params=params,
            eos_token_ids=frozenset(self.eos_token_ids),
            priority=self.priority,
            cache_salt=f"s{self.salt}" if self.salt else "",
            marks=self.marks,
        )


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What went wrong in the end, without the message, which may quote what clients sent.

    where: from the outermost call to the innermost, ``file:line function``.
    """

    type: str
    where: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Record:
    """Everything that was asked of a scheduler, in order, up to the call that failed.

    calls: words with a blank between them. ``aN`` adds request N, ``xN.B`` aborts its continuation
        B, ``s`` plans a step, ``c`` gives its receipt, ``f`` says that the step failed, ``nN.B``
        says that the next receipt calls the numbers of that continuation none.
    complete: False where there had been more than is kept: the record then begins on an empty cache
        with the requests that were on their way, and ``missing`` calls lie before it.
    """

    octavo: str
    layout: CacheLayout
    options: SchedulerOptions
    requests: tuple[RecordedRequest, ...]
    calls: str
    complete: bool
    missing: int
    failure: Failure

    def as_json(self) -> dict[str, Any]:
        """For ``json.dumps``."""
        return {"format": FORMAT, "record": _pack(replace(self, options=public(self.options)))}

    @staticmethod
    def from_json(data: Any) -> Record:
        """Read back. Raises ConfigError for what is no record, or one of another version."""
        if not isinstance(data, dict) or "record" not in data:
            raise ConfigError("this is no record of a scheduler")
        if data.get("format") != FORMAT:
            raise ConfigError(
                f"the record has format {data.get('format')!r}; this version of octavo reads"
                f" {FORMAT}"
            )
        made = _unpack(data["record"], {_name(one): one for one in _classes()})
        if not isinstance(made, Record):
            raise ConfigError("this is no record of a scheduler")
        return made


def public(options: SchedulerOptions) -> SchedulerOptions:
    """Options without what is secret: the seed of prefix keys, and what names the checkpoint."""
    return replace(options, hash_seed=0, model_digest=b"")


def continuation(number: int, branch: int) -> str:
    """Name of a continuation in a replay."""
    return branch_id(f"r{number}", branch)


def _classes() -> Iterator[type]:
    yield from (Record, RecordedRequest, Begun, Failure, SchedulerOptions)
    yield from (CacheLayout, GroupLayout, ArenaLayout)
    yield from (Group, Member, FieldSlot, PageFormat, Stream, Field)
    yield from _laws(Law)


def _laws(law: type) -> Iterator[type]:
    """Laws of plugins that were imported, too."""
    subclasses: list[type] = law.__subclasses__()
    for one in subclasses:
        yield one
        yield from _laws(one)


def _name(one: type) -> str:
    return f"{one.__module__}.{one.__qualname__}"


def _pack(value: Any) -> Any:
    """Dataclasses as objects that name their class, sequences as arrays; no bytes are in a record
    that are not empty.
    """
    if is_dataclass(value):
        names = [each.name for each in fields(value)]
        return {"is": _name(type(value)), **{name: _pack(getattr(value, name)) for name in names}}
    if isinstance(value, tuple):
        return list(value) if _whole(value) else [_pack(one) for one in value]
    if isinstance(value, bytes):
        assert not value, "secrets are left out"
        return None
    return value


def _whole(values: Sequence[Any]) -> bool:
    """Nothing but whole numbers: most of a record, which must not be asked one by one."""
    return {*map(type, values)} == {int}


def _unpack(value: Any, classes: Mapping[str, type]) -> Any:
    if isinstance(value, list):
        return tuple(value if _whole(value) else [_unpack(one, classes) for one in value])
    if not isinstance(value, dict):
        return value
    name = str(value.get("is"))
    if name not in classes:
        raise ConfigError(
            f"the record speaks of {name!r}, which is not part of octavo; where it is a plugin's,"
            " name the plugin"
        )
    given = {key: _unpack(one, classes) for key, one in value.items() if key != "is"}
    if given.get("model_digest", b"") is None:
        given["model_digest"] = b""
    try:
        return classes[name](**given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the record is damaged: {name}: {error}") from error
