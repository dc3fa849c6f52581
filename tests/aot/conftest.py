"""Compiles for eight H200s on a machine without a GPU. Needs the extra `aot`; without it nothing is collected."""

import importlib.util
import os

# The CUDA plugin would look for a driver; nothing here runs, so a missing one is no error.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

_EXTRA = ("jax_cuda12_plugin", "triton")  # XLA:GPU's compiler, and a ptxas

if os.environ.get("JAX_PLATFORMS") != "cpu" or not all(map(importlib.util.find_spec, _EXTRA)):
    collect_ignore_glob = ["test_*.py"]
