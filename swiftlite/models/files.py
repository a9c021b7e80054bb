"""A model folder in Hugging Face form: what must be in it, its weights opened lazily, and the code it may not run."""

import errno
import hashlib
import json
import logging
import os
import pickle
import shutil
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swiftlite.recipe.errors import ModelError

logger = logging.getLogger(__name__)

SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
    "tiktoken.model",
)
_DISK_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
_MORE_SPACE = "Free some, or set HF_HOME (hub) or SWIFTLITE_CACHE (GGUF) to a larger disk."
_LFS = b"version https://git-lfs"


@dataclass(frozen=True)
class ModelFiles:
    """A complete model on this machine.

    Attributes:
        folder: config.json, tokenizer and weights in Hugging Face form.
        base_id: what an adapter_config.json names as its base: the hub id, else the folder.
        revision: the hub revision that was asked for.
        weights: weight files in the order of their index; empty when they were not asked for.
        is_safetensors: False: pickled files, which are read by torch's safe loader only.
        remote_code: Python code shipped with the model runs, allowed by model.trust_remote_code.
        commit: the hub's commit of the folder, where known.
    """

    folder: Path
    base_id: str
    revision: str | None = None
    weights: list[Path] = field(default_factory=list)
    is_safetensors: bool = True
    remote_code: bool = False
    commit: str | None = None


def cache_root() -> Path:
    """$SWIFTLITE_CACHE, else ~/.cache/swiftlite."""
    return Path(os.environ.get("SWIFTLITE_CACHE") or Path.home() / ".cache" / "swiftlite").expanduser()


def require_space(needed: int, folder: Path) -> None:
    """Raises ModelError when the disk of `folder` (which need not exist yet) has fewer than `needed` bytes free."""
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise ModelError(
            f"not enough disk space in {folder}: {needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free", fix=_MORE_SPACE
        )


def is_disk_full(error: BaseException) -> bool:
    """Whether an error, of whatever class, says that the disk is full: native writers only say so in words."""
    return getattr(error, "errno", None) in _DISK_FULL or "No space left" in str(error) or "os error 28" in str(error)


