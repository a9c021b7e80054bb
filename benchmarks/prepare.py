"""How fast rows become samples, beside the bare tokenizer on the same rendered texts in as many processes.

    python benchmarks/prepare.py --rows 20000 --procs 1 2

Rows are generated chats of one to four exchanges, log-normal in length. `bare` encodes texts that lie in memory already, one call
a text; `prepare` reads, checks, renders, encodes, masks, looks for what is suspicious, and writes the cache; `again` is a second
start, `plan` the order of all rows in packs of 4,096 tokens. The ratio by processor time holds on a machine that is busy with
other things too. Peak is the memory of all processes together but for mapped files, with shared pages counted once.
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from swiftlite.data.formats import MESSAGES, conversation
from swiftlite.data.loader import Loader
from swiftlite.data.prepare import prepare
from swiftlite.data.read import read_rows
from swiftlite.data.render import Renderer
from swiftlite.models.sources import resolve_model
from swiftlite.models.tokenizer import load_tokenizer
from swiftlite.recipe.load import load_recipe
from swiftlite.recipe.schema import DataSection, DataSource

T = TypeVar("T")


def write_rows(file: Path, count: int, tokenizer: PreTrainedTokenizerBase, length: float = 425) -> None:
    """Chats of words of the tokenizer's vocabulary, frequent ones often, as in language."""
    words = sorted(w[1:] for w in tokenizer.get_vocab() if w[0] == "Ġ" and w[1:].isascii() and w[1:].isalpha())
    chance = random.Random(0)
    pool = chance.choices(words, [1 / (n + 10) for n in range(len(words))], k=200_000)
    with file.open("w", encoding="utf-8") as out:
        for _ in range(count):
            turns = 2 * chance.randint(1, 4)
            size = min(3500, max(4, int(chance.lognormvariate(math.log(length) - 0.6, 0.8)))) // turns + 1
            starts = [chance.randrange(len(pool) - size) for _ in range(turns)]
            texts = [" ".join(pool[start : start + size]).capitalize() + "." for start in starts]
            roles = ("user", "assistant")
            row = {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]}
            out.write(json.dumps(row) + "\n")


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> None:
    for text in texts:
        tokenizer(text, add_special_tokens=False, return_attention_mask=False)


def bare(tokenizer: PreTrainedTokenizerBase, texts: list[str], procs: int) -> None:
    """Encodes all texts in `procs` processes."""
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=encode, args=(tokenizer, texts[n::procs])) for n in range(procs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def timed(work: Callable[[], T]) -> tuple[T, float, float]:
    """What `work` gives, its seconds, and the processor seconds that it took in all processes."""
    begin, before = time.perf_counter(), sum(os.times()[:4])
    got = work()
    return got, time.perf_counter() - begin, sum(os.times()[:4]) - before


class Peak(threading.Thread):
    """Peak memory in MiB of this process and its children, asked for five times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.mib, self.ended = 0.0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.2):
            pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children()), *_children(os.getpid())]
            self.mib = max(self.mib, sum(map(_pss, set(pids))) / 1024)


def _children(pid: int) -> list[int]:
    return [int(c) for task in Path(f"/proc/{pid}/task").glob("*/children") for c in task.read_text().split()]


def _pss(pid: int | None) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        # Mapped files are the system's cache of the disk, which gives them back when it is short of memory.
        values = {line.split(":")[0]: int(line.split()[1]) for line in lines[1:] if line.endswith("kB")}
        return values["Pss_Anon"] + values["Pss_Shmem"]
    except (OSError, KeyError):
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--length", type=float, default=425, help="mean tokens of a row, about")
    parser.add_argument("--procs", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--model", default=None, help="a model folder with a chat template; default: the quickstart's")
    parser.add_argument("--no-bare", action="store_true")
    parser.add_argument("--folder", default=None, help="where rows and cache lie; default: a temporary folder")
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    section = load_recipe("quickstart", [f"model.name={args.model}"] if args.model else []).recipe.model
    tokenizer = load_tokenizer(resolve_model(section, need_weights=False), section)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        file = Path(folder) / "rows.jsonl"
        write_rows(file, args.rows, tokenizer, args.length)
        source = DataSource(path=str(file))
        texts = []
        if not args.no_bare:
            template = Renderer(tokenizer)._template_for(None)
            texts = [template.render(conversation(row, MESSAGES, {}).messages) for row in read_rows(source)]
        print(f"{args.rows:,} rows, {file.stat().st_size / 2**20:,.0f} MiB, {len(tokenizer):,} ids")
        print(
            "| processes | tokens | bare rows/s | prepare rows/s | ratio | by processor time | again | plan | peak |\n|"
            + "---|" * 9
        )
        for procs in args.procs:
            _, bare_s, bare_cpu = timed(partial(bare, tokenizer, texts, procs)) if texts else (None, math.nan, math.nan)
            data = DataSection(train=[source], num_proc=procs, cache_dir=str(Path(folder) / f"cache{procs}"))
            peak = Peak()
            peak.start()
            once = partial(prepare, [source], data, Renderer(tokenizer), max_length=4096, seed=0)
            (made, first_s, first_cpu), (_, again_s, _) = timed(once), timed(once)
            keys = {"order": "random", "rows_per_step": 64, "micro_batch": 4, "pad_id": 0, "capacity": 4096}
            _, plan_s, _ = timed(partial(Loader, made.samples, seed=0, **keys))
            peak.ended.set()
            cells = [f"{procs}", f"{made.report['tokens']:,}", f"{args.rows / bare_s:,.0f}", f"{args.rows / first_s:,.0f}"]
            cells += [
                f"{bare_s / first_s:.2f}",
                f"{bare_cpu / first_cpu:.2f}",
                f"{again_s:.1f} s",
                f"{plan_s:.1f} s",
                f"{peak.mib:,.0f} MiB",
            ]
            print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
