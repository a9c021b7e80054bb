"""Exports read the master weights out of FSDP2 shards, also when gathered copies in the compute type lie about."""

import pytest
import torch
from safetensors.torch import load_file

from swiftlite.dist.shard import Sharding, shard
from swiftlite.dist.strategies import FSDP
from swiftlite.dist.world import join, leave
from swiftlite.export.run import export_all
from swiftlite.recipe.schema import ExportSection
from tests.export.making import save_base, train

CASES = {
    "full, fp32 masters": ("LLAMA_TIED", None),
    "experts": ("MIXTRAL", None),
    "lora": ("LLAMA", {"target_modules": ["q_proj", "down_proj"]}),
    "dora and embedding": ("LLAMA", {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True}),
    "head in full": ("LLAMA", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
}


@pytest.fixture
def world():
    yield join(torch.device("cpu"), FSDP, wrap=True)
    leave()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "case", [c if c.startswith("full") or c == "lora" else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
def test_sharded_model_exports_as_the_plain_one(case, world, tmp_path):
    kind, lora = CASES[case]
    files = save_base(tmp_path / "base", kind, dtype=torch.bfloat16)
    formats = ["adapter", "merged"] if lora else ["merged"]
    export_all(train(files, lora), formats, ExportSection(dtype="fp32"), tmp_path / "plain")

    trained = train(files, lora, compute_dtype=torch.bfloat16)
    from transformers.conversion_mapping import get_model_conversion_mapping

    if getattr(trained.model, "_weight_conversions", None) is None:  # looked up by class name, which sharding changes
        trained.model._weight_conversions = get_model_conversion_mapping(trained.model)
    blocks = [f"model.layers.{i}" for i in range(2)]
    shard(trained.model, blocks, FSDP, world, Sharding(torch.bfloat16))
    trained.model(input_ids=torch.tensor([[10, 11, 12]]), use_cache=False)  # leaves gathered bf16 copies behind
    parts = export_all(trained, formats, ExportSection(dtype="fp32"), tmp_path / "sharded")

    assert [p["verdict"] for p in parts] == ["verified"] * len(parts)
    for name in formats:
        file = "model.safetensors" if name == "merged" else "adapter_model.safetensors"
        plain, sharded = (load_file(tmp_path / run / name / file) for run in ("plain", "sharded"))
        assert plain.keys() == sharded.keys()
        assert all(torch.equal(plain[k], sharded[k]) for k in plain)
