"""Samples in flat files that are mapped into memory: a set may be far larger than RAM, and costs no Python object a row."""

import hashlib
import json
from array import array
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from swiftlite.data.render import Sample

# One record a sample. `end`: tokens up to and with it; `row`: its row, counted from 1 over all sources; `line`: its line or row
# number in its file; `place`: index of its file's name in `places`; `trained`: its trained tokens.
RECORD = np.dtype([("end", "<i8"), ("row", "<i8"), ("line", "<i8"), ("place", "<i4"), ("trained", "<i4")])
TOKEN = np.dtype("<i4")
IDS, LABELS, SAMPLES, FACTS = "input_ids.bin", "labels.bin", "samples.bin", "facts"


class Columns:
    """Samples of consecutive rows on their way into a store."""

    def __init__(self) -> None:
        self.input_ids, self.labels = array("i"), array("i")
        self.records: list[tuple[int, int, int, int, int]] = []  # as RECORD; `row` counts from 0 within these
        self.places: dict[str, int] = {}
        self.rows = 0

    def add(self, samples: Sequence[Sample], place: str, line: int) -> None:
        """The samples of the next row, which may be none.

        Args:
            place: what stands in front of the line in the row's source, as `file:`.
        """
        number = self.places.setdefault(place, len(self.places)) if samples else 0
        for sample in samples:
            self.input_ids.extend(sample.input_ids)
            self.labels.extend(sample.labels)
            self.records.append((len(self.input_ids), self.rows, line, number, sample.trained))
        self.rows += 1


class Store(Sequence[Sample]):
    """Samples by index. `store[i]` makes a Sample; what is asked of all of them at once comes as arrays.

    Args:
        input_ids, labels: [tokens] int32 of all samples, one behind another.
        samples: [samples] of RECORD.
        facts: `places`; `top_id`, the highest id, and `top_sample`, which holds it; `sha256` of ids, labels and lengths.
    """

    def __init__(self, input_ids: NDArray[Any], labels: NDArray[Any], samples: NDArray[Any], facts: dict[str, Any]) -> None:
        self._ids, self._labels, self._samples, self.facts = input_ids, labels, samples, facts

    @classmethod
    def open(cls, folder: Path) -> "Store":
        """Maps the files of a folder.

        Raises:
            FileNotFoundError, ValueError: they are not there, or not whole.
        """
        facts = json.loads((folder / FACTS).read_text("utf-8"))
        columns = [(IDS, TOKEN), (LABELS, TOKEN), (SAMPLES, RECORD)]
        ids, labels, samples = (np.asarray(np.memmap(folder / name, dtype, "r")) for name, dtype in columns)
        if not len(ids) == len(labels) == facts["tokens"] or len(samples) != facts["samples"]:
            raise ValueError(f"{folder} is damaged")
        return cls(ids, labels, samples, facts)

    def __len__(self) -> int:
        return len(self._samples)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        start = int(self._samples["end"][index - 1]) if index else 0
        end = int(self._samples["end"][index])
        return Sample(self._ids[start:end].tolist(), self._labels[start:end].tolist(), self.source(index))

    def source(self, index: int) -> str:
        record = self._samples[index]
        return f"{self.facts['places'][record['place']]}{record['line']}"

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample [samples]."""
        return np.diff(self._samples["end"], prepend=0)

    @cached_property
    def trained(self) -> NDArray[np.int64]:
        """Trained tokens of each sample [samples]."""
        return self._samples["trained"].astype(np.int64)

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """The row of each sample [samples], counted from 1 over all sources; ascending."""
        return np.array(self._samples["row"], np.int64)

    @property
    def digest(self) -> str:
        return str(self.facts["sha256"])

    @property
    def top(self) -> tuple[int, str]:
        """The highest id, and the source of a sample that holds it."""
        return self.facts["top_id"], self.source(self.facts["top_sample"])


class Subset(Sequence[Sample]):
    """Samples of a store in another order, some of them several times or not at all.

    Args:
        indices: into `store`.
    """

    def __init__(self, store: Store, indices: NDArray[np.int64]) -> None:
        self.store, self.indices = store, indices

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self.store[int(i)] for i in self.indices[index]]
        return self.store[int(self.indices[index])]

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return self.store.lengths[self.indices]

    @cached_property
    def trained(self) -> NDArray[np.int64]:
        return self.store.trained[self.indices]

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.store.digest.encode() + self.indices.astype("<i8").tobytes()).hexdigest()

    @property
    def top(self) -> tuple[int, str]:
        """Of the whole store."""
        return self.store.top


class StoreWriter:
    """Writes a store into a folder, which need not exist.

    Raises:
        OSError: the folder cannot be written to, or is full.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._files = [(folder / name).open("wb") for name in (IDS, LABELS, SAMPLES)]
        # One hash a column, so that how samples came in chunks does not matter.
        self._hashes = [hashlib.sha256() for _ in self._files]
        self._tokens = self._rows = self._samples = 0
        self._places: dict[str, int] = {}
        self._top = (-1, 0)

    def add(self, columns: Columns) -> None:
        if columns.records:
            ids = np.frombuffer(columns.input_ids, np.int32).astype(TOKEN, copy=False)
            labels = np.frombuffer(columns.labels, np.int32).astype(TOKEN, copy=False)
            records = np.array(columns.records, RECORD)
            places = [self._places.setdefault(place, len(self._places)) for place in columns.places]
            records["place"] = np.array(places)[records["place"]]
            highest = int(ids.argmax())
            if ids[highest] > self._top[0]:
                self._top = int(ids[highest]), self._samples + int(np.searchsorted(records["end"], highest, "right"))
            lengths = np.diff(records["end"], prepend=0)
            records["end"] += self._tokens
            records["row"] += self._rows + 1
            for file, column in zip(self._files, (ids, labels, records), strict=True):
                file.write(column.data)
            for sha, column in zip(self._hashes, (ids, labels, lengths), strict=True):
                sha.update(column.data)
            self._tokens += len(ids)
            self._samples += len(records)
        self._rows += columns.rows

    def close(self) -> Store | None:
        """What was written; None where that is nothing."""
        for file in self._files:
            file.close()
        if not self._samples:
            return None
        sha = hashlib.sha256(b"".join(h.digest() for h in self._hashes)).hexdigest()
        facts = {"places": list(self._places), "top_id": self._top[0], "top_sample": self._top[1], "sha256": sha}
        facts |= {"tokens": self._tokens, "samples": self._samples}
        (self.folder / FACTS).write_text(json.dumps(facts), "utf-8")
        return Store.open(self.folder)


def lengths_of(samples: Sequence[Sample]) -> NDArray[np.int64]:
    """Tokens of each sample [samples], from a store or any other sequence."""
    if isinstance(samples, Store | Subset):
        return samples.lengths
    return np.array([len(s.input_ids) for s in samples], np.int64)


def highest_id(samples: Sequence[Sample]) -> tuple[int, str]:
    """The highest id, and the source of a sample that holds it; of a subset, those of its whole store."""
    if isinstance(samples, Store | Subset):
        return samples.top
    return max((max(s.input_ids), s.source) for s in samples)
