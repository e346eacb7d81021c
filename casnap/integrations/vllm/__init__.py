"""A weight-transfer backend of vLLM: ``--weight-transfer-config '{"backend": "casnap"}'``.

vLLM calls :func:`register` in each of its processes, by the entry point. Each worker then has the
engine of ``transfer.py``. :func:`casnap.integrations.engines.reload_vllm_server` with
``patches=True``, and its siblings, tell the engine what to load. ``places.py`` finds where the
elements of a checkpoint lie in a model. Begin with ``transfer.py``. No other module of casnap
imports this package.
"""

from __future__ import annotations

import logging
from typing import Any

_log = logging.getLogger("casnap")

BACKEND = "casnap"
"""The name of the backend."""
KNOWN = ("0.32.",)
"""The prefixes of the versions of vLLM for whose modules this was written."""


def register() -> None:
    """Register the backend with vLLM, if this version of vLLM is known. Further calls do no harm.

    vLLM calls this wherever casnap is installed, also for users who do not use the backend. So with
    any other version it does nothing, and it never raises.
    """
    try:
        import vllm

        version = str(vllm.__version__)
        if version.startswith(KNOWN):
            _register()
            return
        why = f"only {', '.join(known + 'x' for known in KNOWN)} is known"
    except Exception as e:  # noqa: BLE001 - it is vLLM's process
        version, why = "of this process", f"{type(e).__name__}: {e}"
    _log.debug("vLLM %s has no backend %r: %s", version, BACKEND, why)


def _register() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    if BACKEND in WeightTransferEngineFactory._registry:
        return
    WeightTransferEngineFactory.register_engine(
        BACKEND, "casnap.integrations.vllm.transfer", "CasnapTransferEngine"
    )
    if current_platform.is_cpu():
        _keep_weights_plain()


def _keep_weights_plain() -> None:
    """Make vLLM on CPUs keep the weights of linear layers unpacked, in engines with this backend.

    Otherwise vLLM packs them for its kernels, and drops the tensors that patches change.
    ``torch.nn.functional.linear``, which vLLM uses for layers that cannot be packed, needs no
    packing.
    """
    import torch
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        config = get_current_vllm_config_or_none()
        transfer = None if config is None else config.weight_transfer_config
        if transfer is not None and transfer.backend == BACKEND and layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            pack(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = dispatch
