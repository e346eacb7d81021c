"""casnap behind ``torch.distributed.checkpoint`` (DCP).

::

    from casnap.integrations.dcp import CasnapReader, CasnapWriter

    dcp.save(state, storage_writer=CasnapWriter("/ckpts/step_100"))
    dcp.load(state, storage_reader=CasnapReader("/ckpts/step_100"))

``install("/ckpts")`` does the same for code that only gives DCP a path.

DCP is torch's own interface, and ``dcp.save`` is a take like any other. So this folder imports from
inside casnap: what lower folders offer (the contract ``verbs`` in pyproject.toml), and the names of
``casnap.extending``. To read the code, begin with ``writer.py``.
"""

import torch
from torch.distributed.checkpoint import staging

if not hasattr(staging, "DefaultStager"):
    raise ImportError(
        "casnap.integrations.dcp needs torch 2.9 or newer, for the copies of dcp.async_save, "
        f"and this is torch {torch.__version__}. Snapshot and Store work with it, and so do "
        "`casnap import` of files of DCP and `casnap export --format dcp`"
    )

from casnap.integrations.dcp.reader import CasnapReader
from casnap.integrations.dcp.redirect import install, uninstall
from casnap.integrations.dcp.writer import CasnapWriter

__all__ = ["CasnapReader", "CasnapWriter", "install", "uninstall"]
