"""Checkpoints that are quantised already: 4-bit ones of bitsandbytes come in as they are, all others get an answer."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, Transpose, WeightConverter

from swiftlite import api
from swiftlite.dist.launch import ranks
from swiftlite.dist.tensors import whole
from swiftlite.dist.world import leave
from swiftlite.models import bnb4bit, given
from swiftlite.models.bnb4bit import PackedSlice, Unpacked
from swiftlite.models.packed import PackedLinear, packed_weights, stored_weights
from swiftlite.models.prequantised import KINDS, section_of
from swiftlite.models.sources import open_weights, resolve_model
from swiftlite.recipe.errors import ModelError, RecipeError
from swiftlite.recipe.resolve import resolve
from swiftlite.recipe.schema import ModelSection
from swiftlite.train.console import Console
from swiftlite.train.plan import make_plan
from swiftlite.train.run import Run
from tests.bnb import edit, packed_by_hand, saved_by_transformers, tensors_of, unpacked_by_them
from tests.ranks import run_ranks
from tests.training import LORA, model_folder, recipe

EVEN = {"hidden_size": 64, "intermediate_size": 128}
# Two and four ranks do not divide 6 rows; rows of 96 and of 12 weights are no whole blocks.
ODD = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 6}
EXPERTS = {"hidden_size": 64, "moe_intermediate_size": 64}
IDS = torch.tensor([[10, 11, 12, 40, 41, 42, 7]])


@pytest.fixture(autouse=True)
def no_group_left():
    yield
    leave()


def made(path, folder, **sections):
    return recipe(path, **{"model": {"name": str(folder)}, "lora": LORA, **sections})


def started(loaded) -> Run:
    return Run(make_plan(resolve(loaded, ranks().size)), Console(quiet=True))


def carriers(root: nn.Module) -> dict[str, torch.Tensor]:
    """Bytes of every carrier by weight and kind, gathered from all ranks."""
    names = zip(stored_weights(root), packed_weights(root), strict=True)
    return {
        f"{base} {kind}": whole(tensor).contiguous().view(torch.uint8).clone()
        for (_, stored), base in names
        for kind, tensor in zip(stored.names, stored.tensors(), strict=True)
    }


def loaded_bytes(loaded) -> tuple[dict[str, torch.Tensor], int]:
    """Bytes of all carriers, and how many bytes of packed values were read from the files for them."""
    read, real = [], PackedSlice.packed

    def packed(self, start, stop):
        part = real(self, start, stop)
        read.append(len(part))
        return part

    bnb4bit.PackedSlice.packed = packed
    try:
        return carriers(started(loaded).root), sum(read)
    finally:
        bnb4bit.PackedSlice.packed = real


def expected_bytes(folder, itemsize) -> dict[str, torch.Tensor]:
    """Carriers by the files themselves."""
    found, tensors = {}, tensors_of(folder)
    for name in [n for n in tensors if f"{n}.absmax" in tensors]:
        state = next(json.loads(bytes(t.tolist())) for n, t in tensors.items() if n.startswith(f"{name}.quant_state"))
        rows, columns = state["shape"]
        if columns % 64:
            continue
        found[f"{name} packed"] = tensors[name].view(torch.uint8).view(rows, columns // 2)
        absmax = tensors[f"{name}.absmax"].view(torch.uint8).view(rows, -1)
        if "nested_offset" not in state:
            found[f"{name} absmax"] = absmax
            continue
        nested = torch.cat([tensors[f"{name}.nested_absmax"], torch.tensor([state["nested_offset"]])])
        found[f"{name} codes"] = nn.functional.pad(absmax, (0, -absmax.shape[-1] % itemsize))
        found[f"{name} nested"] = nested.view(torch.uint8)
    return found


def same(found, expected):
    assert found.keys() == expected.keys() != set()
    assert [n for n, b in expected.items() if not torch.equal(found[n], b)] == []


# -- 4-bit ones of bitsandbytes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("double", [False, True], ids=["single", "double"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_carriers_are_the_bytes_of_the_files(tmp_path, precision, double):
    folder = saved_by_transformers(tmp_path, dtype=torch.bfloat16, double=double)
    loaded = made(tmp_path, folder, train={"precision": precision})
    assert loaded.recipe.quantize is None
    run = started(loaded)
    assert (run.recipe.quantize.method, run.recipe.quantize.double_quant) == ("nf4", double)
    same(carriers(run.root), expected_bytes(folder, 4 if precision == "fp32" else 2))
    tensors = tensors_of(folder)
    for name, weight in packed_weights(run.root).items():
        assert torch.equal(weight.unpacked(torch.float32), unpacked_by_them(tensors, name))
    said = "the model's files hold 4-bit weights (bitsandbytes, nf4, " + ("double" if double else "single") + " quantisation)"
    assert f"{said}, which are used as they are" in run.plan.notes
    assert any(note.startswith("14 weights packed as nf4") and "rounding" not in note for note in run.built.notes)


@pytest.mark.parametrize("double", [False, True], ids=["single", "double"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_transformers_and_bitsandbytes(tmp_path, dtype, double):
    folder = saved_by_transformers(tmp_path, dtype=dtype, double=double)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map="cpu")
    assert type(theirs.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    theirs.train()  # else some CPUs multiply in bf16, whatever the type
    root = started(made(tmp_path, folder, train={"precision": "fp32" if dtype == torch.float32 else "bf16"})).root.eval()
    with torch.no_grad():
        ours, wanted = (m(input_ids=IDS, use_cache=False).logits.float() for m in (root, theirs))
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "llama", dtype=dtype)(input_ids=IDS).logits.float()
    near = 1e-5 if dtype == torch.float32 else 0.03
    assert (ours - wanted).norm() < near * wanted.norm() < 0.5 * (plain - wanted).norm()


def test_single_quantisation_is_what_our_own_packing_makes(tmp_path):
    folder = saved_by_transformers(tmp_path)
    ours = carriers(started(made(tmp_path, tmp_path / "llama", quantize="nf4")).root)
    leave()
    same(carriers(started(made(tmp_path, folder)).root), ours)


@pytest.mark.parametrize("double", [False, True], ids=["single", "double"])
def test_ranks_read_their_own_rows_and_hold_the_same_bytes(tmp_path, double):
    folder = saved_by_transformers(tmp_path, double=double, sizes=ODD)
    alone, read = loaded_bytes(made(tmp_path, folder))
    assert any("k_proj" in n for n in alone) and not any("down_proj" in n or "o_proj" in n for n in alone)
    same(alone, expected_bytes(folder, 4))
    once = sum(t.numel() for n, t in alone.items() if n.endswith(" packed"))
    for size, strategy in [(2, {"name": "fsdp"}), (4, {"name": "zero3", "offload": "params"})]:
        keys = {"strategy": strategy, "train": {"global_batch_size": 4}}
        answers = run_ranks(size, loaded_bytes, made(tmp_path, folder, **keys))
        for found, _ in answers:
            same(found, alone)
        # What runs on in the next row is read whole by all.
        assert sum(part for _, part in answers) == once + size * (read - once)


def test_storage_in_another_type_is_the_same_bytes(tmp_path):
    folder = saved_by_transformers(tmp_path, dtype=torch.bfloat16, bnb_4bit_quant_storage=torch.bfloat16)
    name = "model.layers.0.mlp.up_proj.weight"
    assert tensors_of(folder)[name].dtype == torch.bfloat16
    same(carriers(started(made(tmp_path, folder)).root), expected_bytes(folder, 4))
    assert [tuple(t.shape) for t in (open_weights(resolve_model(ModelSection(name=str(folder))))[name][3:5],)] == [(2, 64)]


def test_modules_that_were_left_out_stay_plain(tmp_path):
    folder = saved_by_transformers(tmp_path, llm_int8_skip_modules=["lm_head", "model.layers.1.mlp", "o_proj"])
    root = started(made(tmp_path, folder)).root
    found = packed_weights(root)
    assert len(found) == 14 - 3 - 2 and not any("layers.1.mlp" in n or "o_proj" in n for n in found)
    plain = tensors_of(tmp_path / "llama")["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(root.get_submodule("model.layers.1.mlp.up_proj").base_layer.weight, plain)


@pytest.mark.parametrize("double", [False, True], ids=["single", "double"])
def test_what_is_not_kept_packed_is_dequantised_and_said(tmp_path, double):
    """Rows that are no whole blocks, the head, and what the recipe names."""
    plain = model_folder(tmp_path, **ODD, vocab=261)
    folder = packed_by_hand(plain, tmp_path / "packed", lambda n: n.endswith("_proj.weight") or "lm_head" in n, double=double)
    quantize = {"method": "nf4", "skip": ["lm_head", "v_proj"]}
    run = started(made(tmp_path, folder, quantize=quantize))
    found, tensors = packed_weights(run.root), tensors_of(folder)
    assert sorted({n.split(".")[-2] for n in found}) == ["gate_proj", "k_proj", "q_proj", "up_proj"]
    said = "7 packed weights of the model's files are dequantised, as they are not kept packed here: such as lm_head.weight"
    assert said in run.built.notes
    modules = {n: m for n, m in run.root.named_modules() if isinstance(m, nn.Linear) and not isinstance(m, PackedLinear)}
    for part in ("layers.0.mlp.down_proj", "layers.1.self_attn.o_proj", "layers.1.self_attn.v_proj"):
        name = f"model.{part}"
        assert torch.equal(modules[f"{name}.base_layer"].weight, unpacked_by_them(tensors, f"{name}.weight"))
    assert torch.equal(modules["lm_head"].weight, unpacked_by_them(tensors, "lm_head.weight"))


@pytest.mark.parametrize("double", [False, True], ids=["single", "double"])
@pytest.mark.parametrize("shape", [(5, 33), (1, 1), (640, 96), (3, 4, 64)], ids=str)
def test_any_shape_reads_as_bitsandbytes_reads_it(tmp_path, shape, double):
    functional = pytest.importorskip("bitsandbytes").functional
    torch.manual_seed(0)
    before = torch.randn(shape)
    packed, state = functional.quantize_4bit(before, compress_statistics=double, quant_type="nf4")
    tensors = {"w": packed} | {f"w.{part}": t for part, t in state.as_dict(packed=True).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    found = open_weights(resolve_model(ModelSection(name=str(tmp_path))))
    assert isinstance(found, Unpacked) and list(found) == ["w"] and len(found) == 1
    wanted, weight = unpacked_by_them(tensors, "w"), found["w"]
    assert (wanted - before).norm() < 0.15 * before.norm()
    assert weight.get_shape() == list(shape) and weight.get_dtype() == "F32"
    for index in (..., slice(1, 3), (slice(0, 2), slice(1, 30)), slice(0, 0), 0, (0, slice(None))):
        assert torch.equal(weight[index], wanted[index])


@pytest.mark.parametrize("double", [False, True], ids=["single", "double"])
def test_experts_packed_one_by_one_become_fused_packed_ones(tmp_path, double):
    """Files of before transformers fused experts. Their scales are joined in fp32, which changes no value."""
    plain = model_folder(tmp_path, "QWEN3_MOE", **EXPERTS)
    folder = packed_by_hand(plain, tmp_path / "packed", lambda n: n.endswith("_proj.weight"), double=double)
    loaded = made(tmp_path, folder)
    run = started(loaded)
    tensors, found = tensors_of(folder), packed_weights(run.root)
    each = {
        part: [unpacked_by_them(tensors, f"model.layers.1.mlp.experts.{i}.{part}_proj.weight") for i in range(4)]
        for part in ("gate", "up", "down")
    }
    prefix = "model.layers.1.mlp.experts"
    gate_up = torch.stack([torch.cat(pair) for pair in zip(each["gate"], each["up"], strict=True)])
    assert torch.equal(found[f"{prefix}.gate_up_proj"].unpacked(torch.float32), gate_up)
    assert torch.equal(found[f"{prefix}.down_proj"].unpacked(torch.float32), torch.stack(each["down"]))
    kinds = {n.split()[1] for n in carriers(run.root) if "experts" in n}
    assert kinds == {"packed", "absmax"}
    alone = carriers(run.root)
    leave()
    for found, _ in run_ranks(3, loaded_bytes, made(tmp_path, folder, strategy="fsdp", train={"global_batch_size": 3})):
        same(found, alone)


def test_experts_that_are_packed_in_part_are_dequantised(tmp_path):
    plain = model_folder(tmp_path, "QWEN3_MOE", **EXPERTS)
    folder = packed_by_hand(plain, tmp_path / "packed", lambda n: n.endswith("q_proj.weight") or "experts.1.up" in n)
    run = started(made(tmp_path, folder))
    assert all("q_proj" in n for n in packed_weights(run.root))
    experts = run.root.get_submodule("model.layers.0.mlp.experts").gate_up_proj
    before, tensors = tensors_of(plain), tensors_of(folder)
    name = "model.layers.0.mlp.experts.{}.up_proj.weight"
    assert torch.equal(experts[1, 64:], unpacked_by_them(tensors, name.format(1)))
    assert torch.equal(experts[2, 64:], before[name.format(2)])
    assert any("2 packed weights of the model's files are dequantised" in note for note in run.built.notes)


def test_only_what_keeps_its_rows_is_taken_as_it_is():
    merge, join = WeightConverter(["a", "b"], "c", [MergeModulelist(dim=0), Concatenate(dim=1)]), Concatenate(dim=0)
    assert given._by_rows(2, None) and given._by_rows(3, None) and given._by_rows(3, merge)
    turned = WeightConverter(["a", "b"], "c", [MergeModulelist(dim=0), Concatenate(dim=1), Transpose(1, 2)])
    wide = WeightConverter(["a", "b"], "c", [MergeModulelist(dim=0), Concatenate(dim=2)])
    rows = WeightConverter(["a", "b"], "c", [join])
    assert not any(given._by_rows(axes, how) for axes, how in [(3, turned), (3, wide), (2, rows)])
    split = WeightConverter("attn.qkv.weight", ["attn.q.weight", "attn.k.weight"], [Chunk(dim=0)])

    class View:
        base_model_prefix = "model"

        def state_dict(self):
            return dict.fromkeys(["model.0.attn.q.weight", "model.0.attn.k.weight", "model.0.up.weight"], torch.empty(1))

    names = ["0.attn.qkv.weight", "model.0.up.weight", "unknown.weight"]
    found = given.destinations(View(), [split], names)
    assert {(n, name) for n, sources in found.items() for name, _ in sources} == {
        ("model.0.up.weight", "model.0.up.weight"),
        ("model.0.attn.q.weight", "0.attn.qkv.weight"),
        ("model.0.attn.k.weight", "0.attn.qkv.weight"),
    }
    assert not given._by_rows(2, found["model.0.attn.k.weight"][0][1])


def test_check_knows_what_is_packed_with_and_without_weights(tmp_path):
    skip = ["lm_head", "model.layers.1.mlp"]
    folder = saved_by_transformers(tmp_path, llm_int8_skip_modules=skip)
    frozen = [api.check(made(tmp_path, folder), quiet=True)["memory"]["frozen_gib"]]
    (folder / "model.safetensors").rename(tmp_path / "away")
    frozen.append(api.check(made(tmp_path, folder), quiet=True)["memory"]["frozen_gib"])
    index = {"weight_map": dict.fromkeys(tensors_of(tmp_path / "llama"), "model-1.safetensors")}
    for name in tensors_of(tmp_path / "llama"):
        if name.endswith("_proj.weight") and "layers.1.mlp" not in name:
            index["weight_map"][f"{name}.quant_state.bitsandbytes__nf4"] = "model-1.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    edit(folder, quantization_config=section_config(folder) | {"llm_int8_skip_modules": None})  # names say more
    frozen.append(api.check(made(tmp_path, folder), quiet=True)["memory"]["frozen_gib"])
    assert len(set(frozen)) == 1
    plain = api.check(made(tmp_path, tmp_path / "llama"), quiet=True)["memory"]["frozen_gib"]
    assert frozen[0] < 0.7 * plain


def section_config(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


# -- what a recipe may not ask of them ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """A plain model whose config.json says that it is packed: enough for what is refused before weights are read."""
    path = tmp_path_factory.mktemp("named")
    folder = model_folder(path, **EVEN)
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    edit(folder, quantization_config=config | {"bnb_4bit_use_double_quant": True})
    return folder


HELD = "the model's files hold 4-bit weights (bitsandbytes, nf4, double quantisation)"
ASKED = [
    ({"quantize": "fp8"}, f"quantize.method: fp8 contradicts it: {HELD}. Leave it out, or name the unquantised model."),
    (
        {"quantize": {"method": "nf4", "double_quant": False}},
        f"quantize.double_quant: False contradicts it: {HELD}. Leave it out, or name the unquantised model.",
    ),
    (
        {"lora": None},
        f"quantize: {HELD}: without a lora section every weight is trained, and packed ones cannot be. Add `lora: {{rank: 16}}`.",
    ),
    ({"lora": {"rank": 4, "use_dora": True}}, f"lora.use_dora: {HELD}: DoRA reads the base weights in every step"),
    ({"lora": {"rank": 4, "init": "pissa"}}, f"lora.init: {HELD}: a packed base cannot give up what pissa takes out of it."),
    ({"quantize": "nf4", "lora": {"rank": 4, "init": "qera"}}, f"lora.init: {HELD}, and nothing that 'qera' could give back."),
]


@pytest.mark.parametrize(("sections", "says"), ASKED, ids=[str(s) for s, _ in ASKED])
def test_a_recipe_that_contradicts_is_refused(named, tmp_path, sections, says):
    for go in (lambda loaded: make_plan(loaded), lambda loaded: api.check(loaded, quiet=True)):
        with pytest.raises(RecipeError) as caught:
            go(made(tmp_path, named, **sections))
        assert str(caught.value).startswith(says)
        assert caught.value.exit_code == 2


def test_a_recipe_that_agrees_is_taken(named, tmp_path):
    for quantize in ("nf4", {"method": "nf4", "double_quant": True}):
        assert make_plan(made(tmp_path, named, quantize=quantize)).recipe.quantize.double_quant


def test_a_config_that_speaks_of_weights_that_are_not_there(named, tmp_path):
    with pytest.raises(ModelError, match=r"config.json: speaks of 4-bit weights, and the files hold none"):
        started(made(tmp_path, named))


def test_single_quantisation_under_a_config_that_says_double(tmp_path):
    folder = saved_by_transformers(tmp_path)
    edit(folder, quantization_config=section_config(folder) | {"bnb_4bit_use_double_quant": True})
    with pytest.raises(ModelError, match="has plain scales, and config.json says that they are packed"):
        started(made(tmp_path, folder))


def test_layers_that_are_no_linear_ones(tmp_path):
    """GPT-2 keeps its weights turned over."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel

    from tests.fixtures import tok

    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    GPT2LMHeadModel(GPT2Config(vocab_size=272, n_embd=64, n_layer=2, n_head=4, n_positions=256)).save_pretrained(
        tmp_path / "gpt2"
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2", quantization_config=how, device_map="cpu")
    model.save_pretrained(tmp_path / "packed")
    tok().save_pretrained(tmp_path / "packed")
    with pytest.raises(ModelError, match="no packed weight of the files can be kept so in GPT2LMHeadModel. Name the unquantised"):
        started(made(tmp_path, tmp_path / "packed"))


# -- how else bitsandbytes packs ------------------------------------------------------------------------------------------

SERVED = "Of such, nf4 in blocks of 64 is served, with or without double quantisation in blocks of 256"


@pytest.mark.parametrize("keys", [{"block": 128}, {"kind": "fp4"}, {"block": 128, "double": True}], ids=str)
def test_other_blocks_and_types_are_refused_by_name(tmp_path, keys):
    plain = model_folder(tmp_path, **EVEN)
    folder = packed_by_hand(plain, tmp_path / "packed", lambda n: n.endswith("_proj.weight"), **keys)
    with pytest.raises(ModelError) as caught:
        started(made(tmp_path, folder))
    assert SERVED in str(caught.value) and caught.value.exit_code == 4
    assert ("fp4" if "kind" in keys else "packed as nf4 in blocks of 128") in str(caught.value)


def damaged(folder, **changes):
    """Changes entries of one weight's description."""
    tensors = tensors_of(folder)
    state = "model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4"
    about = json.loads(bytes(tensors[state].tolist())) | changes
    text = json.dumps({k: v for k, v in about.items() if v is not None}).encode()
    save_file(tensors | {state: torch.tensor(list(text), dtype=torch.uint8)}, folder / "model.safetensors")


def test_descriptions_that_say_something_else(tmp_path):
    folder = saved_by_transformers(tmp_path, double=True)
    shutil.copytree(folder, tmp_path / "copy")
    cases = [
        ({"nested_blocksize": 128}, "packed as nf4 in blocks of 64, double quantisation in blocks of 128. Of such"),
        ({"quant_type": "fp4"}, "packed as fp4 in blocks of 64"),
        ({"shape": [64, 128]}, r"up_proj.weight has shape \[64, 128\], and the config asks for \[128, 64\]"),
        ({"shape": [128, 128]}, r"holds 4096 values or bytes, and 8192 belong to a weight of shape \[128, 128\]"),
        ({"shape": None}, "quant_state.bitsandbytes__nf4 cannot be read"),
        ({"nested_offset": None}, "quant_state.bitsandbytes__nf4 cannot be read"),
    ]
    for changes, says in cases:
        shutil.copytree(tmp_path / "copy", folder, dirs_exist_ok=True)
        damaged(folder, **changes)
        with pytest.raises(ModelError, match=says):
            started(made(tmp_path, folder))
        leave()


@pytest.mark.parametrize("part", ["quant_map", "nested_quant_map"])
def test_other_values_of_the_codes_are_refused(tmp_path, part):
    folder = saved_by_transformers(tmp_path, double=True)
    tensors = tensors_of(folder)
    name = f"model.layers.1.mlp.up_proj.weight.{part}"
    tensors[name][3] = tensors[name][3].nextafter(torch.tensor(1.0))
    save_file(tensors, folder / "model.safetensors")
    started(made(tmp_path, folder))
    leave()
    tensors[name][3] += 1e-3
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"layers.1.mlp.up_proj.weight.{part} is not bitsandbytes' own. Of such"):
        started(made(tmp_path, folder))


