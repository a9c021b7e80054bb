"""Datasets of the Hugging Face hub."""

from pathlib import Path
from typing import Any

from swiftlite.data.row import shorten
from swiftlite.recipe.errors import DataError
from swiftlite.recipe.schema import DataSource

HUB_TIMEOUT_S = 10


def hub_table(source: DataSource, *, streaming: bool = False) -> Any:
    """The `datasets.Dataset` of the source's subset and split, from the hub, or from its cache when that cannot be reached.

    Args:
        streaming: as a `datasets.IterableDataset`, which fetches rows as they are asked for.

    Raises:
        DataError: no such dataset, no access to it, no such subset or split, or offline and not cached.
    """
    import datasets
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    # `datasets` retries an unreachable hub for half a minute; this one question is answered in seconds.
    try:
        huggingface_hub.HfApi().dataset_info(source.path, revision=source.revision, timeout=HUB_TIMEOUT_S)
    except GatedRepoError as error:
        fix = "Ask for access on its page, then `hf auth login`."
        raise DataError("is a gated dataset and you have no access.", where=source.path, fix=fix) from error
    except RepositoryNotFoundError as error:
        what = "is neither a path here nor a dataset on the hub (or it is private: `hf auth login`)."
        raise DataError(what, where=source.path) from error
    except Exception as error:
        cached = Path(datasets.config.HF_DATASETS_CACHE) / source.path.replace("/", "___")
        if not cached.is_dir():
            what = f"is not a path here, and the hub cannot be reached ({type(error).__name__})."
            raise DataError(what, where=source.path, fix="Give a local file, or go online once so that it is cached.") from error
    try:
        return datasets.load_dataset(
            source.path, name=source.subset, split=source.split, revision=source.revision, streaming=streaming
        )
    except (ValueError, OSError, RuntimeError, HfHubHTTPError, datasets.exceptions.DatasetsError) as error:
        what = f"cannot be loaded: {shorten(str(error))}"
        raise DataError(what, where=source.path, fix="See `subset` and `split` of the source.") from error


def without_nulls(value: Any) -> Any:
    """Columnar files cannot tell an absent key from a null one; rows of chat mean the former."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
