"""Tiny checkpoints with 4-bit weights, written by bitsandbytes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.fixtures import tok
from tests.training import model_folder

CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "llm_int8_skip_modules": None}
PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


def saved_by_transformers(path: Path, kind: str = "LLAMA", *, dtype: torch.dtype = torch.float32, double: bool = False,
                          sizes: dict[str, Any] | None = None, **how: Any) -> Path:  # fmt: skip
    """A folder as plain transformers writes it; `how`: keys of BitsAndBytesConfig."""
    pytest.importorskip("bitsandbytes")
    plain = model_folder(path, kind, dtype=dtype, **(sizes or {"hidden_size": 64, "intermediate_size": 128}))
    keys = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": double,
        "bnb_4bit_compute_dtype": dtype,
    }
    quantised = BitsAndBytesConfig(**keys | how)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=dtype, quantization_config=quantised, device_map="cpu")
    folder = path / f"{kind.lower()}-packed"
    model.save_pretrained(folder)
    tok().save_pretrained(folder)
    return folder


def packed_by_hand(
    plain: Path, folder: Path, wanted: Callable[[str], bool], *, double: bool = False, block: int = 64, kind: str = "nf4"
) -> Path:
    """A copy of a plain folder with the `wanted` weights packed."""
    functional = pytest.importorskip("bitsandbytes").functional
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not wanted(name):
            tensors[name] = tensor
            continue
        packed, state = functional.quantize_4bit(tensor, blocksize=block, compress_statistics=double, quant_type=kind)
        tensors |= {name: packed} | {f"{name}.{part}": t for part, t in state.as_dict(packed=True).items()}
    folder.mkdir()
    for file in plain.iterdir():
        if file.name != "model.safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder, quantization_config=CONFIG | {"bnb_4bit_use_double_quant": double, "bnb_4bit_quant_type": kind})
    return folder


def edit(folder: Path, **keys: Any) -> None:
    """Changes config.json; None removes a key."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | keys
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def unpacked_by_them(tensors: dict[str, Tensor], name: str) -> Tensor:
    """What bitsandbytes makes of a packed weight, in fp32, rounded to nothing."""
    functional = pytest.importorskip("bitsandbytes").functional
    parts = {n.removeprefix(f"{name}."): t for n, t in tensors.items() if n.startswith(f"{name}.")}
    state = functional.QuantState.from_dict(parts, device=torch.device("cpu"))
    # Their kernel for CPUs (0.50) takes the scale of a row's own blocks where blocks run from one row into the next.
    shape, state.dtype, state.shape = state.shape, torch.float32, torch.Size([1, state.shape.numel()])
    found: Tensor = functional.dequantize_4bit(tensors[name], state)
    return found.view(shape)
