"""What a step will need of the device's memory, reckoned before any of it is taken: from a model on meta, or a built one.

On an H200 the total was 0.95 to 1.07 of the measured peak for Llama shapes of 0.4 to 8 billion parameters: LoRA and full, bf16
with fp32 masters and pure, with and without checkpointing, rows of 4,096 tokens. With precision fp32 it was less than half:
see NOT_COUNTED.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from swiftlite.data.loader import SAMPLES, Loader
from swiftlite.dist.launch import ranks
from swiftlite.dist.shard import needs_wrap
from swiftlite.dist.strategies import Strategy
from swiftlite.dist.world import mesh_shape
from swiftlite.models.blocks import rows_of_slice
from swiftlite.models.build import Built, Precision, alone
from swiftlite.models.families.family import Parts, count, inside, is_linear
from swiftlite.models.head import CHUNK_ELEMENTS
from swiftlite.models.lora import cast_where_used
from swiftlite.models.names import base_name
from swiftlite.models.packed import stored_in, stored_weights
from swiftlite.recipe.errors import RecipeError
from swiftlite.recipe.schema import TrainSection
from swiftlite.train.optim import make_optimizer
from swiftlite.train.plan import Plan

GIB = 2**30
# What selective checkpointing keeps of what a block's passes do.
SELECTIVE = 0.33
# What compiled blocks keep of what eager ones do: 35 of 50 GiB for an 8B shape.
COMPILED = 0.7
# What a recomputed block takes, with the gradients that pass through it, of what it keeps: a quarter more where it runs as it is,
# less where compiled, but that updates of adapters are tensors beside what they are added to. By 8B shapes on an H200.
RECOMPUTED = {False: 1.1, True: 2.0}
# Of a GPU's memory: its context, libraries' buffers, gaps between what is allocated.
RESERVE = 0.03
NOT_COUNTED = "attention scores (kept by eager, and by sdpa in fp32 on a GPU), the device's own libraries, fragmentation"


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one device in a step of the longest rows. It is fullest where the backward pass begins, with all activations and
    the working memory, or where it ends, with all gradients.

    Attributes:
        frozen: weights and buffers that do not train, in the types they are kept in.
        trained: weights that train, in theirs (fp32 masters but for bf16_pure).
        gradients: one for each trained weight, in its type.
        optimizer: its state, as AdamW's two moments.
        activations: what is kept from the forward pass for the backward pass: the inputs of the blocks with checkpointing,
            else an estimate of all that the blocks keep, right to about a fifth.
        ending: gathered copies and gradients of what is outside the blocks, on their way over the ranks.
        working: the larger of the loss head's chunk and a recomputed block with its gradients, and copies of trained weights in
            the compute type. An estimate.
        rows, tokens: the micro-batch that was reckoned with; every row as long as the longest.
        device: cpu, cuda or mps.
        there: bytes of the device, or of this machine for a CPU; None where that is not known.
    """

    frozen: int
    trained: int
    gradients: int
    optimizer: int
    activations: int
    working: int
    ending: int
    rows: int
    tokens: int
    checkpointing: str
    device: str
    there: int | None

    @property
    def total(self) -> int:
        return self.frozen + self.trained + self.optimizer + max(self.activations + self.working, self.gradients + self.ending)

    def lines(self) -> list[str]:
        """For the table before step 1."""
        parts = {
            "frozen weights": self.frozen,
            "trained weights": self.trained,
            "their gradients": self.gradients,
            "optimizer state": self.optimizer,
            "block inputs" if self.checkpointing == "full" else "activations": self.activations,
            "working memory": self.working,
            "at the end of a step": self.ending,
        }
        there = f" of {_gib(self.there)}" if self.there else ""
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        return [
            f"memory    about {_gib(self.total)}{there} GiB on {self.device} for {rows} of {self.tokens:,} tokens at a time",
            "          " + ", ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size),
            f"          not counted: {NOT_COUNTED}",
        ]

    def warning(self) -> str | None:
        """What to change where the device is too small."""
        if not self.there or self.total <= self.there:
            return None
        fix = "a smaller train.per_device_train_batch_size or data.max_length"
        fix += "" if self.checkpointing == "full" else ", or train.gradient_checkpointing: full,"
        return f"the memory plan is above the {_gib(self.there)} GiB that {self.device} has here; {fix} needs less"

    def refuse(self) -> None:
        """Raises RecipeError where a GPU is too small, its own libraries and fragmentation counted."""
        if self.device == "cuda" and self.there and self.total > (1 - RESERVE) * self.there:
            what = f"a step needs about {_gib(self.total)} GiB on each GPU, which has {_gib(self.there)}"
            fix = "Shard more (strategy fsdp), offload (strategy.offload), take fewer rows a pass, or train adapters (lora)."
            raise RecipeError(what, where="memory", fix=fix)

    def as_data(self) -> dict[str, Any]:
        """Sizes in GiB, JSON-able."""
        plain = ("rows", "tokens", "checkpointing", "device")
        sizes = {k: round(v / GIB, 6) for k, v in asdict(self).items() if k not in plain and v is not None}
        return {**{f"{k}_gib": v for k, v in sizes.items()}, "total_gib": round(self.total / GIB, 6)} | {
            k: getattr(self, k) for k in plain
        }


