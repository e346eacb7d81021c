"""The tests that every backend must pass, for pytest: see ``casnap.testing.backend_suite``.

Imports ``backends`` and ``errors``. Begin with ``backend_suite.py``.
"""

from __future__ import annotations

import sys

if "pytest" in sys.modules:
    # A failing test of the suite then shows the values that it compared.
    sys.modules["pytest"].register_assert_rewrite("casnap.testing.backend_suite")
