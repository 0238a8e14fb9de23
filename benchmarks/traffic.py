"""What a load test sends, and what must come back.

Owns the pool of cases (prompts with their single-request answers), the requests drawn from it, and
the malformed ones. Every prompt carries a canary of its own, so that a byte of another request can
be told. Answers come from an ``LLM`` without a prefix cache that is given one prompt at a time.
Knows no HTTP client.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.progress import track

from octavo import LLM, SamplingParams
from octavo.base import ConfigError
from octavo.engine.outputs import RequestOutput
from octavo.sched.sampling import NUM_LOGPROBS

CANARY = re.compile(r"<[0-9a-f]{10}>")
MARGIN = 1e-3
"""Least logprob between the two likeliest tokens: where rounding could decide, no answer is the
only right one.
"""

WORDS = (
    "the",
    "of",
    "river",
    "stone",
    "light",
    "paper",
    "seven",
    "window",
    "carries",
    "under",
    "slowly",
    "garden",
    "always",
)
DRAFTS = 200
KINDS = ("short", "shared", "chat", "turn", "several", "shared", "seeded", "short", "turn", "long")
"""In the order and the shares in which a pool has them. Long prompts are few: they cost as much as
many others.
"""

SALTS = (None, None, None, "a", "b")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A request whose answer is known. ``body`` lacks what does not change the answer. text: the
    prompt, where it is a text.
    """

    kind: str
    canary: str
    path: str
    body: dict[str, Any]
    answers: tuple[str, ...]
    text: str | None = None


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request: a case and how it is asked. expected: texts of its choices; None where only
    their number is known.
    """

    path: str
    body: dict[str, Any]
    canary: str
    choices: int
    expected: tuple[str, ...] | None = None

    @property
    def stream(self) -> bool:
        """Is the answer to come in pieces?"""
        return bool(self.body.get("stream"))


@dataclass(frozen=True, kw_only=True)
class Malformed:
    """A request that must be refused with one of ``statuses``."""

    path: str
    content: bytes
    statuses: tuple[int, ...] = (400,)


@dataclass(frozen=True, kw_only=True)
class Author:
    """Writes prompts: words drawn by ``rng``, and canaries."""

    rng: Random

    def canary(self) -> str:
        """One that no other prompt has, and that no model makes up."""
        return f"<{self.rng.getrandbits(40):010x}>"

    def words(self, number: int) -> str:
        """So many words."""
        return " ".join(self.rng.choices(WORDS, k=number))


class PoolMaker:
    """Makes cases for one model.

    llm: without prefix caching, used by nobody else. max_tokens: of an answer. longest: tokens of
        prompt and answer at most.
    """

    def __init__(self, llm: LLM, *, seed: int, max_tokens: int, longest: int) -> None:
        assert llm.tokenizer is not None, "loaded without skip_tokenizer_init"
        self._llm, self._tokenizer = llm, llm.tokenizer
        self._author = Author(rng=Random(seed))
        self._max_tokens, self._longest = max_tokens, longest
        # Two prefixes of some blocks, and one shorter than a block.
        self._prefixes = [
            self._author.words(number) for number in (longest // 24, longest // 16, 6)
        ]
        self._made: list[Case] = []

    def make(self, kind: str) -> Case:
        """A case of this kind. Drafts whose answer is not certain, or is another's too, are thrown
        away.

        Raises ConfigError where none of many drafts will do: requests are then too short for the
        prompts.
        """
        for _ in range(DRAFTS):
            case = self._draft(kind)
            if case.answers and all(case.answers != other.answers for other in self._made):
                self._made.append(case)
                return case
        raise ConfigError(
            f"max_model_len {self._longest} leaves no room for a prompt of kind {kind}; make it"
            " larger"
        )

    def _draft(self, kind: str) -> Case:
        author, canary = self._author, self._author.canary()
        match kind:
            case "short":
                return self._complete(
                    kind, canary, f"{canary} {author.words(author.rng.randint(1, 12))}"
                )
            case "shared":
                return self._complete(
                    kind, canary, f"{author.rng.choice(self._prefixes)} {canary} {author.words(5)}"
                )
            case "turn":
                before = author.rng.choice(
                    [case for case in self._made if case.kind in ("short", "turn")]
                )
                return self._complete(
                    kind, canary, f"{before.text}{before.answers[0]} {canary} {author.words(8)}"
                )
            case "long":
                return self._long(canary)
            case "chat":
                return self._chat(canary)
            case "several":
                prompt = f"{canary} {author.words(20)}"
                return self._complete(
                    kind, canary, prompt, n=3, temperature=1.0, seed=author.rng.getrandbits(32)
                )
        prompt = f"{author.rng.choice(self._prefixes)} {canary}"
        return self._complete(
            kind, canary, prompt, temperature=0.7, top_p=0.9, seed=author.rng.getrandbits(32)
        )

    def _complete(self, kind: str, canary: str, prompt: str, **sampling: Any) -> Case:
        fields = self._greedy(self._tokens(prompt)) | sampling
        answers = self._answers(self._tokenizer.encode(prompt), fields)
        body = {"prompt": prompt, **fields}
        return Case(
            kind=kind,
            canary=canary,
            path="/v1/completions",
            body=body,
            answers=answers,
            text=prompt,
        )

    def _tokens(self, prompt: str) -> int:
        most = self._longest - len(self._tokenizer.encode(prompt))
        return max(1, min(most, self._author.rng.randint(self._max_tokens // 3, self._max_tokens)))

    def _long(self, canary: str) -> Case:
        """A prompt and an answer that together are as long as can be. Its canary is told again
        where windows still see it.
        """
        length, end = (
            self._longest - self._max_tokens,
            self._tokenizer.encode(canary, special=False),
        )
        ids = (
            self._tokenizer.encode(f"{canary} {self._author.words(length)}")[: length - len(end)]
            + end
        )
        fields = self._greedy(self._max_tokens)
        body = {"prompt": ids, **fields}
        return Case(
            kind="long",
            canary=canary,
            path="/v1/completions",
            body=body,
            answers=self._answers(ids, fields),
        )

    def _chat(self, canary: str) -> Case:
        """A conversation with a mark behind its first message."""
        control = {"type": "ephemeral"}
        first = f"{self._prefixes[0]} Remember this."
        flat = [{"role": "user", "content": first}, {"role": "assistant", "content": "I do."}]
        flat.append({"role": "user", "content": f"{canary} {self._author.words(6)}"})
        fields = self._greedy(self._max_tokens)
        body = {"messages": [{**flat[0], "cache_control": control}, *flat[1:]], **fields}
        answers = self._answers(self._tokenizer.chat(flat), fields)
        return Case(
            kind="chat", canary=canary, path="/v1/chat/completions", body=body, answers=answers
        )

    def _greedy(self, tokens: int) -> dict[str, Any]:
        """So many of the likeliest tokens; small models repeat themselves unless that is made
        dear.
        """
        fields: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": tokens}
        return fields | ({"frequency_penalty": 2.0} if self._author.rng.random() < 0.5 else {})

    def _answers(self, ids: Sequence[int], fields: dict[str, Any]) -> tuple[str, ...]:
        """Texts of all choices; none where the prompt is too long or rounding could decide what is
        right.
        """
        params = replace(SamplingParams(**fields), logprobs=NUM_LOGPROBS)
        if len(ids) >= self._longest:
            return ()
        (output,) = self._llm.generate([list(ids)], params, progress=False)
        if params.greedy and _margin(output, params.frequency_penalty) < MARGIN:
            return ()
        return tuple(choice.text for choice in output.outputs)


def make_pool(
    model: Path, cases: int, *, seed: int, max_tokens: int, max_model_len: int
) -> tuple[list[Case], int]:
    """(cases of all kinds with their answers, in float32 on the CPU; vocabulary). No chats for a
    model without a template.
    """
    llm = LLM(
        model,
        enable_prefix_caching=False,
        device="cpu",
        dtype="float32",
        max_model_len=max_model_len,
    )
    maker = PoolMaker(llm, seed=seed, max_tokens=max_tokens, longest=max_model_len)
    assert llm.tokenizer is not None, "loaded without skip_tokenizer_init"
    possible = [kind for kind in KINDS if kind != "chat" or llm.tokenizer.backend.chat_template]
    kinds = [possible[number % len(possible)] for number in range(cases)]
    console = Console(stderr=True)
    return [
        maker.make(kind) for kind in track(kinds, "Answers", console=console, transient=True)
    ], llm.built.spec.vocab_size


def _margin(output: RequestOutput, penalty: float) -> float:
    """By how much the tokens chosen were likelier than the next; ``penalty`` is taken for every
    time a token came before.
    """
    (choice,), before, margin = output.outputs, Counter[int](), inf
    for token in choice.logprobs or ():
        first, second, *_ = sorted(
            (logprob - penalty * before[other] for other, logprob in token.top), reverse=True
        )
        margin = min(margin, first - second)
        before[token.token_id] += 1
    return margin


def draw(case: Case, rng: Random) -> Ask:
    """One way of asking a case."""
    body = dict(case.body) | {"priority": rng.choice((-1, 0, 0, 0, 1))}
    salt, prefix = rng.choice(SALTS), ""
    if salt is not None:
        body["cache_salt"] = salt
    if rng.random() < 0.5:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if rng.random() < 0.1:
        body["explain_cache"] = True
    if case.text is not None and rng.random() < 0.1:
        body["echo"], prefix = True, case.text
    if case.path == "/v1/completions" and rng.random() < 0.1:
        body["logprobs"] = rng.randint(0, 3)
    answers = tuple(prefix + answer for answer in case.answers)
    if rng.random() < 0.05:
        # Whatever comes, it must be well formed, and of this request.
        body |= {
            "temperature": 1.2,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.5,
            "n": len(answers),
        }
        body.pop("seed", None)
        return Ask(path=case.path, body=body, canary=case.canary, choices=len(answers))
    return Ask(
        path=case.path, body=body, canary=case.canary, choices=len(answers), expected=answers
    )


def strangers(texts: Sequence[str], ask: Ask) -> set[str]:
    """Canaries in texts that the request does not have."""
    given = set(CANARY.findall(json.dumps(ask.body.get("prompt") or ask.body["messages"])))
    return set(CANARY.findall(" ".join(texts))) - given - {ask.canary}


def malformed(rng: Random, *, longest: int, vocab: int, max_body: int) -> Malformed:
    """A request that nobody can answer."""
    completions, chat = "/v1/completions", "/v1/chat/completions"

    def fields(
        path: str = completions, statuses: tuple[int, ...] = (400,), **body: Any
    ) -> Malformed:
        return Malformed(path=path, content=json.dumps(body).encode(), statuses=statuses)

    return rng.choice(
        (
            Malformed(path=completions, content=b'{"prompt": "no end'),
            Malformed(path=chat, content=b"[1, 2, 3]"),
            Malformed(path=completions, content=b'{"prompt": "\xff\xfe"}'),
            Malformed(path=completions, content=b""),
            fields(prompt="a", temperature=-1),
            fields(prompt="a", temperature="hot"),
            fields(prompt="a", max_new_tokens=1),
            fields(prompt="a", n=0),
            fields(prompt="a", best_of=3),
            fields(prompt=[]),
            fields(prompt=[vocab]),
            fields(prompt=[1, "a"]),
            fields(prompt="a" * 400, logit_bias={str(vocab): 1.0}),
            fields(prompt=[7] * (longest + 1)),
            fields(prompt="a", model="another", statuses=(404,)),
            fields(prompt="a" * (max_body + 1), statuses=(413,)),
            fields(chat, messages=[]),
            fields(chat, messages=[{"role": "wizard", "content": "a"}]),
            fields(chat, messages=[{"role": "user", "content": "a"}], tools=[{"type": "function"}]),
            fields(chat, messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
            fields("/v1/nothing", statuses=(404,)),
        )
    )
