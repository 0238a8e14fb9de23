"""The forms in which families write thoughts and calls, as data.

Owns ``Format``, the table of formats, and which of them a chat template belongs to. Regions are
described in the language of Transformers' response templates, which a checkpoint may bring itself.
Knows no request and no stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from octavo.base import ConfigError
from octavo.server.answers import calls as forms
from octavo.server.answers.calls import Reader

Region = Mapping[str, str]
"""``open`` or ``open_pattern``, and ``close`` or ``close_pattern``, as in a response template."""

THINK = ("<think>", "</think>")
NEVER = "\x00"
"""An anchor that no prompt has: parsers are told where an answer begins in another way."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a family writes an answer.

    signs: texts that are all in the chat template of such a model. calls: the region of one or
    several calls, None for a model that calls nothing. read: from what stands in that region to
    calls. thoughts: markers around what is thought, of which the first may stand in the prompt.
    regions: further ones, of ``content`` (named ``content...``) and ``reasoning_content``.
    writing: how calls are to be written (``answers/grammar.py``). closed: what lacks its closing
    marker is no call, though it reads like one. id: form of call ids.
    markers: texts of special tokens that have to be seen.
    template: a response template of the checkpoint's own, instead of all that.
    """

    name: str
    signs: tuple[str, ...] = ()
    calls: Region | None = None
    read: Reader = forms.read_object
    thoughts: tuple[str, str] | None = None
    regions: Mapping[str, Region] = field(default_factory=dict)
    writing: str = "object"
    closed: bool = False
    id: str = "call"
    markers: tuple[str, ...] = ()
    template: Mapping[str, Any] | None = None

    def shown(self) -> Iterator[str]:
        """Texts of special tokens that must not be left out of the answer's text."""
        yield from self.markers
        yield from self.thoughts or ()


# Repetitions are bounded: a stream holds back what may still become a marker, and looks at all of
# that again with every token.
HEAD = r"(?:<\|start\|>assistant)?"
REST = r"[^<]{0,64}(?:<\|constrain\|>[^<]{0,64})?<\|message\|>"
TO = r" to=functions\.(?P<name>[\w.\-]{1,256})"
HARMONY_END = r"<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)|(?=<\|channel\|>)"

