"""One set of bfloat16 weights in the two forms that the engines of `benchmarks.peers` read, made
from one GGUF file.
"""

from __future__ import annotations

from pathlib import Path

FROM_THE_WRITER = (
    "GGUF.",
    "general.architecture",
    "general.file_type",
    "general.quantization_version",
)
"""Metadata that describes the file rather than the model."""


def to_safetensors(gguf: Path, directory: Path) -> None:
    """The model of a GGUF file as bfloat16 safetensors, through Transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    read = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16
    )
    # What was read from GGUF cannot be saved as it is; a model made of its config can.
    clean = type(read)(read.config).to(torch.bfloat16)
    clean.load_state_dict(read.state_dict())
    # The weights are not quantised any more.
    clean.config.__dict__.pop("quantization_config", None)
    clean.save_pretrained(directory)


def to_bf16_gguf(source: Path, target: Path) -> None:
    """The same model with its matrices in bfloat16 and its vectors as they were, under the same
    metadata.
    """
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
    from gguf.quants import dequantize, quantize

    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)
    for name, value in reader.fields.items():
        if not name.startswith(FROM_THE_WRITER):
            inner = value.types[-1] if value.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, value.contents(), value.types[0], sub_type=inner)
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type)
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, weights)
        else:
            kind = GGMLQuantizationType.BF16
            writer.add_tensor(tensor.name, quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
