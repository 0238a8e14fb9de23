"""House rules that a linter does not know: import direction, one place per answer, no hidden state,
small files.

Owns the checker and its own test on bad snippets. Reads source text only: nothing of octavo is
imported, so a broken package can still be checked.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "octavo"

# A package may import from its own rank or a lower one.
RANKS = (
    ("base", "events"),
    ("config", "arguments"),
    ("spec",),
    ("memory",),
    ("cache",),
    ("sched",),
    ("kernels",),
    ("ops",),
    ("nn",),
    ("kinds",),
    ("models",),
    ("plan",),
    ("sim",),
    ("runner",),
    ("engine", "transfer"),
    ("server", "observe"),
    ("cli",),
    ("__init__", "__main__"),
)
RANK_OF = {name: rank for rank, names in enumerate(RANKS) for name in names}

TORCH_FREE = frozenset(
    {
        "__init__",
        "base",
        "events",
        "config",
        "arguments",
        "spec",
        "memory",
        "cache",
        "sched",
        "plan",
        "sim",
        "models",
    }
)
BY_BACKEND = r"ops\.(torch|cpu|backends)\b|nn\.module$|runner\.sampler$"
"""Modules that may know a backend: itself, those that fall back on it, and what is unbound."""

KNOWS_KINDS = frozenset({"kinds", "models"})
HEAVY = frozenset({"torch", "transformers", "safetensors", "gguf", "tokenizers", "huggingface_hub"})
MUTABLE_CALLS = frozenset(
    {"list", "dict", "set", "bytearray", "defaultdict", "OrderedDict", "Counter", "deque"}
)
CLOCKS = frozenset({"time", "datetime", "secrets", "uuid"})
SEEDED = frozenset({"Random", "default_rng", "Generator", "PCG64", "Philox", "SeedSequence"})

# Kinds that the field knows: forbidden outside their places even before somebody writes their
# folder.
KNOWN_KINDS = frozenset(
    {
        "sliding",
        "full_attention",
        "mamba",
        "mamba2",
        "mla",
        "swa",
        "gated_delta_net",
        "rg_lru",
        "short_conv",
    }
)
# Kind names that are also everyday words count only where they stand alone or before "attention".
EVERYDAY = frozenset({"full", "linear", "local", "global"})


@dataclass(frozen=True)
class Names:
    """What the checker must know of the whole package: kind names, and classes nobody may ask for
    by type.
    """

    kinds: frozenset[str]
    kind_classes: frozenset[str]
    law_classes: frozenset[str]


@dataclass(frozen=True)
class Source:
    """One module: its dotted name below octavo, and its text."""

    module: str
    text: str

    @property
    def part(self) -> str:
        """First component: the package that decides what the module may know."""
        return self.module.split(".")[0]

    @property
    def torch_free(self) -> bool:
        """True for the half that must import without torch."""
        return self.part in TORCH_FREE or bool(
            re.fullmatch(r"kinds(\.\w+)?(\.__init__|\.spec)|kinds\.\w+", self.module)
        )

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import, except those for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield node.lineno, module
            yield from (
                (node.lineno, f"{module}.{alias.name}")
                for alias in node.names
                if module == "octavo"
            )
        else:
            yield from imports(node)


def check_imports(source: Source) -> Iterator[str]:
    """Only downwards; and no torch in the half that must do without."""
    for line, module in imports(source.tree):
        top, *rest = module.split(".")
        if top == "octavo" and rest and source.part in RANK_OF:
            if rest[0] not in RANK_OF:
                if len(rest) == 1 and not rest[0].islower():
                    yield (
                        f"{line}: import public names from where they live, not from octavo itself"
                    )
                continue
            if RANK_OF[rest[0]] > RANK_OF[source.part]:
                yield f"{line}: {source.module} must not import {module}: imports go downwards only"
            if rest[0] == "kernels" and not re.match(r"kernels\b|ops\.cpu\b", source.module):
                yield f"{line}: {source.module} must not import {module}: it is the CPU backend's"
            if rest[:2] == ["ops", "torch"] and not re.match(BY_BACKEND, source.module):
                yield f"{line}: {source.module} must not import {module}: compute with Ops"
        if source.torch_free and top in HEAVY:
            yield f"{line}: {source.module} belongs to the torch-free half and imports {module}"
    if source.part not in RANK_OF:
        yield f"1: {source.part} has no rank in tests/test_tidy.py; say what it may import"


def docstrings(tree: ast.AST) -> set[int]:
    """ids of the constants that are documentation: strings standing alone as statements."""
    return {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def words(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of identifiers, and of strings that are not documentation, in quotes."""
    docs = docstrings(tree)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 1)
        if isinstance(node, ast.Name):
            yield line, node.id
        elif isinstance(node, ast.Attribute):
            yield line, node.attr
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield line, node.name
        elif isinstance(node, ast.arg) or (isinstance(node, ast.keyword) and node.arg):
            yield line, str(node.arg)
        elif isinstance(node, ast.alias):
            yield line, node.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
        ):
            yield line, f"'{node.value}'"


