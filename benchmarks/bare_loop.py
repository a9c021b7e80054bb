"""What the training loop costs: its steps against bare ones on the same model, turn by turn in one process.

    python benchmarks/bare_loop.py /tmp/bench [llama3-8b [key=value ...]]

A bare step is forward, backward, clipping and AdamW on plain modules, and nothing else: no counts, no log, no look at the loss.
LoRA r16, 4 x 4,096 tokens, full checkpointing, compiled blocks, weights drawn at random; keys change any of it. On a CPU the
seconds are of processor time.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import drawn
from benchmarks.engine import rows
from benchmarks.random_model import make
from swiftlite.recipe.load import load_recipe
from swiftlite.train.console import Console
from swiftlite.train.loop import train_step
from swiftlite.train.plan import make_plan
from swiftlite.train.run import Run

STEPS, TURNS = 5, 6


def main(folder: Path, shape: str, extra: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / shape).exists():
        make(shape, folder / shape, weights=False)
    recipe = folder / "bare.yaml"
    recipe.write_text("model: x\n")
    keys = [
        f"model={folder / shape}", f"data={rows(folder, 'full')}", "data.format=tokens", "data.max_length=4096", "lora.rank=16",
        "train.per_device_train_batch_size=4", "train.global_batch_size=4", "train.gradient_checkpointing=full",
        "train.torch_compile=true", "strategy=none", "checkpoint.save_strategy=no", "export=[]", f"output={folder / 'bare'}",
        "train.max_steps=100", "checkpoint.resume=auto", *extra,
    ]  # fmt: skip
    drawn.install()
    run = Run(make_plan(load_recipe(str(recipe), keys)), Console(quiet=True))
    run.begin()
    trained = [p for p in run.root.parameters() if p.requires_grad]

    def ours() -> None:
        report = train_step(run, run.next_group(), 1e-4)
        run.step += 1
        run.record(report)

    def bare() -> None:
        (micro,) = run.next_group()
        run.step += 1
        ids, labels = (micro.tensors[k].to(run.plan.device, non_blocking=True) for k in ("input_ids", "labels"))
        loss = run.root.nll_sum({"input_ids": ids}, labels) / (labels.numel() - len(labels))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        run.optimizer.step()
        run.optimizer.zero_grad()

    def settle() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    # Other processes of a CPU do not count.
    clock = time.perf_counter if run.plan.device.type == "cuda" else time.process_time
    seconds: dict[str, list[float]] = {"ours": [], "bare": []}
    for turn in range(TURNS):
        for name, step in (("ours", ours), ("bare", bare)):
            settle()
            began = clock()
            for _ in range(STEPS):
                step()
            settle()
            if turn:  # the first one compiles
                seconds[name].append((clock() - began) / STEPS)
    run.finish()
    ours_s, bare_s = (statistics.median(seconds[n]) for n in ("ours", "bare"))
    found = {"case": "bare-loop", "ours_s": ours_s, "bare_s": bare_s, "ratio": ours_s / bare_s, "all": seconds}
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "llama3-8b", sys.argv[3:])