def _gib(size: int) -> str:
    """GiB with as many digits as say something."""
    value = size / GIB
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.01 else f"{value:.4f}"


def plan_memory(plan: Plan, built: Built) -> MemoryPlan:
    """Reckons with the longest training row of the plan, and a model whose adapters and trainable weights are in place."""
    train = plan.recipe.train
    size, spread = plan.world_size, plan.recipe.strategy
    step = train.global_batch_size or 1
    if isinstance(plan.loader, Loader):
        step = min(step, plan.loader.units_per_epoch)
    rows, sides = min(train.per_device_train_batch_size, -(-step // size)), SAMPLES[plan.loader.eats]
    _, shards = mesh_shape(plan.strategy, size, spread.shard, min(size, ranks().local_size) if ranks().size > 1 else size)
    return reckon(
        built, train, rows * sides, plan.loader.longest // sides,
        precision=plan.precision, strategy=plan.strategy, checkpointing=plan.checkpointing, device=plan.device,
        compiled=plan.compiled, size=size, shards=shards, offload=spread.offload,
    )  # fmt: skip


def reckon(
    built: Built,
    train: TrainSection,
    rows: int,
    tokens: int,
    *,
    precision: Precision,
    strategy: Strategy,
    checkpointing: str,
    device: torch.device,
    compiled: bool = False,
    size: int = 1,
    shards: int = 1,
    offload: str = "none",
) -> MemoryPlan:
    """The plan of one of `size` ranks, of which `shards` share a copy of the weights, for micro-batches of `rows` x `tokens`."""
    root, parts, compute = built.root, built.family.parts(built.root), precision.compute
    parameters = list({id(p): p for p in root.parameters()}.values())
    trained = [p for p in parameters if p.requires_grad]
    frozen = [t for t in [*parameters, *root.buffers()] if not t.requires_grad]
    trained_bytes = _bytes(trained)
    blocks = [root.get_submodule(name) for name in _with_gradient(root, built.blocks)]
    kept = [rows * tokens * _kept_per_token(block, parts, compute) + _changed_experts(block, compute) for block in blocks]
    hidden = rows * tokens * root.get_input_embeddings().weight.shape[1] * compute.itemsize
    recomputed = round((RECOMPUTED[built.peft is not None] if compiled else 1.25) * max(kept, default=0))
    if checkpointing == "none":
        recomputed = 0
    elif checkpointing == "full" and built.sliced:
        recomputed = recomputed * (rows_of_slice(rows, tokens) or rows) // rows
    working = max(_head_bytes(root, rows * tokens, compute), recomputed + max(map(_unpacked, blocks), default=0))
    inputs, inner = hidden * len(blocks), round((COMPILED if compiled else 1) * sum(kept))
    waiting = hidden * min(2, len(blocks)) if train.activation_offload else inputs
    wrapped = needs_wrap(root, strategy, compute, size, offload == "params", cast_where_used(root))
    during, ending = _copies(built, strategy, shards > 1 or offload == "params", size, compute) if wrapped else (0, 0)
    left = 0 if offload == "params" else 1  # what stays on the device between its uses
    # Gradients that are summed over ranks at a step's last pass are whole until then.
    whole = strategy.reduce == "last" and (train.gradient_accumulation_steps or 1) > 1
    state = state_bytes(train, trained, precision.master)
    return MemoryPlan(
        frozen=left * _bytes(frozen) // shards,
        trained=left * trained_bytes // shards,
        gradients=(offload == "none") * (4 * count(trained) if whole else trained_bytes // shards),  # offloaded as they come
        optimizer=state // shards if offload == "none" else 0,
        activations={"none": inner, "selective": inputs + round(SELECTIVE * inner), "full": waiting}[checkpointing],
        working=working + during,
        ending=ending,
        rows=rows,
        tokens=tokens,
        checkpointing=checkpointing,
        device=device.type,
        there=_there(device),
    )


def _unpacked(block: nn.Module) -> int:
    """Bytes of packed weights while they are used: a linear layer's one at a time, all fused experts of a block until its
    backward pass is through. Float8 weights are only turned over."""
    sizes = [(len(s.shape), s.method, torch.Size(s.shape).numel() * s.dtype.itemsize) for _, s in stored_weights(block)]
    linear = [size // 2 if method == "fp8" else size for axes, method, size in sizes if axes == 2]
    return max(linear, default=0) + sum(size for axes, _, size in sizes if axes == 3)


def _bytes(tensors: list[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _with_gradient(root: Any, blocks: list[str]) -> list[str]:
    """The blocks that a gradient goes back through: those from the first trained weight on keep activations."""
    if any(p.requires_grad for p in root.get_input_embeddings().parameters()):
        return blocks
    trains = [any(p.requires_grad for p in root.get_submodule(name).parameters()) for name in blocks]
    return blocks[trains.index(True) :] if any(trains) else []


def _kept_per_token(block: nn.Module, parts: Parts, compute: torch.dtype) -> int:
    """Bytes that a block keeps of one token: about input and output of each linear layer, and norms' inputs in fp32.

    Layers share inputs, and functions between them keep theirs, which nearly cancels: 0.9 to 1.2 of what small models of
    four families keep with adapters, 0.7 to 1.0 without (tests/train/test_memory.py).
    """
    config = parts.model.config.get_text_config()
    used = getattr(config, "num_experts_per_tok", None) or parts.expert_count
    names = {id(m): n for n, m in parts.model.named_modules()}
    total = 0.0
    for inner, module in block.named_modules():
        if base_name(f".{inner}.weight") is None:
            continue
        expert = parts.expert_count and inside(names[id(module)], parts.experts)
        share = used / parts.expert_count if expert else 1.0
        if is_linear(module):
            sides = module.weight.shape if isinstance(module, Conv1D) else (module.in_features, module.out_features)
            total += share * sum(sides) * compute.itemsize  # type: ignore[arg-type]
        elif "norm" in type(module).__name__.lower():
            total += 4 * sum(p.numel() for p in module.parameters(recurse=False))
        stored = stored_in(module)
        fused = [s.shape for s in stored if len(s.shape) == 3]
        fused += [tuple(p.shape) for p in module.parameters(recurse=False) if p.ndim == 3 and not stored]
        total += sum(share * n * (rows + columns) * compute.itemsize for n, rows, columns in fused)
    return round(total)


def _changed_experts(block: nn.Module, compute: torch.dtype) -> int:
    """Fused expert weights with their adapters in them: each pass makes a copy and keeps it for the backward pass."""
    return sum(m.get_param().numel() for m in block.modules() if isinstance(m, ParamWrapper)) * compute.itemsize


def _head_bytes(root: Any, positions: int, compute: torch.dtype) -> int:
    """The loss head: logits of a chunk in fp32 and what is made of them, hidden states and their gradient, the head's own."""
    head = root.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None:
        return 0
    vocab, width = weight.shape
    chunk = min(positions, max(1, CHUNK_ELEMENTS // vocab))
    narrow = 2 * compute.itemsize if compute.itemsize < 4 else 0  # the product before, and the gradient after fp32
    own = 4 * weight.numel() if weight.requires_grad else 0
    return chunk * vocab * (8 + narrow) + 2 * positions * width * compute.itemsize + own


def _copies(built: Built, strategy: Strategy, fetched: bool, size: int, compute: torch.dtype) -> tuple[int, int]:
    """What wrapping adds during the backward pass of the blocks and at its end: gathered weights in the compute type, gradients
    before they are reduced, and one buffer in fp32 in which that is done. What the root holds stays from the forward to the
    backward pass; a block's come and go while the next one's are fetched, unless the strategy keeps them.

    Args:
        fetched: frozen weights are gathered too, from other ranks or from host memory.
    """
    root = built.root

    def weights(module: nn.Module) -> int:
        return compute.itemsize * count(p for p in module.parameters() if p.requires_grad or fetched)

    def gradients(module: nn.Module) -> int:
        return compute.itemsize * count(p for p in module.parameters() if p.requires_grad)

    blocks, others = ([root.get_submodule(n) for n in names] for names in (built.blocks, alone(built)))
    own_gradients = gradients(root) - sum(map(gradients, [*blocks, *others]))
    inner = sum(map(weights, [*blocks, *others]))
    kept = weights(root) - inner + own_gradients
    buffer = 4 / compute.itemsize if size > 1 else 0

    def passing(modules: list[nn.Module], at_once: int) -> int:
        shown = 0 if strategy.reshard == "none" else at_once * max(map(weights, modules), default=0)
        reduced = max(map(gradients, modules), default=0)
        return shown + at_once * reduced + round(buffer * reduced)

    # What a strategy does not free after the forward pass goes block by block in the backward pass.
    held, last = (inner, max(map(weights, others), default=0)) if strategy.reshard == "none" else (0, 0)
    return kept + held + passing(blocks, 2), kept + last + max(passing(others, 1), round(buffer * own_gradients))


def state_bytes(train: TrainSection, weights: Iterable[Tensor], dtype: torch.dtype | None = None) -> int:
    """Bytes of optimizer state of whole weights, asked of the optimizer itself on one row of each kind.

    Args:
        weights: only shapes and types are read.
        dtype: the type in which the optimizer has them; None: theirs.
    """
    total, known = 0, dict[Any, int]()
    for weight in weights:
        shape, kind = (*[1] * (weight.ndim - 1), *weight.shape[-1:]), dtype or weight.dtype
        if (shape, kind) not in known:
            row = nn.Parameter(torch.zeros(shape, dtype=kind, device="cpu"))
            row.grad = torch.zeros_like(row)
            optimizer = make_optimizer(nn.ParameterList([row]), train)
            optimizer.step()
            known[shape, kind] = _bytes([v for key, v in optimizer.state[row].items() if key != "step" and torch.is_tensor(v)])
        total += known[shape, kind] * (weight.numel() // max(1, prod(shape)))
    return total


def _there(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal")), None)
