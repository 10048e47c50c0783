"""What a run ran on: versions, the device's name and architecture."""

from __future__ import annotations

import importlib.metadata
import os
import platform

import torch


def architecture(device: str) -> str:
    """The architecture of a CUDA device as NVIDIA writes it, sm_90; empty for others."""
    if device == "cpu":
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{10 * major + minor}"


def environment(device: str) -> dict[str, str]:
    """Versions and the name of the device."""
    from .. import __version__

    out = {"flashproof": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "numpy"):
        try:
            out[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            out[package] = "absent"
    out["device"] = torch.cuda.get_device_name(device) if device != "cpu" else platform.machine()
    out["system"] = f"{platform.system()} {os.uname().release}"
    return out