FORMATS = (
    Format(
        name="harmony",
        signs=("<|channel|>", "<|message|>"),
        calls={
            "open_pattern": (
                rf"(?:<\|start\|>assistant{TO}<\|channel\|>(?:commentary|analysis){REST}"
                rf"|{HEAD}<\|channel\|>(?:commentary|analysis){TO}{REST})"
            ),
            "close_pattern": HARMONY_END,
        },
        read=forms.read_object,
        regions={
            "reasoning_content": {
                "open_pattern": rf"{HEAD}<\|channel\|>analysis(?! to=){REST}",
                "close_pattern": HARMONY_END,
            },
            "content_final": {
                "open_pattern": rf"{HEAD}<\|channel\|>(?:final|commentary(?! to=)){REST}",
                "close_pattern": HARMONY_END,
            },
        },
        writing="harmony",
        markers=(
            *("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>"),
            *("<|call|>", "<|return|>"),
        ),
    ),
    Format(
        name="dsml",
        signs=("｜DSML｜",),
        calls={
            "open_pattern": r"\s{0,16}<｜DSML｜(?:function_calls|tool_calls)>",
            "close_pattern": r"</｜DSML｜(?:function_calls|tool_calls)>",
        },
        read=forms.read_dsml,
        writing="dsml",
        markers=("｜DSML｜",),
    ),
    Format(
        name="deepseek_fenced",
        signs=("<｜tool▁calls▁begin｜>", "```json"),
        calls={
            "open_pattern": r"\s{0,16}<｜tool▁calls▁begin｜>",
            "close_pattern": r"<｜tool▁calls▁end｜>",
        },
        read=forms.read_deepseek,
        writing="deepseek_fenced",
        markers=(
            *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"),
            *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        ),
    ),
    Format(
        name="deepseek",
        signs=("<｜tool▁calls▁begin｜>",),
        calls={
            "open_pattern": r"\s{0,16}<｜tool▁calls▁begin｜>",
            "close_pattern": r"<｜tool▁calls▁end｜>",
        },
        read=forms.read_deepseek,
        writing="deepseek",
        markers=(
            *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"),
            *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        ),
    ),
    Format(
        name="kimi",
        signs=("<|tool_calls_section_begin|>",),
        calls={
            "open_pattern": r"\s{0,16}<\|tool_calls_section_begin\|>",
            "close_pattern": r"<\|tool_calls_section_end\|>",
        },
        read=forms.read_kimi,
        writing="kimi",
        id="kimi",
        markers=(
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
            *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
    ),
    Format(
        name="glm",
        signs=("<arg_key>", "<tool_call>"),
        calls={"open_pattern": r"\s{0,16}<tool_call>", "close_pattern": r"</tool_call>"},
        read=forms.read_glm,
        writing="glm",
        closed=True,
        markers=(
            *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"),
            *("<arg_value>", "</arg_value>"),
        ),
    ),
    Format(
        name="qwen_xml",
        signs=("<function=", "<parameter=", "<tool_call>"),
        calls={"open_pattern": r"\s{0,16}<tool_call>", "close_pattern": r"</tool_call>"},
        read=forms.read_xml,
        writing="xml",
        markers=("<tool_call>", "</tool_call>"),
    ),
    Format(
        name="mistral",
        signs=("[TOOL_CALLS]",),
        calls={
            "open_pattern": r"\s{0,16}\[TOOL_CALLS\]",
            "close_pattern": r"(?=\[TOOL_CALLS\])",
        },
        read=forms.read_list_or_named,
        thoughts=("[THINK]", "[/THINK]"),
        writing="mistral",
        id="short",
        markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ),
    Format(
        name="gemma",
        signs=("<|tool_call>",),
        calls={"open_pattern": r"\s{0,16}<\|tool_call>", "close_pattern": r"<tool_call\|>"},
        read=forms.read_gemma,
        regions={
            "reasoning_content": {
                "open_pattern": r"\s{0,16}<\|channel>thought\n?",
                "close_pattern": r"\s{0,16}<channel\|>",
            }
        },
        writing="gemma",
        markers=("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
    ),
    Format(
        name="function_gemma",
        signs=("<start_function_call>",),
        calls={
            "open_pattern": r"\s{0,16}<start_function_call>",
            "close_pattern": r"<end_function_call>",
        },
        read=forms.read_function_gemma,
        writing="function_gemma",
        markers=("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    Format(
        name="lfm2",
        signs=("<|tool_call_start|>",),
        calls={
            "open_pattern": r"\s{0,16}<\|tool_call_start\|>",
            "close_pattern": r"<\|tool_call_end\|>",
        },
        read=forms.read_python,
        writing="lfm2",
        markers=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    Format(
        name="hermes",
        signs=("<tool_call>",),
        calls={"open_pattern": r"\s{0,16}<tool_call>", "close_pattern": r"</tool_call>"},
        read=forms.read_object,
        writing="hermes",
        markers=("<tool_call>", "</tool_call>"),
    ),
    Format(
        name="list",
        signs=("<|tool_call|>",),
        calls={
            "open_pattern": r"\s{0,16}<\|tool_call\|>",
            "close_pattern": r"<\|/tool_call\|>",
        },
        read=forms.read_objects,
        writing="list",
        markers=("<|tool_call|>", "<|/tool_call|>"),
    ),
    Format(
        name="llama",
        signs=("<|python_tag|>",),
        calls={
            "open_pattern": (
                r"(?:\A|(?<=</think>))\s{0,16}(?:<\|python_tag\|>\s{0,16})?(?=\{)|\s{0,16}<\|python_tag\|>"
            ),
        },
        read=forms.read_known_objects,
        writing="llama",
        markers=("<|python_tag|>",),
    ),
    Format(
        name="pythonic",
        calls={
            "open_pattern": (
                r"(?:\A|(?<=</think>))\s{0,16}(?:<\|python_start\|>)?(?=\[\s{0,16}[A-Za-z_][\w.\-]{0,64}\()"
            ),
            "close_pattern": r"<\|python_end\|>",
        },
        read=forms.read_python,
        writing="pythonic",
        markers=("<|python_start|>", "<|python_end|>"),
    ),
)

NONE = Format(name="none")
NAMED = MappingProxyType({one.name: one for one in (*FORMATS, NONE)})


def detect(chat_template: str) -> Format:
    """The format of a model whose conversations look like that; ``none`` where nothing tells."""
    if "tools" not in chat_template and "</think>" not in chat_template:
        found = NONE
    else:
        fits = (one for one in FORMATS if one.signs and all(s in chat_template for s in one.signs))
        found = next(fits, NONE)
    if found is NONE and '{"name"' in chat_template and '"parameters"' in chat_template:
        # Llama 3's and 4's, which say in words how a call is written.
        found = NAMED["llama"]
    return with_thoughts(found, chat_template)


def with_thoughts(found: Format, chat_template: str) -> Format:
    """A format with the markers around thoughts that the chat template has."""
    if found.thoughts is not None:
        known = all(marker in chat_template for marker in found.thoughts)
        return found if known else replace(found, thoughts=None)
    if "reasoning_content" in found.regions or THINK[1] not in chat_template:
        return found
    return replace(found, thoughts=THINK)


def format_of(chat_template: Any, own: Mapping[str, Any] | None, wanted: str) -> Format:
    """The format that a server reads answers by.

    own: the checkpoint's response template, which goes first. wanted: ``auto``, or a format's name.
    Raises ConfigError for a name that there is not.
    """
    if wanted != "auto":
        if wanted not in NAMED:
            raise ConfigError(f"answer_format must be auto or one of {', '.join(NAMED)}")
        return with_thoughts(NAMED[wanted], _text(chat_template))
    found = detect(_text(chat_template))
    return found if own is None else replace(found, template=own)


def _text(chat_template: Any) -> str:
    if isinstance(chat_template, Mapping):
        return "\n".join(map(str, chat_template.values()))
    return str(chat_template or "")
