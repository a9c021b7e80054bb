"""A GGUF file becomes a Hugging Face folder in the cache, once, and is a normal model afterwards.

transformers reads the weights, config and tokenizer. What it leaves out or gets wrong for use as a base model is mended here:
splitting of digits, Llama 3's scaled rotary frequencies, stop tokens, a tokenizer class that older versions know, 32-bit noise in
config numbers. What cannot be carried over is refused by name.

Type of the weights: that of the file where it holds plain floats; bfloat16 where it is quantised: the type that today's
models are published in, and finer than the blocks of four to six bits that GGUF files are made of.
"""

import functools
import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from importlib.util import find_spec
from io import StringIO
from math import prod
from pathlib import Path
from typing import Any

from swiftlite.models.files import cache_root, disk_full, is_disk_full, require_space
from swiftlite.models.gguf_header import GgufHeader, read_header
from swiftlite.recipe.errors import ModelError

logger = logging.getLogger(__name__)

# Part of the cache folder's name: raise it when this file makes other folders than before.
_FORM = 1
# Pre-tokenizers that cut every digit off before GPT-2's rule cuts the rest; transformers builds GPT-2's rule alone for them.
# Source: llama.cpp's table of pre-tokenizer types (src/llama-vocab.cpp).
_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
_GPT2 = {"", "default", "gpt-2", "gpt2", "jina-es", "jina-de", "mpt", "olmo", "jais", "trillion", "granite-docling"}
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # transformers' names and GGUF's
_LLAMA3 = {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"}


def dequantise_gguf(path: Path, *, need_weights: bool = True) -> Path:
    """The cache folder with the model of a GGUF file in Hugging Face form, made on the first call.

    Named by the hash of the file's content; complete as soon as it exists. Any number of processes may call
    at once: one works, the others wait. With `need_weights=False` a folder without weights may come back.

    Raises:
        ModelError: no GGUF file, damaged, of an architecture or with settings that transformers cannot carry; `gguf` not
            installed; no disk space.
    """
    path = path.expanduser().absolute()
    header = read_header(path)
    if int(header.fields.get("split.count") or 1) > 1:
        raise ModelError("is one part of a split GGUF", where=path, fix="Join the parts with `llama-gguf-split --merge` first.")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    root = cache_root() / "gguf"
    full = root / f"{digest[:32]}-{_FORM}"
    if full.exists():
        return full
    target = full if need_weights else full.with_name(f"{full.name}-config")
    if target.exists():
        return target
    if find_spec("gguf") is None:
        raise ModelError(
            "reading GGUF needs the package `gguf`, which is not installed", where=path, fix="pip install 'swiftlite[demo]'"
        )
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root / f".{target.name}.lock"):
            if not target.exists():
                _make(header, digest, target, need_weights)
    except OSError as error:
        if is_disk_full(error):
            raise disk_full(root) from error
        raise ModelError(
            f"cannot write the model's folder: {error}", where=root, fix="Set SWIFTLITE_CACHE to a folder you may write to."
        ) from error
    return target


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    from filelock import FileLock  # a dependency of huggingface_hub

    with FileLock(path):
        yield


def _require_whole(header: GgufHeader) -> None:
    """Raises ModelError when the file ends before its last tensor does, or has tensors of a type that is not known."""
    from gguf import GGML_QUANT_SIZES

    sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}  # type -> (elements, bytes) of a block
    there = header.path.stat().st_size
    for tensor in header.tensors.values():
        if tensor.kind not in sizes:
            raise ModelError(
                f"tensor {tensor.name} is of unknown type {tensor.kind}", where=header.path, fix="pip install -U gguf"
            )
        elements, size = sizes[tensor.kind]
        end = tensor.offset + prod(tensor.shape) // elements * size
        if end > there:
            raise ModelError(f"is damaged or cut short: {there} of {end} bytes", where=header.path, fix="Fetch the file again.")


