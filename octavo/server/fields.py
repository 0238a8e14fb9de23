"""Fields that clients send and octavo does not read: what is done about each.

Owns one rule. What cannot change the answer is accepted; what would change it is refused, by name
and with what to send instead, unless its value asks for nothing. A name that nobody knows is
accepted and told in the log, unless it looks like a misspelt field. Knows names and plain values;
no request model and no engine.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

LOG = logging.getLogger("octavo.server")
MAX_NOTICES = 100
"""Names that the log tells of; a client that makes up more must not fill it."""

MAX_NAME = 80
"""Most characters of such a name that are shown."""

ALIKE = 0.85
"""Names more alike than this are taken for the same word, misspelt."""


@dataclass(frozen=True)
class Refused:
    """What to say of a field.

    but: values that ask for nothing, beside those of ``nothing``. asks: values that ask for
    something though they are among those.
    """

    says: str
    but: tuple[Any, ...] = ()
    asks: tuple[Any, ...] = ()


TEXT_ONLY = "octavo reads and writes text only"
IMAGES = "images are not supported yet; octavo reads text only"
LORA = "LoRA adapters are not supported yet; merge the adapter into the model and serve that"
CONSTRAIN = "send response_format, or structured_outputs"
CALLS = "send tools, and tool_choice"
SAMPLER = "octavo has temperature, top_p, top_k, min_p and penalties; leave it out"

REQUEST = MappingProxyType(
    {
        "adapter": Refused(LORA),
        "adapter_id": Refused(LORA),
        "adapters": Refused(LORA),
        "allowed_token_ids": Refused("send logit_bias"),
        "audio": Refused(TEXT_ONLY),
        "bad_words": Refused("send logit_bias"),
        "cfg_scale": Refused(SAMPLER, (1,)),
        "chat_template": Refused("whoever runs the server chooses it, with --chat-template"),
        "do_sample": Refused("send temperature: 0 for the likeliest tokens", (True,), (False,)),
        "documents": Refused("write them into the messages, or into chat_template_kwargs"),
        "dry_multiplier": Refused(SAMPLER, (0,)),
        "dynatemp_range": Refused(SAMPLER, (0,)),
        "early_stopping": Refused("octavo does no beam search"),
        "enable_thinking": Refused(
            'send chat_template_kwargs: {"enable_thinking": ...}', asks=(False,)
        ),
        "encoder_repetition_penalty": Refused(SAMPLER, (1,)),
        "epsilon_cutoff": Refused(SAMPLER, (0,)),
        "eta_cutoff": Refused(SAMPLER, (0,)),
        "extra_body": Refused("it is a word of the Python client; send its fields themselves"),
        "format": Refused(CONSTRAIN),
        "function_call": Refused(CALLS, ("none", "auto")),
        "functions": Refused(CALLS),
        "grammar": Refused(CONSTRAIN),
        "guidance_scale": Refused(SAMPLER, (1,)),
        "image": Refused(IMAGES),
        "image_url": Refused(IMAGES),
        "images": Refused(IMAGES),
        "include_reasoning": Refused("all text of the model is sent", (True,), (False,)),
        "include_stop_str_in_output": Refused("the text ends before its stop string"),
        "input": Refused("send prompt, or messages"),
        "input_ids": Refused("send prompt, which may be token ids"),
        "inputs": Refused("send prompt"),
        "json_schema": Refused(CONSTRAIN, asks=({},)),
        "length_penalty": Refused("octavo does no beam search", (1,)),
        "logits_processors": Refused("octavo runs no code of clients"),
        "lora": Refused(LORA),
        "lora_id": Refused(LORA),
        "lora_modules": Refused(LORA),
        "lora_name": Refused(LORA),
        "lora_path": Refused(LORA),
        "lora_request": Refused(LORA),
        "max_length": Refused("send max_tokens, which counts the answer alone"),
        "max_new_tokens": Refused("send max_tokens"),
        "max_output_tokens": Refused("send max_tokens"),
        "max_tool_calls": Refused("send parallel_tool_calls: false for one call at most"),
        "min_length": Refused("send min_tokens"),
        "min_new_tokens": Refused("send min_tokens"),
        "mirostat": Refused(SAMPLER, (0,)),
        "mirostat_mode": Refused(SAMPLER, (0,)),
        "mm_processor_kwargs": Refused(IMAGES),
        "modalities": Refused(TEXT_ONLY, (["text"],)),
        "moderation": Refused("octavo moderates nothing"),
        "n_predict": Refused("send max_tokens", (-1,)),
        "n_probs": Refused("send logprobs", (0,)),
        "negative_prompt": Refused(SAMPLER),
        "no_repeat_ngram_size": Refused(SAMPLER, (0,)),
        "no_stop_trim": Refused("the text ends before its stop string"),
        "num_beams": Refused("octavo does no beam search", (1,)),
        "num_predict": Refused("send max_tokens", (-1,)),
        "num_return_sequences": Refused("send n", (1,)),
        "options": Refused("send its fields beside the others"),
        "penalty_alpha": Refused(SAMPLER, (0,)),
        "prompt_embeds": Refused("send prompt, as text or token ids"),
        "prompt_token_ids": Refused("send prompt, which may be token ids"),
        "random_seed": Refused("send seed"),
        "reasoning": Refused("send reasoning_effort"),
        "reasoning_format": Refused("all text of the model is sent", ("none", "auto")),
        "regex": Refused(CONSTRAIN),
        "repeat_penalty": Refused("send repetition_penalty", (1,)),
        "return_full_text": Refused("send echo: true"),
        "return_token_ids": Refused("send logprobs, or the text to /tokenize"),
        "return_tokens_as_token_ids": Refused("send the text to /tokenize"),
        "safe_prompt": Refused("say so in a message with the role system"),
        "smoothing_factor": Refused(SAMPLER, (0,)),
        "stop_sequences": Refused("send stop"),
        "stop_words": Refused("send stop"),
        "suffix": Refused("octavo continues text and does not fill in"),
        "system": Refused("send a message with the role system"),
        "template": Refused("whoever runs the server chooses it, with --chat-template"),
        "tfs_z": Refused(SAMPLER, (1,)),
        "thinking": Refused('send chat_template_kwargs: {"enable_thinking": ...}', asks=(False,)),
        "thinking_budget": Refused("send max_tokens"),
        "top_a": Refused(SAMPLER, (0,)),
        "top_n_sigma": Refused(SAMPLER, (0, -1)),
        "truncate": Refused("send what is to be read"),
        "truncate_prompt_tokens": Refused("send what is to be read"),
        "truncation": Refused("send what is to be read", ("disabled", "auto")),
        "typical": Refused(SAMPLER, (1,)),
        "typical_p": Refused(SAMPLER, (1,)),
        "use_beam_search": Refused("octavo does no beam search"),
        "verbosity": Refused("say so in the messages", ("medium",)),
        "watermark": Refused("octavo marks nothing"),
        "web_search_options": Refused("octavo does not search", asks=({},)),
        "xtc_probability": Refused(SAMPLER, (0,)),
    }
)
"""Fields of requests that other servers have, and that would change the answer."""

CHAT = MappingProxyType(
    {
        **REQUEST,
        "best_of": Refused("send n, and choose", (1,)),
        "echo": Refused("the messages are the client's own; completions have echo"),
        "prefix": Refused("send continue_final_message: true"),
        "prompt": Refused("send messages, or send the prompt to /v1/completions"),
    }
)
"""The same for chats."""

COMPLETION = MappingProxyType(
    {
        **REQUEST,
        "messages": Refused("send prompt, or send the messages to /v1/chat/completions"),
        "tool_choice": Refused("send messages to /v1/chat/completions", ("none", "auto")),
        "tools": Refused("send messages to /v1/chat/completions"),
        "top_logprobs": Refused("send logprobs: N for N alternatives", (0,)),
    }
)
"""The same for completions."""

TOKENIZE = MappingProxyType(
    {
        name: REQUEST[name]
        for name in (
            "chat_template",
            "documents",
            "enable_thinking",
            "extra_body",
            "functions",
            "images",
            "input",
            "thinking",
            "truncate_prompt_tokens",
        )
    }
)
"""The same for /tokenize, which reads a conversation and answers nothing."""

MESSAGE = MappingProxyType(
    {
        "audio": Refused(TEXT_ONLY),
        "function_call": Refused("send tool_calls"),
        "image": Refused(IMAGES),
        "image_url": Refused(IMAGES),
        "images": Refused(IMAGES),
        "prefix": Refused("send continue_final_message: true with the request"),
    }
)
"""Fields of messages that would change the answer."""

PART = MappingProxyType(
    {"image": Refused(IMAGES), "image_url": Refused(IMAGES), "input_audio": Refused(TEXT_ONLY)}
)
"""Fields of content parts that would change the answer."""

FORMAT = MappingProxyType(
    {
        "structures": Refused("send tools, and tool_choice"),
        "triggers": Refused("send tools, and tool_choice"),
    }
)
"""Fields of a response format that would change the answer."""

STRUCTURE = MappingProxyType(
    {
        "disable_additional_properties": Refused("write additionalProperties into the schema"),
        "disable_any_whitespace": Refused("blanks of JSON are bounded already"),
        "structural_tag": Refused("send tools, and tool_choice"),
        "whitespace_pattern": Refused('write {"x-guidance": {...}} into the schema'),
    }
)
"""Fields of structured outputs that would change the answer."""

NONE: Mapping[str, Refused] = MappingProxyType({})

HARMLESS = frozenset(
    {
        "add_special_tokens",
        "annotations",
        "cache_prompt",
        "chat_template_kwargs",
        "created_at",
        "id",
        "id_slot",
        "include_obfuscation",
        "keep_alive",
        "metadata",
        "models",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning_details",
        "reasoning_effort",
        "request_id",
        "return_details",
        "safety_identifier",
        "service_tier",
        "slot_id",
        "spaces_between_special_tokens",
        "store",
        "timeout",
        "type",
        "user",
    }
)
"""Names known to change no answer, whatever their value: nothing is said of them."""


def nothing(value: Any) -> bool:
    """Whether a value is as good as absent: null, false, or an empty text, list or object."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


