"""Layers that read another layer's keys and values: no bytes of their own, every entry stored once,
checkpoints as published.

What they read is compared in ``test_equivalence.py``, for fresh, chunked and decode steps alike.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.ops.paged import CacheView
from octavo.ops.reads import Writes
from octavo.spec.group import make_groups
from octavo.spec.hf import load_config, read_spec
from tests import tiny

NAMES = ("gemma3n", "gemma4")
COUNT = 8
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)


def engine(path: Path, **options: object) -> LLM:
    given: dict[str, object] = {
        "kv_memory": "32MiB",
        "max_model_len": 256,
        "device": "cpu",
        "skip_tokenizer_init": True,
    }
    return LLM(path, dtype="float32", **{**given, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*NAMES, "gemma4_values"])
def test_layers_that_share_have_no_bytes_planned_or_run(tmp_path: Path, name: str) -> None:
    path = tiny.write(name, tmp_path)
    spec = read_spec(load_config(path))
    groups = make_groups(spec, "float32")
    assert groups == make_groups(read_spec(load_config(path), planning=True), "float32")
    sharing = {layer.index for layer in spec.layers if layer.shares is not None}
    assert len(sharing) == tiny.SPECS[name].get("num_kv_shared_layers", 0)
    kept = [layer for group in groups for layer in group.layers]
    assert sorted(kept) == [layer.index for layer in spec.layers if layer.index not in sharing]
    held = engine(path).core._runner.layout.groups
    assert sorted(layer for group in held for layer in group.group.layers) == sorted(kept)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("length", "budget"), [(17, 1), (40, 7), (40, 2048), (17, 2048)])
def test_entries_are_stored_once_and_by_their_producer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, length: int, budget: int
) -> None:
    stored: Counter[int] = Counter()
    store = CacheView._store

    def counting(self: CacheView, writes: Writes) -> None:
        for name in self.fresh:
            stored[id(self.fields[name])] += writes.entries.numel()
        store(self, writes)

    path = tiny.write(name, tmp_path)
    llm = engine(path, max_num_batched_tokens=budget, enable_prefix_caching=False)
    monkeypatch.setattr(CacheView, "_store", counting)
    prompt = tiny.prompt(length, 5)
    (output,) = llm.generate([prompt], GREEDY, progress=False)
    assert output.outputs[0].token_ids == tiny.greedy(name, prompt, COUNT)[0]
    fields = {
        id(view): layer
        for (layer, _), streams in llm.core._runner._streams.items()
        if llm.core._runner.spec.layers[layer].shares is None
        for _, over in streams.values()
        for view in over.fields.values()
    }
    assert set(stored) == set(fields), "nobody but producers stores"
    computed = length + COUNT - 1
    for view, layer in fields.items():
        windowed = tiny.SPECS[name]["layer_types"][layer] == tiny.SLIDING
        if windowed and budget > 1:
            # Of a step that does not fit the ring only what is needed later is stored.
            assert 15 + COUNT - 1 <= stored[view] <= computed
        else:
            assert stored[view] == computed


@pytest.mark.parametrize("name", NAMES)
def test_a_multimodal_checkpoint_is_read_for_its_text_model(tmp_path: Path, name: str) -> None:
    source, target = tiny.write(name, tmp_path), tmp_path / "whole"
    target.mkdir()
    config = json.loads((source / "config.json").read_text())
    spec = read_spec(config)
    weights = {
        key.replace("model.", "model.language_model.", 1): value
        for key, value in load_file(source / "model.safetensors").items()
        if key != "lm_head.weight"
    }
    for layer in spec.layers:
        if layer.shares is not None:
            for part in ("k_proj", "v_proj", "k_norm"):
                # Published files hold these too; nobody computes with them.
                weights[f"model.language_model.layers.{layer.index}.self_attn.{part}.weight"] = (
                    torch.full((3,), float("nan"))
                )
    for tower in (
        "vision_tower.encoder",
        "audio_tower.conv",
        "embed_vision.projection",
        "embed_audio.projection",
    ):
        weights[f"model.{tower}.weight"] = torch.zeros(2)
    save_file(weights, target / "model.safetensors")
    (target / "config.json").write_text(
        json.dumps(
            {"model_type": config["model_type"].removesuffix("_text"), "text_config": config}
        )
    )
    prompt = tiny.prompt(30, 4)
    (output,) = engine(target).generate([prompt], GREEDY, progress=False)
    assert output.outputs[0].token_ids == tiny.greedy(name, prompt, COUNT)[0]
