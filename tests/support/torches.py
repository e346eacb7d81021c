"""What older versions of torch cannot do, which tests then leave out."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint import staging

HAS_DCP = hasattr(staging, "DefaultStager")
"""Whether ``casnap.integrations.dcp`` works with this torch."""


def needs_torch(version: str, why: str) -> pytest.MarkDecorator:
    """Skip a test, or one case of it, with older versions of torch."""
    return pytest.mark.skipif(torch.__version__ < version, reason=f"before torch {version}: {why}")
