"""Packed chat rows against full rows and against padding, on one GPU; the recipe llama3-8b-lora otherwise.

    python benchmarks/packing_8b.py /tmp/llama3-8b [key=value ...]

Work of benchmarks/RESULTS.md: Llama-3.1-8B shape, rows of log-normal length (mean about 425 tokens, cut at 4,096), all tokens
trained, 4 packs of 4,096 a step against 4 rows a step. Tokens/s counts real tokens, median over steps after three of warm-up.
"""

import json
import random
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STEPS = 9


def write(path: Path, lengths: list[int]) -> Path:
    draw = random.Random(1)
    with path.open("w") as f:
        for n in lengths:
            f.write(json.dumps({"input_ids": [draw.randrange(5, 128000) for _ in range(n)]}) + "\n")
    return path


def main(model: Path, extra: list[str]) -> None:
    draw = random.Random(0)
    chat = [min(4096, max(16, int(draw.lognormvariate(5.61, 0.95)))) for _ in range(1200)]
    cases = {
        "full rows": (write(model.parent / "full.jsonl", [4096] * 48), []),
        "packed": (write(model.parent / "chat.jsonl", chat), ["data.packing=true"]),
        "padding-free": (model.parent / "chat.jsonl", ["data.padding_free=true"]),
        "padded": (model.parent / "chat.jsonl", []),
    }
    print(f"chat rows: {len(chat)}, mean {statistics.mean(chat):.0f} tokens")
    for name, (rows, keys) in cases.items():
        output = model.parent / f"pack-{name.replace(' ', '-')}"
        fixed = (
            f"model={model} data.train={rows} data.eval=[] data.packing=false data.format=tokens eval.eval_strategy=no "
            "eval.eval_steps=null train.global_batch_size=4 train.per_device_train_batch_size=4 log.logging_steps=1 "
            f"checkpoint.save_strategy=no checkpoint.save_steps=null train.max_steps={STEPS} export=[] output={output}"
        )
        command = [sys.executable, "-m", "swiftlite", "train", "llama3-8b-lora", *fixed.split(), *keys, *extra]
        subprocess.run(command, check=True, cwd=ROOT)
        steps = [r for r in map(json.loads, (output / "metrics.jsonl").read_text().splitlines()) if r["step"] > 3]
        rate, peak = statistics.median(r["tokens_per_second"] for r in steps), max(r["peak_memory_gib"] for r in steps)
        print(json.dumps({"case": name, "tokens_per_second": round(rate), "peak_memory_gib": round(peak, 1)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