def disk_full(folder: Path) -> ModelError:
    """The error for a disk that filled up while writing."""
    return ModelError(f"no space left on the disk of {folder}", fix=_MORE_SPACE)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the model.

    Raises:
        ModelError: when the file is no JSON object; names a Git LFS pointer as such.
    """
    try:
        raw = path.read_bytes()
        _refuse_pointer(path, raw)
        value = json.loads(raw)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot be read: {error}", where=path, fix="Fetch the file again.") from error
    if not isinstance(value, dict):
        raise ModelError("is not a JSON object", where=path, fix="Fetch the file again.")
    return value


def _refuse_pointer(path: Path, head: bytes) -> None:
    if head.startswith(_LFS):
        raise ModelError("is a Git LFS pointer, not the file itself", where=path, fix="Run `git lfs pull` in its repository.")


def weight_names(folder: Path) -> tuple[list[str], bool]:
    """Names of the weight files that the folder's index (or the single file's name) calls for, and whether they are safetensors.

    The order is transformers' own: single file before index, safetensors before pickled. Nothing is said about files being there,
    but for single ones. ([], True) when the folder knows of no weights.
    """
    for single, is_safetensors in ((SAFETENSORS, True), (PICKLED, False)):
        if (folder / single).exists():
            return [single], is_safetensors
        index = folder / f"{single}.index.json"
        if index.exists():
            names = sorted(set(read_json(index).get("weight_map", {}).values()))
            bad = [n for n in names if Path(n).is_absolute() or ".." in Path(n).parts]
            if bad or not names:
                raise ModelError(f"names no usable weight files {bad or ''}".rstrip(), where=index, fix="Fetch the file again.")
            return names, is_safetensors
    return [], True


def weight_files(folder: Path) -> tuple[list[Path], bool]:
    """The weight files of a folder, each there and whole, and whether they are safetensors.

    Raises:
        ModelError: no weights; a missing, cut or stand-in file is named.
    """
    names, is_safetensors = weight_names(folder)
    if not names:
        raise ModelError(
            f"has no weights: neither {SAFETENSORS} nor {PICKLED}, single or with an index",
            where=folder,
            fix=_weights_hint(folder),
        )
    missing = [n for n in names if not (folder / n).exists()]
    if missing:
        raise ModelError(
            f"{len(missing)} of {len(names)} weight files missing: {', '.join(missing[:3])}",
            where=folder,
            fix="Fetch the missing files.",
        )
    for name in names:
        path = folder / name
        if is_safetensors:
            safetensors_header(path)
        else:
            with path.open("rb") as file:
                _refuse_pointer(path, file.read(64))
    return [folder / n for n in names], is_safetensors


def _weights_hint(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir())
    if found := next((n for n in names if n.endswith(".gguf")), None):
        return f"Name the GGUF file itself: {folder / found}."
    if any(n.endswith((".pth", ".ckpt", ".msgpack", ".h5")) or n.startswith("consolidated") for n in names):
        return "Convert them to the Hugging Face form first; this folder has them in another one."
    return "Fetch the weights into it."


def safetensors_header(path: Path) -> dict[str, Any]:
    """Tensor name -> {dtype, shape, data_offsets}, read without touching the data.

    Raises:
        ModelError: when the file is no safetensors file or shorter than its header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        _refuse_pointer(path, start + file.read(56))
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        file.seek(8)
        header = file.read(length) if 8 + length <= size else b""
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        whole = 8 + length + max((t["data_offsets"][1] for t in tensors.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError("is not a safetensors file, or is cut short", where=path, fix="Fetch the file again.") from error
    if size < whole:
        raise ModelError(f"is cut short: {size} of {whole} bytes", where=path, fix="Fetch the file again.")
    return dict(tensors)


class _Slice:
    """A tensor that looks like safetensors' lazy slice, so that readers need one road only."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        names = {
            "float32": "F32",
            "float16": "F16",
            "bfloat16": "BF16",
            "float64": "F64",
            "int64": "I64",
            "int32": "I32",
            "uint8": "U8",
            "bool": "BOOL",
        }
        kind = str(self.tensor.dtype).removeprefix("torch.")
        return names.get(kind, kind.upper())

    def __getitem__(self, index: Any) -> Any:
        return self.tensor[index]


class Weights(Mapping[str, Any]):
    """Name -> lazy slice (get_shape(), get_dtype(), [...]) over all weight files, opened as they are needed."""

    def __init__(self, files: list[Path], is_safetensors: bool) -> None:
        self._is_safetensors = is_safetensors
        self._open: dict[Path, Any] = {}
        self._path: dict[str, Path] = {}
        for path in files:
            names = safetensors_header(path) if is_safetensors else self._pickled(path)
            self._path.update(dict.fromkeys(names, path))

    def __getitem__(self, name: str) -> Any:
        path = self._path[name]
        if not self._is_safetensors:
            return _Slice(self._pickled(path)[name])
        if path not in self._open:
            from safetensors import safe_open

            self._open[path] = safe_open(path, framework="pt")
        return self._open[path].get_slice(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._path)

    def __len__(self) -> int:
        return len(self._path)

    def _pickled(self, path: Path) -> dict[str, Any]:
        if path not in self._open:
            import torch

            try:
                try:
                    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
                except RuntimeError:  # files of torch before 1.6 cannot be mapped
                    state = torch.load(path, map_location="cpu", weights_only=True)
            except pickle.UnpicklingError as error:
                raise ModelError(
                    "holds pickled objects other than tensors; loading it would run code",
                    where=path,
                    fix="Use a copy of the model in safetensors form.",
                ) from error
            except (RuntimeError, EOFError, ValueError) as error:
                raise ModelError(
                    f"is no weight file, or is damaged: {str(error).splitlines()[0]}", where=path, fix="Fetch the file again."
                ) from error
            self._open[path] = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        tensors: dict[str, Any] = self._open[path]
        return tensors


def open_weights(files: ModelFiles) -> Mapping[str, Any]:
    """The model's tensors by name, lazily; a safetensors slice reads only the rows it is indexed with.

    4-bit weights of bitsandbytes look like plain ones; see `bnb4bit.PackedSlice`.

    Raises:
        ModelError: when a file is damaged, or pickled with anything but tensors in it.
    """
    weights = Weights(files.weights, files.is_safetensors)
    if not any(".quant_state." in name for name in weights):
        return weights
    from swiftlite.models.bnb4bit import Unpacked

    return Unpacked(weights)


def check_remote_code(folder: Path, trusted: bool) -> bool:
    """Whether Python code shipped with the model will run. Untrusted, it never runs: transformers' own class serves.

    Raises:
        ModelError: when the model cannot be loaded without its code and that is not allowed; names the files that would run.
    """
    config = read_json(folder / "config.json")
    tokenizer = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    model_code, tokenizer_code = _code_files(config.get("auto_map")), _code_files(tokenizer.get("auto_map"))
    files = sorted({*model_code, *tokenizer_code})
    if not files:
        return False
    if trusted:
        logger.warning("remote code of %s runs, as model.trust_remote_code allows: %s", folder, ", ".join(files))
        return True
    needed = [f for f in model_code if not _known_model(config)]
    needed += [f for f in tokenizer_code if not _known_tokenizer(folder, tokenizer)]
    if needed:
        raise ModelError(
            f"needs remote code to load: it would run {', '.join(sorted(set(needed)))}",
            where=folder,
            fix="Read those files; set model.trust_remote_code: true to allow them.",
        )
    logger.info("%s ships code (%s) that is not run: transformers has its own class for it", folder, ", ".join(files))
    return False


def _code_files(auto_map: Any) -> list[str]:
    """Python files an auto_map refers to: `modeling_x.Class` or `org/repo--modeling_x.Class`, alone or in lists."""
    values = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
    flat = [v for value in values for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, str)]
    named = [(repo, rest) if mark else ("", repo) for repo, mark, rest in (v.partition("--") for v in flat)]
    return sorted({f"{ref.rpartition('.')[0]}.py" + (f" of {repo}" if repo else "") for repo, ref in named})


def _known_model(config: dict[str, Any]) -> bool:
    from transformers.models.auto import modeling_auto

    kind = config.get("model_type")
    return (
        kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        or kind in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    )


def _known_tokenizer(folder: Path, config: dict[str, Any]) -> bool:
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    if (folder / "tokenizer.json").exists():
        return True
    name = str(config.get("tokenizer_class") or "")
    return bool(name) and (tokenizer_class_from_name(name) or tokenizer_class_from_name(f"{name}Fast")) is not None


def identity(files: ModelFiles) -> dict[str, Any]:
    """What a model is, JSON-able and cheap: name, commit, hash of the config, and each weight file's size and hash of its header.

    A safetensors header lists every tensor with type, shape and place; hashing gigabytes of values would delay each start.
    """
    weights: dict[str, Any] = {}
    for path in files.weights:
        header = json.dumps(safetensors_header(path), sort_keys=True) if files.is_safetensors else ""
        weights[path.name] = {"bytes": path.stat().st_size, "header_sha256": hashlib.sha256(header.encode()).hexdigest()}
    config = hashlib.sha256((files.folder / "config.json").read_bytes()).hexdigest()
    names = {"base": files.base_id, "revision": files.revision, "commit": files.commit}
    return {**names, "config_sha256": config, "weights": weights}
