"""The shipped recipe llama3-8b-lora on one GPU, as a user runs it: train, save, resume, export; then tokens/s and peak memory.

    python benchmarks/lora_8b.py /tmp/llama3-8b [key=value ...]

Work of benchmarks/RESULTS.md: Llama-3.1-8B shape, random weights, LoRA r=16 on all seven linear layers of a block, rows of
exactly 4,096 tokens, all trained. Tokens/s is the median over steps after three of warm-up.
"""

import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def swiftlite(*arguments: object) -> None:
    began = time.time()
    subprocess.run([sys.executable, "-m", "swiftlite", *map(str, arguments)], check=True, cwd=ROOT)
    print(f"-- swiftlite {arguments[0]} took {time.time() - began:.0f} s", flush=True)


def main(model: Path, extra: list[str]) -> None:
    rows, output = model.parent / "rows.jsonl", model.parent / "run"
    draw = random.Random(0)
    with rows.open("w") as f:
        for _ in range(64):
            f.write(json.dumps({"input_ids": [draw.randrange(5, 128000) for _ in range(4096)]}) + "\n")
    keys = [
        f"model={model}", f"data.train={rows}", "data.eval=[]", "data.eval_split=0", "data.packing=false",
        "eval.eval_strategy=no",
        "eval.eval_steps=null", "data.format=tokens",
        "train.global_batch_size=4", "train.per_device_train_batch_size=4",
        "log.logging_steps=1", "checkpoint.save_strategy=steps", "checkpoint.save_steps=8", f"output={output}", *extra,
    ]  # fmt: skip
    swiftlite("train", "llama3-8b-lora", *keys, "train.max_steps=8", "export=[]")
    swiftlite("train", "llama3-8b-lora", *keys, "train.max_steps=12", "checkpoint.resume=auto", "export=[adapter, merged]")
    steps = [r for r in map(json.loads, (output / "metrics.jsonl").read_text().splitlines()) if "loss" in r]
    rates = [r["tokens_per_second"] for r in steps if 3 < r["step"] <= 8]
    print(
        json.dumps(
            {
                "tokens_per_second": round(statistics.median(rates)),
                "peak_memory_gib": max(r["peak_memory_gib"] for r in steps),
                "mfu": steps[6].get("mfu"),
            }
        )
    )
    print((output / "export_report.json").read_text()[:3000])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
