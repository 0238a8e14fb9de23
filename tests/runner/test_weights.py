"""Arena copies, and complaints about checkpoints and files that do not fit, by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from safetensors.torch import load_file, save_file

from octavo.base import ConfigError, UnsupportedError
from octavo.nn.decoder import Decoder
from octavo.runner.arena import Arena
from octavo.runner.gguf import GGUFModel, LeanReader, unpermute
from octavo.runner.weights import fill, safetensors_weights
from octavo.sched.step import CopyJob
from octavo.spec.hf import find_families, load_config, read_spec
from tests import tiny
from tests.runner.plans import hand_layout

FAMILIES = find_families()
CPU = torch.device("cpu")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return tiny.write("llama", tmp_path)


def load(path: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    spec = read_spec(load_config(path), families=FAMILIES)
    model = Decoder(spec, dtype=dtype, device="meta")
    family = FAMILIES.named(spec.family)
    fill(model, safetensors_weights(path, family), family=family, device=CPU)
    return model


def test_every_weight_arrives(llama: Path) -> None:
    stored, model = load_file(llama / "model.safetensors"), load(llama)
    loaded = dict(model.named_parameters())
    assert loaded.keys() == stored.keys()
    assert all(
        torch.equal(loaded[name], stored[name]) and not loaded[name].requires_grad
        for name in stored
    )
    assert {weight.dtype for weight in load(llama, torch.bfloat16).parameters()} == {torch.bfloat16}


def test_sharded_checkpoints(llama: Path) -> None:
    stored = load_file(llama / "model.safetensors")
    names = sorted(stored)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in shards.items():
        save_file({name: stored[name] for name in part}, llama / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    (llama / "model.safetensors").unlink()
    assert all(torch.equal(weight, stored[name]) for name, weight in load(llama).named_parameters())
    (llama / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"b\.safetensors"):
        load(llama)


def test_progress_counts_all_tensors(llama: Path) -> None:
    seen: list[tuple[int, int]] = []
    family = FAMILIES.named("llama")
    total = len(list(safetensors_weights(llama, family, progress=lambda *at: seen.append(at))))
    assert seen == [(i + 1, total) for i in range(total)]


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
def test_misfits_are_named(llama: Path, change: str) -> None:
    stored, name = load_file(llama / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    if change == "missing":
        del stored[name]
    elif change == "unexpected":
        name = "model.layers.9.what.weight"
        stored[name] = torch.zeros(2)
    else:
        stored[name] = stored[name][:3].clone()
    save_file(stored, llama / "model.safetensors")
    with pytest.raises(ConfigError, match=name):
        load(llama)


def test_tied_heads_may_be_stored_or_not(tmp_path: Path) -> None:
    path = tiny.write("gemma3", tmp_path)
    stored = load_file(path / "model.safetensors")
    assert "lm_head.weight" not in dict(load(path).named_parameters())
    save_file(
        {**stored, "lm_head.weight": stored["model.embed_tokens.weight"].clone()},
        path / "model.safetensors",
    )
    assert "lm_head.weight" not in dict(load(path).named_parameters())
    save_file(
        {**stored, "lm_head.weight": stored["model.embed_tokens.weight"] + 1},
        path / "model.safetensors",
    )
    with pytest.raises(ConfigError, match=r"lm_head\.weight .* tie_word_embeddings .* to false"):
        load(path)


def test_copies_run_in_order_and_may_overlap(llama: Path) -> None:
    layout = hand_layout(read_spec(load_config(llama), families=FAMILIES), (4,))
    arena, unit = Arena(layout), layout.arena.unit_bytes
    arena.buffer.copy_(torch.arange(arena.buffer.numel()) // unit % 251)
    arena.copy(
        [
            CopyJob(source=0, target=10, units=2),
            CopyJob(source=10, target=20, units=1),
            CopyJob(source=4, target=5, units=3),
        ]
    )
    assert arena.buffer[::unit][[10, 11, 20, 4, 5, 6, 7, 8]].tolist() == [0, 1, 0, 4, 4, 5, 6, 8]


def write_gguf(path: Path, name: str = "llama", **metadata: float) -> None:
    writer = GGUFWriter(path, name)
    writer.add_context_length(128)
    writer.add_block_count(1)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["a", "bc", "", "déf"])
    writer.add_token_scores([0.0, 1.0, 2.0, 3.0])
    for key, value in metadata.items():
        writer.add_float32(f"{name}.{key.replace('__', '.')}", value)
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd": (4, 8),
        "output_norm": (8,),
        "blk.0.attn_norm": (8,),
        "blk.0.ffn_norm": (8,),
    }
    shapes |= {
        "blk.0.attn_q": (8, 8),
        "blk.0.attn_k": (4, 8),
        "blk.0.attn_v": (4, 8),
        "blk.0.attn_output": (8, 8),
    }
    shapes |= {"blk.0.ffn_gate": (16, 8), "blk.0.ffn_up": (16, 8), "blk.0.ffn_down": (8, 16)}
    for tensor, shape in shapes.items():
        writer.add_tensor(f"{tensor}.weight", rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_lean_reader_finds_what_the_library_finds(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf")
    lean, library = LeanReader(tmp_path / "x.gguf"), GGUFReader(tmp_path / "x.gguf")
    assert lean.fields.keys() == library.fields.keys()
    assert [(t.name, t.data.tolist()) for t in lean.tensors] == [
        (t.name, t.data.tolist()) for t in library.tensors
    ]
    assert lean.fields["llama.context_length"].contents() == 128


def test_gguf_fills_a_model(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf")
    gguf = GGUFModel(tmp_path / "x.gguf", FAMILIES)
    spec = read_spec(gguf.config(), families=FAMILIES)
    assert (spec.vocab_size, len(spec.layers), spec.options["tied_embeddings"]) == (4, 1, True)
    model = Decoder(spec, dtype=torch.float32, device="meta")
    fill(model, gguf.weights(dtype=torch.float32), family=gguf.family, device=CPU)
    stored = {tensor.name: tensor.data for tensor in gguf.reader.tensors}
    layer = model.model.layers[0]
    assert np.array_equal(layer.mlp.down_proj.weight.numpy(), stored["blk.0.ffn_down.weight"])
    assert np.array_equal(
        layer.self_attn.k_proj.weight.numpy(), stored["blk.0.attn_k.weight"][[0, 2, 1, 3]]
    )
    assert np.array_equal(unpermute(np.arange(8), 2), [0, 2, 1, 3, 4, 6, 5, 7])


def test_gguf_refusals_name_the_key(tmp_path: Path) -> None:
    write_gguf(tmp_path / "key.gguf", rope__scaling__factor=4.0)
    write_gguf(tmp_path / "arch.gguf", name="falcon")
    with pytest.raises(UnsupportedError, match=r"rope\.scaling\.factor"):
        GGUFModel(tmp_path / "key.gguf", FAMILIES).config()
    with pytest.raises(UnsupportedError, match="falcon"):
        GGUFModel(tmp_path / "arch.gguf", FAMILIES)
    (tmp_path / "junk.gguf").write_bytes(b"nothing at all of the kind")
    with pytest.raises(ConfigError, match=r"junk\.gguf"):
        GGUFModel(tmp_path / "junk.gguf", FAMILIES)
    with pytest.raises(ConfigError, match="does not exist"):
        GGUFModel(tmp_path / "none.gguf", FAMILIES)
