"""PiSSA and OLoRA: peft's own products, whatever the shape, the type and the sharding; what cannot be split is refused."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.tensor import DTensor

from swiftlite.dist.launch import ranks
from swiftlite.dist.tensors import whole
from swiftlite.dist.world import leave
from swiftlite.models import adapters, decompose
from swiftlite.models.adapter_files import initial_state, slots
from swiftlite.models.build import skeleton
from swiftlite.models.families.lookup import family_for
from swiftlite.recipe.errors import ModelError, RecipeError
from swiftlite.recipe.load import load_recipe
from swiftlite.recipe.resolve import resolve
from swiftlite.recipe.schema import LoraSection
from swiftlite.train.console import Console
from swiftlite.train.plan import make_plan
from swiftlite.train.run import Run
from tests.export.making import base_model
from tests.fixtures import model as fixture_model
from tests.ranks import run_ranks
from tests.training import recipe, token_rows

INITS = ["pissa", "olora"]
IDS = torch.tensor([[10, 11, 12, 40, 41, 42, 7]])


@pytest.fixture(autouse=True)
def no_group_left():
    yield
    leave()


def attached(model, **lora):
    section = LoraSection(**{"rank": 4, "alpha": 6} | lora)
    targets = adapters.lora_targets(model, section, family_for(model.config))
    decompose.require(model, section, targets, [])
    peft = adapters.inject(model, adapters.peft_config(model, section, targets, "org/base"), targets)
    adapters.init_adapters(peft, section, 0, "cpu")
    decompose.split(model, section, torch.device("cpu"))
    return peft


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("shape", [(32, 32), (24, 64), (64, 24)], ids=str)
@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_and_rest_are_those_of_peft(init, shape, rslora, dtype):
    torch.manual_seed(0)
    ours, theirs = (nn.Sequential(nn.Linear(shape[1], shape[0], bias=False, dtype=dtype)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    wanted = get_peft_model(
        theirs, LoraConfig(r=5, lora_alpha=8, target_modules=["0"], init_lora_weights=init, use_rslora=rslora)
    ).base_model.model[0]
    scale = wanted.scaling["default"]
    weight = ours[0].weight.detach()
    a, b = (t.float() for t in decompose.METHODS[init](weight, 5, scale))
    left, right = wanted.lora_B["default"].weight.detach(), wanted.lora_A["default"].weight.detach()
    # peft rounds A and B to the base's type once they are made.
    near = {"rtol": 0, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-3}
    torch.testing.assert_close(b @ a, left @ right, rtol=0, atol=2e-6 if dtype == torch.float32 else 2e-3)
    # A and B themselves, but for signs, which here are a matter of rule.
    torch.testing.assert_close(a.abs(), right.abs(), **near)
    torch.testing.assert_close(b.abs(), left.abs(), **near)
    assert (b.gather(0, b.abs().argmax(0, keepdim=True)) > 0).all()
    mine = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False, dtype=dtype))
    mine.load_state_dict(ours.state_dict())
    net = get_peft_model(mine, LoraConfig(r=5, lora_alpha=8, target_modules=["0"], use_rslora=rslora)).base_model.model
    decompose.split(net, LoraSection(init=init), torch.device("cpu"))
    rest, other = net[0].base_layer.weight.detach().float(), wanted.base_layer.weight.detach().float()
    torch.testing.assert_close(rest, other, rtol=0, atol=2e-6 if dtype == torch.float32 else 8e-3)

    def moved(layer):
        """How far the start is from the base."""
        product = (
            layer.lora_B["default"].weight.detach().to(dtype).float() @ layer.lora_A["default"].weight.detach().to(dtype).float()
        )
        return (layer.base_layer.weight.detach().float() + scale * product - weight.float()).norm()

    # peft leaves out of the rest what rounding took from A and B.
    assert moved(net[0]) < (1e-5 if dtype == torch.float32 else 0.7 * moved(wanted))


def test_a_split_leaves_the_best_approximation_to_the_adapter():
    torch.manual_seed(1)
    weight = torch.randn(40, 24)
    a, b = decompose.pissa(weight, 6, 1.5)
    values = torch.linalg.svdvals(weight.double())
    torch.testing.assert_close((weight.double() - 1.5 * b @ a).norm(), values[6:].norm())
    a, b = decompose.olora(weight, 6, 1.5)
    torch.testing.assert_close(b.T @ b, torch.eye(6, dtype=torch.float64))
    torch.testing.assert_close((b @ a)[:, :6], weight[:, :6].double())


@pytest.mark.gpu
@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("shape", [(512, 1024), (1024, 512)], ids=str)
def test_a_gpu_finds_what_the_cpu_finds(init, shape):
    torch.manual_seed(0)
    weight = torch.randn(shape)
    for ours, theirs in zip(
        decompose.METHODS[init](weight.cuda(), 16, 2.0), decompose.METHODS[init](weight, 16, 2.0), strict=True
    ):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=1e-9)


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("weight", [torch.zeros(8, 12), torch.ones(8, 12), torch.eye(8, 12)], ids=["zero", "rank1", "equal"])
def test_weights_without_a_unique_answer_stay_finite(init, weight):
    a, b = decompose.METHODS[init](weight, 4, 2.0)
    assert a.isfinite().all() and b.isfinite().all()
    assert (weight.double() - 2 * b @ a).norm() <= weight.norm() * (1 + 1e-9) or init == "olora"


@pytest.mark.parametrize("init", INITS)
def test_a_damaged_weight_is_named(init):
    base = fixture_model("LLAMA")
    base.get_parameter("model.layers.1.mlp.up_proj.weight").data[3, 4] = float("nan")
    with pytest.raises(ModelError, match=r"weight of .*layers\.1\.mlp\.up_proj holds NaN"):
        attached(base, init=init)


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize(
    "lora", [{}, {"use_rslora": True}, {"use_dora": True}, {"target_modules": ["q_proj", "lm_head"]}], ids=str
)
def test_the_start_is_the_base_and_the_file_is_plain_lora(tmp_path, init, lora):
    base = fixture_model("LLAMA")
    weights = {n: p.clone() for n, p in base.state_dict().items()}
    expected = logits(base)
    peft = attached(base, init=init, **lora).eval()
    assert (logits(base) - expected).abs().max() < 1e-5
    places = slots(base)
    rest = {n.replace(".base_layer", ""): p for n, p in base.state_dict().items() if "base_layer" in n}
    assert rest and not any(torch.equal(p, weights[n]) for n, p in rest.items())
    with torch.no_grad():
        for i, slot in enumerate(places.values()):
            slot.tensor.add_(torch.randn(slot.tensor.shape, generator=torch.Generator().manual_seed(i)), alpha=0.05)
    moved = logits(base)
    config = adapters.save_adapter(peft, tmp_path / "adapter")
    assert (config["r"], config["init_lora_weights"]) == (8, True)
    assert config["lora_alpha"] == (pytest.approx(6 * 2**0.5) if lora.get("use_rslora") else 12)
    assert (peft.peft_config["default"].r, peft.peft_config["default"].lora_alpha) == (4, 6)
    assert not list((tmp_path / "adapter").glob("*.bin"))
    plain = PeftModel.from_pretrained(fixture_model("LLAMA"), tmp_path / "adapter").eval()
    assert (logits(plain) - moved).abs().max() < 1e-5 and (moved - expected).abs().max() > 0.01


@pytest.mark.parametrize("init", INITS)
def test_linear_layers_written_as_conv1d(init):
    """GPT-2's weights are [in, out]."""
    base = base_model("GPT2")
    expected = logits(base)
    peft = attached(base, init=init)
    assert (logits(base) - expected).abs().max() < 1e-5
    config = peft.peft_config["default"]
    config.init_lora_weights, config.base_model_name_or_path = "pissa", None
    again = get_peft_model(base_model("GPT2"), config).base_model.model
    if init == "pissa":  # peft's olora forgets the transposition
        for name, weight in again.named_parameters():
            if "base_layer.weight" in name:
                torch.testing.assert_close(base.get_parameter(name), weight, rtol=0, atol=1e-5)


