"""Eight forced CPU devices, set before JAX makes its client."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("PJRT_NPROC", "32")  # JAX 0.10.2 deadlocks with eight devices on two cores without it
