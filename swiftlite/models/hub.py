"""Fetches models from the Hugging Face hub and from ModelScope, and turns what can go wrong into plain words.

The hub is asked once with a short timeout before anything else: the download functions retry for minutes where a refused or
dead connection will not get better.
"""

import importlib
import importlib.util
import json
import logging
from collections.abc import Callable, Iterator
from glob import escape
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import FileMetadataError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from swiftlite.models.files import PICKLED, SAFETENSORS, TOKENIZER_FILES, disk_full, is_disk_full, require_space, weight_names
from swiftlite.recipe.errors import ModelError

logger = logging.getLogger(__name__)
T = TypeVar("T")

SMALL = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")  # config, tokenizer, chat template, weight index
ASK_TIMEOUT_S = 8.0
_NETWORK_PACKAGES = ("httpx", "httpx2", "httpcore", "requests", "urllib3")  # what the two libraries speak HTTP with


def is_offline() -> bool:
    """HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) is set; libraries read it once, when they are imported."""
    return bool(constants.HF_HUB_OFFLINE)


def check_id(name: str) -> None:
    """Raises ModelError when `name` cannot be a hub id."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ModelError(
            f"{name!r} is neither an existing path nor a hub id: {error}", fix="Give a folder, a GGUF file, or `org/name`."
        ) from error


def fetch_config(repo: str, revision: str | None, *, code: bool = False, refresh: bool = False) -> Path:
    """The snapshot folder with config and tokenizer (with `code`, Python files too). A whole cached one needs no network call.

    Raises:
        ModelError: not found, no access, no network, offline, no space: each in its own words.
    """
    cached = _cached(repo, revision, code)
    if cached is not None and not refresh:
        return cached
    usable = _cached_by_looks(repo, revision)
    if is_offline():
        if usable is not None:
            return usable
        raise ModelError(
            f"{_title(repo, revision)} is not in the cache ({constants.HF_HUB_CACHE}), and offline mode is on (HF_HUB_OFFLINE)",
            fix=f"Run `swiftlite download {repo}` where there is a network.",
        )
    try:
        on_hub = _names_on_hub(repo, revision)
    except ModelError as error:
        if usable is not None and isinstance(error, HubUnreachable):
            logger.warning("%s The copy in the cache is used.", error)
            return usable
        raise
    if "config.json" not in on_hub:
        raise ModelError(f"{_title(repo, revision)} has no config.json on the hub", fix=_no_config_hint(on_hub))
    small = [n for n in on_hub if _is_small(n, code)]
    require_space(sum(on_hub[n] for n in small), Path(constants.HF_HUB_CACHE))
    return _asked(
        repo, revision, lambda: Path(snapshot_download(repo, revision=revision, allow_patterns=[escape(n) for n in small]))
    )


def fetch_weights(repo: str, revision: str | None, folder: Path) -> None:
    """Puts the weights into the snapshot folder made by `fetch_config`: safetensors, else pickled files.

    Raises:
        ModelError: as `fetch_config`.
    """
    names, is_safetensors = weight_names(folder)
    if names and all((folder / n).exists() for n in names):
        return
    if is_offline():
        lacking = [n for n in names if not (folder / n).exists()] or [SAFETENSORS]
        raise ModelError(
            f"{_title(repo, revision)}: {lacking[0]} is not in the cache ({folder}), and offline mode is on (HF_HUB_OFFLINE)",
            fix=f"Run `swiftlite download {repo}` where there is a network.",
        )
    commit = folder.name  # weights of the very commit whose config was fetched
    on_hub = _names_on_hub(repo, commit)
    if not (names and is_safetensors):  # a single file shows only on the hub, and safetensors go before an index of pickled ones
        names = [n for n in (SAFETENSORS, *names, PICKLED) if n in on_hub]
        names = names[:1] if names[:1] == [SAFETENSORS] else names
    if not names:
        raise ModelError(
            f"{_title(repo, revision)} has no safetensors and no pickled weights on the hub", fix=_no_config_hint(on_hub)
        )
    require_space(sum(on_hub.get(n, 0) for n in names if not (folder / n).exists()), Path(constants.HF_HUB_CACHE))
    _asked(repo, revision, lambda: snapshot_download(repo, revision=commit, allow_patterns=[escape(n) for n in names]))


def _is_small(name: str, code: bool) -> bool:
    kinds = tuple(pattern[1:] for pattern in SMALL) + ((".py",) if code else ())
    return name.endswith(kinds) and ("/" not in name or name.startswith("additional_chat_templates/"))


def _title(repo: str, revision: str | None) -> str:
    return f"model '{repo}@{revision}'" if revision else f"model '{repo}'"


def _no_config_hint(names: dict[str, int]) -> str:
    if any(n.endswith(".gguf") for n in names):
        return "It holds GGUF files: download one and give its path."
    if "adapter_config.json" in names:
        return "It is a LoRA adapter: fetch it and name its folder in model.adapter, and its base model in model.name."
    return "Choose a model repository in Hugging Face form."


def _cached_by_looks(repo: str, revision: str | None) -> Path | None:
    """The cached snapshot when it holds a config and a tokenizer."""
    found = try_to_load_from_cache(repo, "config.json", revision=revision)
    folder = Path(found).parent if isinstance(found, str) else None
    return folder if folder is not None and any((folder / n).exists() for n in TOKENIZER_FILES) else None


def _cached(repo: str, revision: str | None, code: bool) -> Path | None:
    """The cached snapshot when nothing speaks against its being whole; other tools leave some with fewer files."""
    folder = _cached_by_looks(repo, revision)
    if folder is None:
        return None
    patterns = [*SMALL, *(["*.py"] if code else [])]
    try:
        snapshot_download(repo, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"], local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    return folder


class HubUnreachable(ModelError):
    """No answer from the hub: a cached copy may do instead."""


def _names_on_hub(repo: str, revision: str | None) -> dict[str, int]:
    """File names of a repository and their sizes in bytes."""
    info = _asked(repo, revision, lambda: HfApi().model_info(repo, revision=revision, timeout=ASK_TIMEOUT_S, files_metadata=True))
    return {s.rfilename: s.size or 0 for s in info.siblings or []}


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _asked(repo: str, revision: str | None, call: Callable[[], T]) -> T:
    """The answer of a hub call; its failures become ModelErrors."""
    try:
        return call()
    except Exception as error:
        for cause in _causes(error):
            plain = _in_plain_words(cause, repo, revision)
            if plain is not None:
                raise plain from error
        raise


def _in_plain_words(error: BaseException, repo: str, revision: str | None) -> ModelError | None:
    title, hub = _title(repo, revision), constants.ENDPOINT
    response = getattr(error, "response", None)
    if is_disk_full(error):
        return disk_full(Path(constants.HF_HUB_CACHE))
    if response is not None and hasattr(response, "status_code"):
        return _refused(int(response.status_code), response.headers.get("X-Error-Code", ""), repo, revision)
    if isinstance(error, OfflineModeIsEnabled):
        return ModelError(
            f"{title} is not in the cache, and offline mode is on (HF_HUB_OFFLINE)",
            fix=f"Run `swiftlite download {repo}` with a network.",
        )
    if isinstance(error, PermissionError):
        return ModelError(f"cannot write to the cache: {error}", fix="Set HF_HOME to a folder you may write to.")
    if isinstance(error, FileMetadataError | json.JSONDecodeError):  # a login page of the network, a proxy, a wrong HF_ENDPOINT
        return HubUnreachable(
            f"{hub} does not answer as a hub does, for {title}: {str(error).splitlines()[0]}",
            fix="Check the network and HF_ENDPOINT.",
        )
    if type(error).__module__.split(".")[0] in _NETWORK_PACKAGES or isinstance(error, ConnectionError | TimeoutError):
        return HubUnreachable(
            f"no network: cannot reach {hub} for {title} ({str(error) or type(error).__name__})",
            fix="Check the connection (or HF_ENDPOINT); a model in a local folder needs none.",
        )
    return None


def _refused(status: int, code: str, repo: str, revision: str | None) -> ModelError:
    """The hub answered, and said no. HTTP 401 stands for gated, private and, without a token, unknown models alike."""
    title, hub = _title(repo, revision), constants.ENDPOINT
    token = "log in with `hf auth login` or set HF_TOKEN"
    if code == "RevisionNotFound":
        return ModelError(f"model '{repo}': revision '{revision}' was not found on {hub}", fix="Check the part behind `@`.")
    if code == "EntryNotFound":
        return ModelError(
            f"a file of {title} was not found on {hub}", fix="Check the part behind `@`, or try again: it may just have changed."
        )
    if code == "GatedRepo" or status == 403:
        return ModelError(
            f"access to {title} is restricted (HTTP {status})", fix=f"Ask for access at {hub}/{repo}, then {token}."
        )
    if status == 401:
        return ModelError(
            f"access to {title} was refused (HTTP 401): it is gated or private, or there is no such model",
            fix=f"Check the id, and {token}.",
        )
    if status == 404:
        return ModelError(f"{title} was not found on {hub} (HTTP 404)", fix="Check the id for typing errors.")
    if status == 429:
        return ModelError(
            f"{hub} limits the number of requests, and sends no {title} now (HTTP 429)",
            fix="Wait a few minutes, or set HF_TOKEN.",
        )
    return HubUnreachable(f"{hub} cannot serve {title} now (HTTP {status})", fix="Try again later.")


def fetch_from_modelscope(
    repo: str, revision: str | None, *, need_weights: bool, code: bool = False, refresh: bool = False
) -> Path:
    """The folder of a ModelScope model with config and tokenizer, and its weights if asked for.

    Raises:
        ModelError: the `modelscope` package is not installed; else as `fetch_config`.
    """
    if importlib.util.find_spec("modelscope") is None:
        raise ModelError(
            "model.hub: modelscope needs the package `modelscope`, which is not installed",
            fix="pip install 'swiftlite[modelscope]'",
        )
    download = importlib.import_module("modelscope.hub.snapshot_download").snapshot_download
    small = [*SMALL, *(["*.py"] if code else [])]

    def get(patterns: list[str], local: bool = False) -> Path:
        return Path(
            download(repo, revision=revision, allow_file_pattern=patterns, ignore_file_pattern=["*/*"], local_files_only=local)
        )

    try:
        folder = get(small, local=True)
        names, _ = weight_names(folder) if (folder / "config.json").exists() else ([], True)
        whole = any((folder / n).exists() for n in TOKENIZER_FILES) and (
            not need_weights or (names and all((folder / n).exists() for n in names))
        )
        if whole and not refresh:
            return folder
    except Exception as error:  # the package has its own error for each release; the download below says what is wrong
        logger.debug("not in the ModelScope cache: %s", error)
    if is_offline():
        raise ModelError(
            f"{_title(repo, revision)} is not in the ModelScope cache, and offline mode is on (HF_HUB_OFFLINE)",
            fix="Fetch it with a network.",
        )
    try:
        folder = get(small)
        if need_weights:
            names, is_safetensors = weight_names(folder)
            folder = get([*small, *(names if names and is_safetensors else [SAFETENSORS])])
            if not is_safetensors and not (folder / SAFETENSORS).exists():
                folder = get([*small, *names])
            elif not weight_names(folder)[0]:
                folder = get([*small, PICKLED])
    except Exception as error:
        raise _modelscope_error(error, repo, revision) from error
    return folder


def _modelscope_error(error: Exception, repo: str, revision: str | None) -> ModelError:
    for cause in _causes(error):
        if is_disk_full(cause):
            return disk_full(Path(str(getattr(cause, "filename", None) or "the ModelScope cache")))
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status == 404 or "NotExist" in type(cause).__name__:
            return ModelError(f"{_title(repo, revision)} was not found on ModelScope", fix="Check the id for typing errors.")
        if status in (401, 403):
            return ModelError(
                f"access to {_title(repo, revision)} was refused by ModelScope (HTTP {status})",
                fix="Log in with `modelscope login`.",
            )
    text: Any = str(error) or type(error).__name__
    return HubUnreachable(f"ModelScope gave no {_title(repo, revision)}: {text}", fix="Check the id and the network.")