# -- all others -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def config_only(tmp_path):
    """A folder with nothing but config.json and a tokenizer: what is refused is refused before weights are looked for."""
    folder = model_folder(tmp_path, **EVEN)
    (folder / "model.safetensors").unlink()
    return folder


def refused(folder, tmp_path) -> str:
    texts = set()
    for go in (lambda loaded: make_plan(loaded), lambda loaded: api.check(loaded, quiet=True)):
        with pytest.raises(ModelError) as caught:
            go(made(tmp_path, folder))
        assert caught.value.exit_code == 4
        texts.add(str(caught.value))
    (text,) = texts
    assert text.startswith(f"{folder / 'config.json'}: its weights are quantised already")
    return text


def test_every_other_method_is_refused_by_its_name(config_only, tmp_path):
    for method, what in KINDS.items():
        edit(config_only, quantization_config={"quant_method": method})
        text = refused(config_only, tmp_path)
        assert f"({what}), and such ones are not trained on" in text
        assert ("bf16 conversion" if method == "mxfp4" else "Name the unquantised model; `quantize: nf4` packs it") in text
    edit(config_only, quantization_config={"quant_method": "of tomorrow"})
    assert "(of tomorrow)" in refused(config_only, tmp_path)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, f"bitsandbytes, int8. {SERVED}"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, f"bitsandbytes, fp4. {SERVED}"),
        ({"quantization_config": {"load_in_8bit": True}}, "bitsandbytes, int8"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors, the format of llm-compressor"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "AWQ, 4-bit integers"),
        ({"quantization": {"group_size": 64, "bits": 4}, "quantization_config": {"group_size": 64, "bits": 4}}, "MLX"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "MLX"),
        ({"quantization_config": {"bits": 3}}, "an unnamed method"),
    ],
    ids=str,
)
def test_where_and_how_configs_say_it(config_only, tmp_path, keys, says):
    edit(config_only, **keys)
    with pytest.raises(ModelError) as caught:
        section_of(config_only)
    assert says in str(caught.value)


def test_old_checkpoints_say_it_beside_their_config(config_only, tmp_path):
    (config_only / "quantize_config.json").write_text('{"bits": 4}')
    assert "GPTQ" in refused(config_only, tmp_path)


def test_use_is_left_to_their_own_libraries(config_only):
    edit(config_only, quantization_config={"quant_method": "gptq"})
    section = ModelSection(name=str(config_only))
    assert resolve_model(section, need_weights=False).folder == config_only
    with pytest.raises(ModelError, match="GPTQ"):
        resolve_model(section, need_weights=False, to_train=True)
