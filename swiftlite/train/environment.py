"""Versions and hardware of this machine, for `swiftlite env` and a run's environment.json."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = (
    "swiftlite",
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "datasets",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "pydantic",
    "ruamel.yaml",
    "typer",
    "numpy",
)
EXTRAS = ("gguf", "modelscope", "tensorboard", "wandb", "mlflow", "swanlab", "trackio", "flash-attn", "kernels")


def environment() -> dict[str, Any]:
    """Versions of python and packages (None: not installed; extras only where they are), processor, memory in GiB, GPUs.

    No host name, user name, path or value of a variable is in it.
    """
    installed = {name: _version(name) for name in (*PACKAGES, *EXTRAS)}
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: found for name, found in installed.items() if found or name in PACKAGES},
        "cpu": {"cores": _cores(), "memory_gib": _memory_gib()},
        **_accelerators(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    except (ValueError, OSError, AttributeError):  # not every system says
        return None


def _accelerators() -> dict[str, Any]:
    try:
        import torch
    except (ImportError, OSError) as error:  # a broken install is what `swiftlite env` is asked about
        return {"gpus": [], "torch_error": f"{type(error).__name__}: {error}"}
    found: dict[str, Any] = {
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "mps": torch.backends.mps.is_available(),
        "gpus": [],
    }
    if torch.cuda.is_available():
        found["cudnn"] = torch.backends.cudnn.version()
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            capability = f"{gpu.major}.{gpu.minor}"
            found["gpus"].append({"name": gpu.name, "memory_gib": round(gpu.total_memory / 2**30, 1), "capability": capability})
    return found


def as_text(found: dict[str, Any]) -> str:
    """`environment()` in plain lines."""
    lines = [f"python {found['python']} on {found['platform']}"]
    lines += [f"{name} {known or 'not installed'}" for name, known in found["packages"].items()]
    cpu = found["cpu"]
    lines.append(f"cpu: {cpu['cores']} cores, {cpu['memory_gib']} GiB")
    lines += [f"gpu: {gpu['name']}, {gpu['memory_gib']} GiB, compute capability {gpu['capability']}" for gpu in found["gpus"]]
    if not found["gpus"]:
        lines.append("gpu: mps" if found.get("mps") else "gpu: none")
    lines += [f"{name} {found[name]}" for name in ("cuda", "rocm", "cudnn") if found.get(name)]
    if "torch_error" in found:
        lines.append(f"torch cannot be imported: {found['torch_error']}")
    return "\n".join(lines)
