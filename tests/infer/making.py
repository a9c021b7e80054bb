"""Targets for the tests: tiny models in folders, adapters beside them, and one that has learned to answer."""

import json
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from swiftlite.data.collate import collate
from swiftlite.data.formats import Conversation
from swiftlite.data.render import Renderer
from swiftlite.dist.checkpoint import State, save
from tests.fixtures import CHATML, tok
from tests.fixtures import model as fixture_model

LESSONS = [("hi", "yo"), ("bye", "see you"), ("1+1", "2")]


def chat(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def write(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def save_base(folder: Path, kind: str = "LLAMA", template: str | None = CHATML, **config: object) -> Path:
    """A random model and its tokenizer."""
    fixture_model(kind, **config).save_pretrained(folder)
    tok(template).save_pretrained(folder)
    return folder


def save_taught(folder: Path, template: str = CHATML) -> Path:
    """A model that learned LESSONS by heart; its answers end with <|im_end|>, which its own settings do not name."""
    tokenizer, model = tok(template), fixture_model("LLAMA")
    renderer = Renderer(tokenizer)
    batch = collate([renderer.sample(Conversation("x", "chat", chat(*lesson))) for lesson in LESSONS], 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        loss = model.train()(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.05
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_adapter(folder: Path, base: Path, *, names: str | None = None, template: str | None = None, **lora: object) -> PeftModel:
    """An adapter with random weights, as plain peft writes it, naming its base as `names`; `template`: a tokenizer beside it."""
    torch.manual_seed(7)
    config = LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **lora})
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    with torch.no_grad():
        for parameter in peft.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn_like(parameter)
    peft.save_pretrained(folder, save_embedding_layers=False)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": names or str(base)}))
    if template:
        tok(template).save_pretrained(folder)
    return peft.eval()


def save_checkpoint(run: Path, step: int, model: PreTrainedModel, adapter: Path | None = None) -> Path:
    """A checkpoint as training writes it; only its weights matter here."""

    def extra(folder: Path) -> None:
        if adapter is not None:
            (folder / "adapter").mkdir()
            for name in ("adapter_config.json", "adapter_model.safetensors"):
                (folder / "adapter" / name).write_bytes((adapter / name).read_bytes())

    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return save(run / "checkpoints", step, State({"trainable": weights}, {"step": step}), extra).wait()


def ids_of(text: str) -> list[int]:
    return tok()(text)["input_ids"]


@torch.no_grad()
def logits(model: torch.nn.Module, text: str = "hello") -> torch.Tensor:
    return model(input_ids=torch.tensor([ids_of(text)])).logits