def _make(header: GgufHeader, digest: str, target: Path, need_weights: bool) -> None:
    path = header.path
    _require_whole(header)
    if need_weights:
        size = {"float32": 4}.get(header.dtype, 2)
        require_space(header.elements * size + 64_000_000, target.parent)  # weights, and a tokenizer
        logger.info("dequantising %s once, into %s", path.name, target)
    for left in target.parent.glob(f".{target.name}.*.tmp"):  # of a process that was killed: the lock is ours
        shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        with _read_once():
            config = _write_config(header, work)
            _write_tokenizer(header, config, work)
            if need_weights:
                _write_weights(header, config, work)
        (work / "source.json").write_text(
            json.dumps({"gguf": path.name, "sha256": digest, "dtype": header.dtype}, indent=2) + "\n"
        )
        work.chmod(0o755)  # mkdtemp's folders are closed to others, caches are often shared
        os.rename(work, target)
    except BaseException as error:
        shutil.rmtree(work, ignore_errors=True)
        if target.exists():  # a file system without locks: another process was faster
            return
        if is_disk_full(error):
            raise disk_full(target.parent) from error
        raise


@contextmanager
def _read_once() -> Iterator[None]:
    """Remembers what `gguf` answers while a file is converted. transformers has it parse the file again for each question, and
    build its table of tensor names for each submodule: two thirds of the time for a small model."""
    import gguf

    pure = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, function in pure.items():
        setattr(gguf, name, functools.cache(function))
    try:
        yield
    finally:
        for name, function in pure.items():
            setattr(gguf, name, function)


@contextmanager
def _plain_errors(path: Path) -> Iterator[None]:
    """transformers' complaints about a file become ModelErrors. Its progress bar stays away from logs and pipes."""
    quiet = nullcontext() if sys.stderr.isatty() else redirect_stderr(StringIO())
    try:
        with quiet:
            yield
    except Exception as error:  # whatever its readers, config checks and writers raise
        if is_disk_full(error):
            raise disk_full(cache_root()) from error
        raise ModelError(
            f"cannot be read by transformers: {error}", where=path, fix="Use the model in Hugging Face form."
        ) from error


def _write_config(header: GgufHeader, work: Path) -> Any:
    from transformers import AutoConfig, GenerationConfig

    with _plain_errors(header.path):
        config = AutoConfig.from_pretrained(str(header.path.parent), gguf_file=header.path.name, local_files_only=True)
    for name, value in list(vars(config).items()):
        if isinstance(value, float):
            setattr(config, name, _shortest(value))
    config.dtype = header.dtype
    config.__dict__.pop("_model_name_or_path", None)  # the file's title, which is no place to load from
    _carry_rope(header, config)
    config.architectures = config.architectures or [_causal_class(header, config)]
    config.save_pretrained(work)
    generation = GenerationConfig.from_model_config(config)
    ends = [header.fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    unique = list(dict.fromkeys(int(i) for i in ends if i is not None))
    if unique:
        generation.eos_token_id = unique if len(unique) > 1 else unique[0]
    generation._from_model_config = False  # else transformers throws the stop tokens away again
    generation.save_pretrained(work)
    return config


def _causal_class(header: GgufHeader, config: Any) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    if config.model_type not in NAMES:
        raise ModelError(
            f"is a '{config.model_type}' model, which is no causal language model", where=header.path, fix="Use another model."
        )
    return str(NAMES[config.model_type])


def _shortest(value: float) -> float:
    """The shortest number that is the same 32-bit float: 9.999999747378752e-06 is how 1e-05 comes out of one."""
    import numpy as np

    return float(str(np.float32(value))) if np.float32(value) == value else value


def _carry_rope(header: GgufHeader, config: Any) -> None:
    """Scaled rotary embeddings, which transformers' reader drops without a word: Llama 3's are recovered from their factors.

    Formula: the `llama3` rope type of transformers (modeling_rope_utils), with the constants that all Llama 3 releases share.
    """
    import numpy as np

    rope = dict(getattr(config, "rope_parameters", None) or {})
    if rope.get("rope_type", "default") != "default":
        return
    scaling = header.fields.get(f"{header.arch}.rope.scaling.type")
    foreign = sorted(n for n in header.tensors if n.startswith("rope_factors"))
    if scaling in ("linear", "yarn", "longrope") or foreign:
        raise ModelError(
            f"has {scaling or 'longrope'} rotary scaling, which cannot be carried over",
            where=header.path,
            fix="Use the Hugging Face form.",
        )
    stored = header.read_float32("rope_freqs.weight")
    if stored is None or all(f == 1 for f in stored):
        return
    factors = np.array(stored)
    factor, low, high, length, theta = float(factors.max()), 1.0, 4.0, 8192, float(rope["rope_theta"])
    waves = 2 * np.pi * theta ** (np.arange(len(factors), dtype=np.float64) / len(factors))
    smooth = np.clip((length / waves - low) / (high - low), 0, 1)
    if not np.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-3):
        raise ModelError(
            "has rotary frequency factors that are not Llama 3's", where=header.path, fix="Use the model in Hugging Face form."
        )
    scaled = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    config.rope_parameters = {"rope_theta": theta, **scaled, "original_max_position_embeddings": length}


