"""The quickstart: fine-tune a real model on a CPU, and see that it learned.

Measures exact match on held-back rows, runs recipes/quickstart.yaml, measures again on the merged export, asks the same three
questions before and after, and lets plain transformers answer them too. Run it from the repository's root, by `make quickstart`.
"""

import json
import shutil
import sys
from pathlib import Path

from swiftlite import api
from swiftlite.infer.evaluate import evaluate
from swiftlite.infer.generate import generate
from swiftlite.infer.load import load_target
from swiftlite.train.session import calm_libraries

HERE = Path(__file__).parent
BEFORE_AT_MOST, AFTER_AT_LEAST = 0.1, 0.8


def examine(model: str, prompts: list[list[dict[str, str]]]) -> tuple[float, list[str]]:
    """Exact match on the held-back rows, and answers to the prompts."""
    target = load_target(model, device="cpu")
    score = evaluate(target, HERE / "eval.jsonl", batch_size=16)["exact_match"]
    return float(score), [answer.text for answer in generate(target, prompts, max_new_tokens=48)]


def plain_transformers(folder: Path, prompts: list[list[dict[str, str]]]) -> list[str]:
    """The same questions to the merged folder without anything of swiftlite."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    answers = []
    for messages in prompts:
        inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        out = model.generate(**inputs, max_new_tokens=48, do_sample=False)
        answers.append(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return answers


def main() -> int:
    calm_libraries()
    recipe = api.load_recipe("recipes/quickstart.yaml")
    output = Path(str(recipe.recipe.output))
    shutil.rmtree(output, ignore_errors=True)  # an earlier quickstart
    prompts = [json.loads(line)["messages"] for line in (HERE / "prompts.jsonl").read_text().splitlines()]

    print("Before: exact match on held-back rows ...", flush=True)
    before, old = examine(recipe.recipe.model.name, prompts)
    print(f"Before: {before:.2f}\n", flush=True)
    api.train(recipe)
    print("\nAfter: the merged model on the same rows ...", flush=True)
    after, new = examine(str(output / "merged"), prompts)
    plain = plain_transformers(output / "merged", prompts)

    for messages, was, now in zip(prompts, old, new, strict=True):
        print(f"\n  asked   {messages[-1]['content']}\n  before  {' '.join(was.split())[:110]}\n  after   {now}")
    print(f"\nExact match on held-back rows: {before:.2f} before, {after:.2f} after.")
    print(f"Plain transformers answers the same: {'yes' if plain == new else 'NO'}.")
    print(f"Talk to it: swiftlite chat {output}")
    return 0 if before <= BEFORE_AT_MOST and after >= AFTER_AT_LEAST and plain == new else 1


if __name__ == "__main__":
    sys.exit(main())
