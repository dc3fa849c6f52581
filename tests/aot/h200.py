"""XLA:GPU without a GPU: compile a jitted function for H200s of one host and read what came out.

JAX internals are used because the public way, `topologies.get_topology_desc` and
`lowered.compile`, forgets the memory kinds of arguments, so that pools on the host come out as device arrays. Lowering
on the CPU mesh keeps them, and then the topology's client has to be called by hand.
"""

import importlib.util
import os
from pathlib import Path

import numpy as np
from jax._src import compiler
from jax._src.lib import xla_client
from jax.experimental import topologies

from tests.pallas_kernels.cuda import tracing_for_an_h200

TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  device_memory_size: 150754820096 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
runtime_version { major: 12 minor: 8 }
dnn_version_info { major: 9 minor: 7 }
"""


def compile_step(function, *args, devices: int):
    """The XLA executable of a jitted function for `devices` H200s.

    `args` are arrays or shapes on a CPU mesh of as many devices. Kernels are chosen as on a GPU, so `function` must
    not have been traced before.
    """
    with tracing_for_an_h200():
        lowered = function.trace(*args).lower(lowering_platforms=("cuda",))
    _find_ptxas()
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=TARGET, topology=f"1x1x{devices}"
    )
    options = compiler.get_compile_options(
        num_replicas=1, num_partitions=devices, device_assignment=np.arange(devices)[None]
    )
    options.executable_build_options.use_spmd_partitioning = True
    options.executable_build_options.use_shardy_partitioner = True
    return topology.devices[0].client.compile(
        lowered.compiler_ir("stablehlo"),
        executable_devices=xla_client.DeviceList(tuple(topology.devices[:devices])),
        compile_options=options,
    )


def _find_ptxas() -> None:
    """Put the ptxas of Triton's wheel on the PATH, where XLA looks for one."""
    spec = importlib.util.find_spec("triton")
    assert spec is not None
    assert spec.origin is not None
    folder = str(Path(spec.origin).parent / "backends" / "nvidia" / "bin")
    if folder not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], folder])
