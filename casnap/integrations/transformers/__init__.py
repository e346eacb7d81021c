"""Checkpoints of the Trainer of Transformers as snapshots.

::

    from casnap.integrations.transformers import CasnapTrainerMixin

    class MyTrainer(CasnapTrainerMixin, Trainer):
        pass

:func:`install` gives the mixin to every Trainer of the process, for programs that nobody edits.

When a program makes a Trainer with casnap, it gets an object of a new class. The method resolution
order of this class is the mixin, the classes of the user and of tools,
:class:`~.storing.StoringTrainer`, ``Trainer`` itself. So subclasses still do what they do when they
save and load.

Begin with ``mixin.py``, which saves. ``storing.py`` loads, and ``classes.py`` makes the class.
``weights.py`` and ``small_files.py`` are about the files in the folder of a checkpoint.
"""

from __future__ import annotations

from casnap.integrations.versions import check_version

check_version("transformers")

from casnap.integrations.transformers.installing import install  # noqa: E402
from casnap.integrations.transformers.mixin import CasnapTrainerMixin  # noqa: E402

__all__ = ["CasnapTrainerMixin", "install"]