def _write_tokenizer(header: GgufHeader, config: Any, work: Path) -> None:
    from transformers import PreTrainedTokenizerFast  # AutoTokenizer would read the whole file once more for the model's type

    with _plain_errors(header.path):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            str(header.path.parent), gguf_file=header.path.name, local_files_only=True
        )
    pre = str(header.fields.get("tokenizer.ggml.pre") or "")
    _mend_splits(header, tokenizer, pre)
    if pre in _LLAMA3:
        tokenizer.backend_tokenizer.model.ignore_merges = True
        if "tokenizer.ggml.add_bos_token" not in header.fields and tokenizer.bos_token:  # older files: llama.cpp takes it as set
            tokenizer.add_bos_token = True
    for name, key in _NAMED.items():  # older transformers guess them
        token_id = header.fields.get(f"tokenizer.ggml.{key}_token_id")
        setattr(tokenizer, f"{name}_token", None if token_id is None else tokenizer.convert_ids_to_tokens(int(token_id)))
    tokenizer.model_max_length = int(getattr(config, "max_position_embeddings", tokenizer.model_max_length))
    tokenizer.save_pretrained(work)
    # The class name and list key that every transformers since 4 reads; what version 5 writes breaks version 4 and servers on it.
    file = work / "tokenizer_config.json"
    saved = json.loads(file.read_text(encoding="utf-8"))
    kept = {k: saved[k] for k in (*(f"{n}_token" for n in _NAMED), "chat_template", "model_max_length") if k in saved}
    extra = saved.get("extra_special_tokens") or saved.get("additional_special_tokens")
    kept |= {"additional_special_tokens": list(extra)} if extra else {}
    kept |= {"clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _mend_splits(header: GgufHeader, tokenizer: Any, pre: str) -> None:
    from tokenizers import decoders, pre_tokenizers

    if header.fields.get("tokenizer.ggml.model") != "gpt2":
        return
    # Bytes and nothing else: older transformers mix SentencePiece's rules in, which turn a written "\u2581" into a blank.
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.backend_tokenizer.normalizer = None
    if pre in _DIGITS:
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    elif pre not in _GPT2 | _LLAMA3 | _splits_of_transformers():
        logger.warning(
            "%s: pre-tokenizer '%s' is not known; text may be cut into other tokens than in training", header.path, pre
        )


def _splits_of_transformers() -> set[str]:
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:  # added after 5.17
        return set()
    return set(GGUF_PRE_TOKENIZER_SPLITS)


def _write_weights(header: GgufHeader, config: Any, work: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    with _plain_errors(header.path):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(header.path.parent),
            gguf_file=header.path.name,
            config=config,
            dtype=getattr(torch, header.dtype),
            quantization_config=GgufConfig(dequantize=True),
            local_files_only=True,
            output_loading_info=True,
        )
    model, info = loaded
    lost = sorted(set(info["missing_keys"]) - set(getattr(model, "all_tied_weights_keys", None) or {}))
    if lost:
        raise ModelError(
            f"has no weights for {len(lost)} parameters, such as {lost[0]}",
            where=header.path,
            fix="Use the model in Hugging Face form.",
        )
    model.hf_quantizer = None
    model.config.__dict__.pop("quantization_config", None)
    model.is_quantized = False
    generation = (work / "generation_config.json").read_bytes()
    with _plain_errors(header.path):
        model.save_pretrained(work, max_shard_size="5GB")
    (work / "generation_config.json").write_bytes(generation)
    for file in work.iterdir():
        file.chmod(0o644)  # safetensors closes its files to others; caches are often shared