def started(loaded):
    """What each rank finds after the build: first logits, whole factors as they are and as they started, the whole rest."""
    run = Run(make_plan(resolve(loaded, ranks().size)), Console(quiet=True))
    run.root.eval()
    with torch.no_grad():
        first = run.root(input_ids=IDS, use_cache=False).logits
    initial = initial_state(run.root)
    parts = {type(t) for t in initial.values()}
    return {
        "logits": first, "sharded": DTensor in parts, "now": {k: whole(s.tensor).clone() for k, s in slots(run.root).items()},
        "initial": {k: whole(t).clone() for k, t in initial.items()},
        "rest": {n: whole(p).clone() for n, p in run.root.named_parameters() if "base_layer" in n},
    }  # fmt: skip


def made(path, init="pissa", strategy="none", precision="fp32", **keys):
    lora = {"rank": 4, "alpha": 6, "init": init, **keys.pop("lora", {})}
    return recipe(path, rows=token_rows([9, 12, 7, 10]), lora=lora, strategy=strategy, train={"precision": precision}, **keys)


@pytest.mark.parametrize("init", ["pissa", pytest.param("olora", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "strategy", ["fsdp", "ddp", {"name": "fsdp", "offload": "params"}, {"name": "zero2", "offload": "optimizer"}], ids=str
)
def test_all_ranks_split_as_one_process_does(tmp_path, init, strategy):
    alone = started(made(tmp_path, init))
    leave()
    for size in (2, 4) if strategy == "fsdp" else (2,):
        for found in run_ranks(size, started, made(tmp_path, init, strategy)):
            assert found["sharded"]
            torch.testing.assert_close(found["logits"], alone["logits"], rtol=0, atol=1e-5)
            for part in ("now", "initial", "rest"):
                assert found[part].keys() == alone[part].keys()
                assert all(torch.equal(found[part][n], alone[part][n]) for n in alone[part]), part
            assert all(torch.equal(found["now"][n], found["initial"][n]) for n in found["now"])


@pytest.mark.parametrize("precision", ["bf16", "bf16_pure"])
@pytest.mark.parametrize("strategy", ["none", "fsdp"])
def test_what_is_kept_narrower_is_split_as_it_is_kept(tmp_path, precision, strategy):
    """The rest is rounded once, and belongs to A and B as the first step computes with them."""
    found = started(made(tmp_path, precision=precision, strategy=strategy))
    kept = torch.float32 if precision == "bf16" else torch.bfloat16
    assert {t.dtype for t in found["now"].values()} == {kept} and {t.dtype for t in found["rest"].values()} == {torch.bfloat16}
    base = fixture_model("LLAMA").to(torch.bfloat16).state_dict()
    for name, rest in found["rest"].items():
        key = "base_model.model." + name.removesuffix("base_layer.weight")
        a, b = (found["now"][f"{key}lora_{part}.weight"].double() for part in "AB")
        whole_weight = base[name.replace(".base_layer", "")].double()
        assert all(torch.equal(t, t.bfloat16().double()) for t in (a, b)), "the first product is the one that was taken out"
        assert torch.equal(rest, (whole_weight - 1.5 * b @ a).float().bfloat16())


REFUSED = [
    ("LLAMA", {"target_modules": ["q_proj", "embed_tokens"]}, r"lora.init: 'pissa' splits linear layers, and model.embed_tokens"),
    ("LLAMA_TIED", {"target_modules": ["lm_head"]}, r"would change model.embed_tokens.weight too, .* as lm_head.weight"),
    ("LLAMA", {"rank": 17}, r"lora.rank: 17 is above the rank of model.layers.0.self_attn.k_proj, whose weight is 16 x 32"),
    ("QWEN3_MOE", {"experts": True}, r"lora.init: 'pissa' does not split fused experts \(model.layers.0.mlp.experts"),
]


@pytest.mark.parametrize(("kind", "lora", "says"), REFUSED, ids=[kind + str(lora) for kind, lora, _ in REFUSED])
def test_what_cannot_be_split_is_refused_before_weights_are_read(tmp_path, kind, lora, says):
    plan = make_plan(made(tmp_path, lora=lora, kind=kind))
    with pytest.raises(RecipeError, match=says):
        skeleton(plan.files, plan.recipe, plan.tokenizer, plan.precision, plan.device)


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"quantize": "nf4"}, "a packed base cannot give up what {} takes out of it"),
        ({"model": {"adapter": "somewhere"}}, "'{}' begins a new adapter, and model.adapter goes on from one"),
    ],
    ids=["quantize", "adapter"],
)
def test_keys_that_exclude_each_other(tmp_path, init, keys, says):
    with pytest.raises(RecipeError, match="lora.init: " + says.format(init)):
        made(tmp_path, init, **keys)


@pytest.mark.parametrize(("key", "value", "init"), [("init_lora_weights", "olora", "olora"), ("pissa_init", True, "pissa")])
def test_other_names(tmp_path, key, value, init):
    (tmp_path / "r.yaml").write_text(f"model: m\ndata: d.jsonl\nlora: {{{key}: {json.dumps(value)}}}\n")
    assert load_recipe(str(tmp_path / "r.yaml")).recipe.lora.init == init
