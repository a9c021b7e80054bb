"""Speed and memory of the sharding engine on big shapes with random weights: one JSON line a case.

    python benchmarks/engine.py /tmp/bench 2 fsdp-lora fsdp-full ...      (2: GPUs; cases: see CASES)

Work: rows of exactly 4,096 tokens, all trained, AdamW, clipping at 1.0; or packed chat rows of log-normal length (mean about 425
tokens, cut at 4,096); or pairs of about 2,000 tokens a side for DPO. Tokens/s is per GPU and of real tokens, median over steps
after three of warm-up; `planned` is what is said before step 1, `peak` what torch allocated.
"""

import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.random_model import make  # noqa: E402

LORA = ["lora.rank=16", "lora.alpha=32"]
FULL = ["lora=null", "train.learning_rate=1e-5"]
CKPT, NONE = ["train.gradient_checkpointing=full"], ["train.gradient_checkpointing=none"]
CHAT = ["data.packing=true"]
DPO = ["train.objective=dpo", "data.format=preference"]
NF4 = ["quantize.method=nf4", "quantize.double_quant=true"]
# Shape, rows, rows of one pass on one GPU, passes of a step, keys.
CASES: dict[str, tuple[str, str, int, int, list[str]]] = {
    "none-lora-ckpt": ("llama3-8b", "full", 4, 1, [*LORA, *CKPT, "strategy=none"]),
    "none-lora": ("llama3-8b", "full", 2, 1, [*LORA, *NONE, "strategy=none"]),
    "none-lora-packed": ("llama3-8b", "chat", 4, 1, [*LORA, *CKPT, *CHAT, "strategy=none"]),
    "none-lora-packed-varlen": (
        "llama3-8b",
        "chat",
        4,
        1,
        [*LORA, *CKPT, *CHAT, "strategy=none", "model.attn_implementation=varlen"],
    ),
    "none-lora-padding-free": ("llama3-8b", "chat", 4, 1, [*LORA, *CKPT, "data.padding_free=true", "strategy=none"]),
    "none-lora-padded": ("llama3-8b", "chat", 4, 1, [*LORA, *CKPT, "strategy=none"]),
    "none-dpo-ckpt": ("llama3-8b", "pairs", 2, 1, [*LORA, *CKPT, *DPO, "strategy=none"]),
    "ddp-lora-ckpt": ("llama3-8b", "full", 4, 1, [*LORA, *CKPT, "strategy=ddp"]),
    "ddp-full-ckpt": ("llama3-8b", "full", 4, 1, [*FULL, *CKPT, "strategy=ddp"]),
    "fsdp-lora-ckpt": ("llama3-8b", "full", 4, 1, [*LORA, *CKPT, "strategy=fsdp"]),
    "fsdp-lora": ("llama3-8b", "full", 2, 1, [*LORA, *NONE, "strategy=fsdp"]),
    "fsdp-full-ckpt": ("llama3-8b", "full", 4, 1, [*FULL, *CKPT, "strategy=fsdp"]),
    "zero2-full-ckpt": ("llama3-8b", "full", 4, 1, [*FULL, *CKPT, "strategy=zero2"]),
    "zero3-full-ckpt": ("llama3-8b", "full", 4, 1, [*FULL, *CKPT, "strategy=zero3"]),
    "offload-full-ckpt": ("llama3-8b", "full", 4, 1, [*FULL, *CKPT, "strategy=fsdp", "strategy.offload=optimizer"]),
    "offload-params-full-ckpt": ("llama3-8b", "full", 4, 1, [*FULL, *CKPT, "strategy=fsdp", "strategy.offload=params"]),
    "70b-lora-ckpt": ("llama3-70b", "full", 1, 1, [*LORA, *CKPT, "strategy=fsdp"]),
    "none-nf4-ckpt": ("llama3-8b", "full", 4, 1, [*LORA, *CKPT, *NF4, "strategy=none"]),
    "none-nf4-offload": ("llama3-8b", "full", 4, 1, [*LORA, *CKPT, *NF4, "strategy=none", "train.activation_offload=true"]),
    "none-fp8-ckpt": ("llama3-8b", "full", 4, 1, [*LORA, *CKPT, "quantize=fp8", "strategy=none"]),
    "none-fp8": ("llama3-8b", "full", 2, 1, [*LORA, *NONE, "quantize=fp8", "strategy=none"]),
    "fsdp-nf4-ckpt": ("llama3-8b", "full", 4, 1, [*LORA, *CKPT, *NF4, "strategy=fsdp"]),
    "fsdp-fp8-ckpt": ("llama3-8b", "full", 4, 1, [*LORA, *CKPT, "quantize=fp8", "strategy=fsdp"]),
    "70b-nf4-ckpt": ("llama3-70b", "full", 1, 1, [*LORA, *CKPT, *NF4, "strategy=fsdp"]),
    "70b-nf4-offload": (
        "llama3-70b",
        "half",
        1,
        1,
        [*LORA, *CKPT, *NF4, "strategy=fsdp", "strategy.offload=params", "data.max_length=2048"],
    ),
    "14b-full-ckpt": ("qwen3-14b", "full", 1, 1, [*FULL, *CKPT, "strategy=fsdp"]),
}


