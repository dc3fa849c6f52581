"""Eight forced CPU devices, set before JAX makes its client."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the tests' time is compiling, and LLVM's optimiser is half of that. It sees XLA's finished program: fusions
# and the order of sums are the same without it. `.ci/run` sets XLA_FLAGS and so tests with it too, on the newest JAX.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0")
os.environ.setdefault("PJRT_NPROC", "32")  # JAX 0.10.2 deadlocks with eight devices on two cores without it
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before kernels are imported


def pytest_collection_modifyitems(config, items):
    """Tests marked `gpu` run only where JAX has a GPU: JAX_PLATFORMS=cuda pytest -m gpu."""
    if os.environ["JAX_PLATFORMS"] != "cpu":
        return
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    items[:] = [item for item in items if item not in needs_gpu]
    config.hook.pytest_deselected(items=needs_gpu)
