"""Which operations a device gets, and why."""

import subprocess
import sys

import torch

from moesaic.kernels import reference
from moesaic.kernels.select import kernels_for, triton_refusal


def test_a_cpu_gets_the_references_with_the_reason() -> None:
    kernels = kernels_for("cpu")
    assert kernels.name == "torch"
    assert "need a CUDA device, this is cpu" in kernels.reason
    assert (kernels.rms_norm, kernels.route) == (reference.rms_norm, reference.route)
    assert kernels.norm_rope_write is reference.norm_rope_write


def test_the_refusal_names_the_device() -> None:
    assert "this is mps" in str(triton_refusal(torch.device("mps")))


def test_importing_the_choice_and_the_backend_loads_no_triton_kernel() -> None:
    code = (
        "import sys; import moesaic.kernels.select, moesaic.experts.select, moesaic.experts.tuner; "
        "sys.exit(any(name in sys.modules for name in ('moesaic.kernels.experts', 'moesaic.kernels.norm')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