def rows(folder: Path, kind: str) -> Path:
    path = folder / f"{kind}.jsonl"
    if not path.exists():
        draw = random.Random(0)
        if kind == "pairs":  # about 2,000 tokens a side
            keys = ("prompt", "chosen", "rejected")
            sides = [{k: "".join(draw.choices("abcdefghij ", k=950)) for k in keys} for _ in range(64)]
            path.write_text("\n".join(map(json.dumps, sides)))
            return path
        if kind == "chat":
            lengths = [min(4096, max(16, int(draw.lognormvariate(5.61, 0.95)))) for _ in range(1200)]
        else:
            lengths = [{"full": 4096, "half": 2048}[kind]] * 192
        with path.open("w") as f:
            for n in lengths:
                f.write(json.dumps({"input_ids": [draw.randrange(5, 120000) for _ in range(n)]}) + "\n")
    return path


def run(folder: Path, gpus: int, case: str, extra: list[str]) -> None:
    shape, kind, size, passes, keys = CASES[case]
    model, output = folder / shape, folder / f"run-{case}-{int(time.time())}"
    if not model.exists():
        make(shape, model, weights=False)
    settings = [
        f"model={model}", f"data={rows(folder, kind)}", "data.format=tokens", "data.max_length=4096",
        f"train.per_device_train_batch_size={size}", f"train.global_batch_size={size * passes * gpus}", "train.max_steps=9",
        "log.logging_steps=1", "checkpoint.save_strategy=no", "export=[]", f"output={output}",
    ]  # fmt: skip
    recipe = folder / f"{case}.yaml"
    recipe.write_text("model: x\n")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={gpus}",
        f"--master-port={29500 + hash(case) % 1000}",
    ]
    began = time.time()
    command += ["benchmarks/drawn.py", "train", str(recipe), *settings, *keys, *extra]
    # torchrun would give each process one core, and an offloaded optimizer runs on the CPU.
    threads = str(max(1, (os.cpu_count() or 1) // gpus))
    subprocess.run(command, check=True, cwd=ROOT, env={"OMP_NUM_THREADS": threads, **os.environ})
    every = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in every if r["step"] > 3]
    planned = re.search(r"memory    about ([\d.]+)", (output / "train.log").read_text())
    found = {
        "case": case,
        "keys": extra,
        "tokens_per_second_per_gpu": round(statistics.median(r["tokens_per_second"] for r in steps) / gpus),
        "peak_gib": round(max(r["peak_memory_gib"] for r in steps), 2),
        "planned_gib": float(planned[1]) if planned else None,
        "loss": [round(r["loss"], 4) for r in every],
        "data_wait_s": max(r["data_wait_s"] for r in steps),
        "seconds": round(time.time() - began),
    }
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    bench, count, *names = sys.argv[1:]
    Path(bench).mkdir(parents=True, exist_ok=True)
    extra_keys = [n for n in names if "=" in n]
    for name in [n for n in names if "=" not in n]:
        try:
            run(Path(bench), int(count), name, extra_keys)
        except subprocess.CalledProcessError as error:
            print(f"FAILED {name}: {error}", flush=True)