def refusal(name: str, value: Any, refused: Mapping[str, Refused]) -> str | None:
    """What to say of a field that is not octavo's; None where its value asks for nothing."""
    entry = refused.get(name)
    if entry is None or any(_same(value, other) for other in entry.but):
        return None
    asks = not nothing(value) or any(_same(value, other) for other in entry.asks)
    return entry.says if asks else None


def _same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def meant(name: str, known: Collection[str]) -> str | None:
    """The field that a name looks like; None where it looks like none."""
    letters = _letters(name)
    for one in known:
        if _letters(one) == letters:
            return one
    return next(iter(get_close_matches(name[:MAX_NAME], known, n=1, cutoff=ALIKE)), None)


def _letters(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def shown(name: str) -> str:
    """A client's own word, in ASCII and of bounded length: for logs, where it must stay one line of
    plain text.
    """
    return ascii(name[:MAX_NAME])[1:-1] + ("..." if len(name) > MAX_NAME else "")


@dataclass
class Notices:
    """Tells the log of each unknown name once, and of ``MAX_NOTICES`` names at most."""

    told: set[str] = field(default_factory=set)

    def tell(self, names: Iterator[str]) -> None:
        """Note names that a request had and octavo does not know."""
        for name in names:
            if name in self.told or len(self.told) >= MAX_NOTICES:
                continue
            self.told.add(name)
            LOG.warning("a request has the unknown field '%s', which does nothing", shown(name))
            if len(self.told) == MAX_NOTICES:
                LOG.warning("%d unknown fields; no more are told of", MAX_NOTICES)
