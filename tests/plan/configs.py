"""Public configs of the test data, by name."""

from __future__ import annotations

from pathlib import Path

from octavo.cache.layout import GPU, CacheLayout, Profile, solve_layout
from octavo.plan.planner import Model, read_model
from octavo.spec.stream import CacheDtypes

CONFIGS = Path(__file__).resolve().parent.parent / "data" / "configs"
NAMES = tuple(sorted(path.stem for path in CONFIGS.glob("*.json") if path.stem != "ANSWER_KEY"))
GIB = 2**30
FP8, FP4 = "float8_e4m3fn", "float4_e2m1fn_x2"


def path_of(name: str) -> Path:
    return CONFIGS / f"{name}.json"


def model_of(name: str, **dtypes: str) -> Model:
    return read_model(path_of(name), dtypes=CacheDtypes(**dtypes))


def layout_of(model: Model, *, memory: int = 80 * GIB, profile: Profile = GPU) -> CacheLayout:
    spec = model.spec
    return solve_layout(
        model.groups,
        arena_bytes=memory,
        profile=profile,
        hash_unit=spec.hash_unit,
        max_model_len=spec.max_model_len,
    )