def snake(text: str) -> str:
    """CamelCase as snake_case, so that one pattern finds a word in both."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text).lower()


def kind_pattern(names: Names) -> re.Pattern[str]:
    """Finds a kind's name as a word of its own."""
    plain = sorted((names.kinds | KNOWN_KINDS) - EVERYDAY, key=len, reverse=True)
    everyday = sorted(names.kinds & EVERYDAY)
    parts = [rf"(?<![a-z0-9])(?:{'|'.join(plain)})(?![a-z0-9])"]
    if everyday:
        alone = "|".join(everyday)
        parts += [
            rf"^'(?:{alone})'$",
            rf"(?<![a-z0-9])(?:{alone})_?attention",
            rf"kinds\.(?:{alone})(?![a-z0-9])",
        ]
    return re.compile("|".join(parts))


def check_kind_names(source: Source, names: Names) -> Iterator[str]:
    """Kinds are known by name in kinds/ and models/ only."""
    if source.part in KNOWS_KINDS:
        return
    pattern = kind_pattern(names)
    for line, text in words(source.tree):
        found = pattern.search(text if " " in text else snake(text))
        if found:
            yield f"{line}: {text} names the kind {found.group()}; only kinds/ and models/ may"


def mentioned(node: ast.AST) -> set[str]:
    """Names and attributes anywhere in an expression."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | {
        n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)
    }


def check_type_questions(source: Source, names: Names) -> Iterator[str]:
    """Nobody asks which kind or law an object is."""
    forbidden = (frozenset() if source.part in KNOWS_KINDS else names.kind_classes) | (
        frozenset() if source.module == "spec.law" else names.law_classes
    )
    for node in ast.walk(source.tree):
        asked: set[str] = set()
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("isinstance", "issubclass")
        ):
            asked = mentioned(node.args[1]) if len(node.args) > 1 else set()
        elif isinstance(node, ast.Compare) and "type" in {
            n.func.id
            for n in ast.walk(node)
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
        }:
            asked = mentioned(node)
        elif isinstance(node, ast.MatchClass):
            asked = mentioned(node.cls)
        for name in sorted(asked & forbidden):
            yield (
                f"{node.lineno}: asks whether something is a {name}; ask its law or its streams"
                " instead"
            )


def mutable(value: ast.expr | None) -> bool:
    """True for an expression that makes a list, dict or set."""
    if isinstance(value, ast.Call):
        called = (
            value.func.id if isinstance(value.func, ast.Name) else getattr(value.func, "attr", "")
        )
        return called in MUTABLE_CALLS
    return isinstance(
        value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    )


def check_globals(source: Source) -> Iterator[str]:
    """No state between calls: no mutable module globals, no global statement."""
    for node in source.tree.body:
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        final = isinstance(node, ast.AnnAssign) and "Final" in ast.dump(node.annotation)
        for target in targets:
            name = target.id if isinstance(target, ast.Name) else ""
            dunder = name.startswith("__") and name.endswith("__")
            if (
                isinstance(node, ast.Assign | ast.AnnAssign)
                and mutable(node.value)
                and not (final or dunder)
            ):
                yield (
                    f"{node.lineno}: module global {name} is mutable; use Final, MappingProxyType,"
                    " a tuple or a frozenset"
                )
    for inner in ast.walk(source.tree):
        if isinstance(inner, ast.Global):
            yield f"{inner.lineno}: global statement"


def check_clock_and_chance(source: Source) -> Iterator[str]:
    """In the torch-free half time and randomness come in as arguments."""
    if not source.torch_free:
        return
    for line, module in imports(source.tree):
        if module.split(".")[0] in CLOCKS:
            yield f"{line}: imports {module}; a clock comes in as an argument"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("random", "numpy.random"):
            for alias in node.names:
                if alias.name not in SEEDED:
                    yield (
                        f"{node.lineno}: {node.module}.{alias.name} is a global generator; take a"
                        " seeded one as an argument"
                    )
        if isinstance(node, ast.Attribute) and node.attr not in SEEDED:
            owner = node.value
            chance = (isinstance(owner, ast.Name) and owner.id == "random") or (
                isinstance(owner, ast.Attribute)
                and owner.attr == "random"
                and mentioned(owner) & {"np", "numpy"}
            )
            if chance:
                yield (
                    f"{node.lineno}: random.{node.attr} is a global generator; take a seeded one as"
                    " an argument"
                )
        if (
            isinstance(node, ast.Call)
            and not (node.args or node.keywords)
            and mentioned(node.func) & {"default_rng", "Random"}
        ):
            yield f"{node.lineno}: a generator without a seed"


def check_docstring(source: Source) -> Iterator[str]:
    """Every file says what it is."""
    if not ast.get_docstring(source.tree):
        yield "1: no docstring saying what the file owns"


def check_method_docs(source: Source) -> Iterator[str]:
    """Public methods explain themselves; one that a base class declares may leave it to the
    base.
    """
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not node.bases:
            for method in node.body:
                if (
                    isinstance(method, ast.FunctionDef)
                    and not method.name.startswith("_")
                    and not ast.get_docstring(method)
                ):
                    yield f"{method.lineno}: {node.name}.{method.name} has no docstring"


def problems(source: Source, names: Names) -> list[str]:
    """Everything wrong with one module of the package."""
    found = [
        *check_imports(source),
        *check_kind_names(source, names),
        *check_type_questions(source, names),
        *check_globals(source),
        *check_clock_and_chance(source),
        *check_docstring(source),
        *check_method_docs(source),
    ]
    return [f"{source.module}:{problem}" for problem in found]


def classes(path: Path) -> frozenset[str]:
    return frozenset(
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )


def package_names() -> Names:
    """Kind names are the folders of octavo/kinds; classes come from their spec.py and from
    spec/law.py.
    """
    specs = sorted(PACKAGE.glob("kinds/*/spec.py"))
    return Names(
        kinds=frozenset(path.parent.name for path in specs),
        kind_classes=frozenset({"Kind"}).union(*(classes(path) for path in specs)),
        law_classes=classes(PACKAGE / "spec" / "law.py"),
    )


def package_sources() -> list[Source]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return [
        Source(".".join(path.relative_to(PACKAGE).with_suffix("").parts), path.read_text())
        for path in paths
    ]


@pytest.mark.parametrize("source", package_sources(), ids=lambda source: source.module)
def test_package_keeps_the_rules(source: Source) -> None:
    assert problems(source, package_names()) == []


@pytest.mark.parametrize(
    "path", sorted((ROOT / "tests").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_tests_are_explained(path: Path) -> None:
    assert list(check_docstring(Source("tests", path.read_text()))) == []


NAMES = Names(
    frozenset({"full", "sliding"}), frozenset({"Kind", "SlidingKind"}), frozenset({"Law", "Window"})
)
GOOD = (
    '"""Owns x."""\nfrom typing import Final\nfrom octavo.base import ceil_div\nTABLE: Final = {1:'
    " ceil_div(3, 2)}\n"
)


def test_checker_accepts_good_code() -> None:
    assert problems(Source("memory.pool", GOOD), NAMES) == []


@pytest.mark.parametrize(
    ("module", "code", "expected"),
    [
        (
            "memory.pool",
            "from octavo.cache.manager import KVCacheManager",
            "imports go downwards only",
        ),
        ("spec.hf", "def f():\n    import octavo.runner.runner", "imports go downwards only"),
        ("cache.manager", "from octavo import LLM", "not from octavo itself"),
        ("sched.scheduler", "import torch", "torch-free half"),
        ("kinds.sliding.spec", "from transformers import AutoConfig", "torch-free half"),
        ("elsewhere.x", "", "has no rank"),
        ("nn.norm", "from octavo.kernels.pointwise import normed", "the CPU backend's"),
        ("ops.states", "from octavo.kernels.recurrent import Places", "the CPU backend's"),
        ("kinds.full.layer", "from octavo.ops.torch.attention import attend", "with Ops"),
        (
            "cache.manager",
            "def f(kind):\n    return kind.name == 'sliding'",
            "names the kind sliding",
        ),
        ("sched.scheduler", "sliding_window = 3", "names the kind sliding"),
        ("runner.runner", "class SlidingCache:\n    pass", "names the kind sliding"),
        ("engine.core", "x = 'full_attention'", "names the kind full_attention"),
        ("cache.manager", "x = kind == 'full'", "names the kind 'full'"),
        ("cache.manager", "x = full_attention_groups", "names the kind full_attention"),
        ("sim.world", "from octavo.kinds.full.spec import Thing", "names the kind kinds.full"),
        (
            "runner.runner",
            "def f(x):\n    return isinstance(x, Window)",
            "asks whether something is a Window",
        ),
        (
            "runner.runner",
            "def f(x):\n    return isinstance(x, (int, spec.SlidingKind))",
            "asks whether something is a SlidingKind",
        ),
        (
            "cache.x",
            "def f(x):\n    return type(x.law) is Window",
            "asks whether something is a Window",
        ),
        (
            "cache.x",
            "def f(x):\n    match x:\n        case Window():\n            return 1",
            "asks whether something is a Window",
        ),
        ("memory.pool", "CACHE = {}", "mutable"),
        ("memory.pool", "CACHE: dict[int, int] = dict()", "mutable"),
        ("memory.pool", "def f():\n    global X\n    X = 1", "global statement"),
        ("sched.scheduler", "import time", "a clock comes in"),
        ("sim.world", "import random\nx = random.random()", "global generator"),
        ("sim.world", "import numpy as np\nx = np.random.rand(3)", "global generator"),
        ("sim.world", "from random import Random\nx = Random()", "without a seed"),
        ("memory.pool", "class Pool:\n    def take(self):\n        pass", "has no docstring"),
    ],
)
def test_checker_finds_bad_code(module: str, code: str, expected: str) -> None:
    found = problems(Source(module, f'"""Owns x."""\n{code}\n'), NAMES)
    assert any(expected in problem for problem in found), found


def test_checker_wants_a_docstring() -> None:
    assert any("no docstring" in problem for problem in problems(Source("base", "x = 1\n"), NAMES))


def test_checker_lets_seeded_generators_and_everyday_words_pass() -> None:
    code = (
        '"""Owns x."""\nimport random\ndef f(seed, full, full_slabs):\n    """The pool is'
        ' full."""\n    return random.Random(seed), f\'{full} is full\'\n'
    )
    assert problems(Source("sim.world", code), NAMES) == []
