"""Host memory while a model is read and packed: blocks of the Llama 70B shape, as many as the disk holds.

    python benchmarks/load_memory.py /tmp/bench 2 4 [quantize.double_quant=true ...]      (2 and 4: numbers of blocks)

Anonymous memory of the process, sampled every 10 ms: pages of the mapped files are the system's to take back. On a CPU what is
packed lies in host memory too, so `above` is what reading and packing take beside it; on a GPU that is all there is.
"""

import json
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.random_model import SHAPES
from swiftlite.dist.strategies import NONE
from swiftlite.models import weights
from swiftlite.models.build import Precision, build
from swiftlite.models.packed import stored_weights
from swiftlite.models.sources import resolve_model
from swiftlite.models.tokenizer import load_tokenizer
from swiftlite.recipe.load import load_recipe
from tests.fixtures import tok

VOCABULARY = 1024  # the embeddings are not packed: kept small


def make(folder: Path, blocks: int) -> Path:
    """Writes a model of so many blocks, one file a block."""
    if folder.exists():
        return folder
    tok().save_pretrained(folder)
    config = SHAPES["llama3-70b"]
    config.dtype, config.architectures = "bfloat16", ["LlamaForCausalLM"]
    config.num_hidden_layers, config.vocab_size = blocks, VOCABULARY
    config.save_pretrained(folder)
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        shapes = {n: t.shape for n, t in AutoModelForCausalLM.from_config(config).state_dict().items()}
    places: dict[str, str] = {}
    for part in [*(f"layers.{i}." for i in range(blocks)), ""]:
        names = [n for n in shapes if n not in places and part in n]
        file = f"model-{part.strip('.').replace('.', '-') or 'rest'}.safetensors"
        tensors = {n: (torch.rand(shapes[n], dtype=torch.bfloat16) - 0.5) / 25 for n in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def anonymous() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def measure(folder: Path, blocks: int, extra: list[str]) -> None:
    model = make(folder / f"70b-{blocks}", blocks)
    recipe = folder / "load.yaml"
    recipe.write_text("model: x\n")
    loaded = load_recipe(str(recipe), [f"model={model}", "data=x.jsonl", "lora.rank=16", "quantize.method=nf4", *extra])
    files, bf16 = resolve_model(loaded.recipe.model), Precision("bf16_pure", torch.bfloat16, torch.bfloat16)
    tokenizer, peak, loading = load_tokenizer(files, loaded.recipe.model), [0], True

    def watch() -> None:
        while loading:
            peak[0] = max(peak[0], anonymous())
            time.sleep(0.01)

    before, stream = anonymous(), weights.stream

    def watched(*args: Any) -> list[str]:
        nonlocal loading
        watcher = threading.Thread(target=watch)
        watcher.start()
        began = time.time()
        try:
            return stream(*args)
        finally:
            seconds.append(time.time() - began)
            loading = False
            watcher.join()

    seconds: list[float] = []
    weights.stream = watched
    how: dict[str, Any] = {"precision": bf16, "strategy": NONE, "device": torch.device("cpu"), "checkpointing": "none"}
    built, _ = build(files, loaded.recipe, tokenizer, **how)
    weights.stream = stream
    held = sum(t.numel() * t.element_size() for t in built.root.state_dict().values())
    found = {
        "blocks": blocks,
        "files_gib": sum(p.stat().st_size for p in model.glob("*.safetensors")) / 2**30,
        "packed": len(list(stored_weights(built.root))),
        "held_gib": held / 2**30,
        "peak_gib": (peak[0] - before) / 2**30,
        "above_gib": (peak[0] - before - held) / 2**30,
        "seconds": seconds[0],
    }
    print("RESULT " + json.dumps({k: round(v, 2) if isinstance(v, float) else v for k, v in found.items()}), flush=True)


if __name__ == "__main__":
    bench, *rest = sys.argv[1:]
    Path(bench).mkdir(parents=True, exist_ok=True)
    for number in [int(r) for r in rest if r.isdecimal()]:
        measure(Path(bench), number, [r for r in rest if not r.isdecimal()])
