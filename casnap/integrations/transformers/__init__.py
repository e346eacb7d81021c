"""Checkpoints of the Trainer of Transformers as snapshots.

::

    from casnap.integrations.transformers import CasnapTrainerMixin

    class MyTrainer(CasnapTrainerMixin, Trainer):
        pass

:func:`install` gives the mixin to every Trainer of the process, for programs that nobody edits.

The class of a Trainer with casnap is made together with the Trainer: the mixin, then the classes of
the user and of tools, then :class:`~.storing.StoringTrainer`, then ``Trainer`` itself. So what
subclasses do when they save and load is done too.

Begin with ``mixin.py``, which saves. ``storing.py`` loads, and ``classes.py`` makes the class.
``weights.py`` and ``small_files.py`` are about the files in the folder of a checkpoint.
"""

from __future__ import annotations

from casnap.integrations.versions import check_version

check_version("transformers")

from casnap.integrations.transformers.installing import install  # noqa: E402
from casnap.integrations.transformers.mixin import CasnapTrainerMixin  # noqa: E402

__all__ = ["CasnapTrainerMixin", "install"]
