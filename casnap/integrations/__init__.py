"""casnap behind the checkpoint interfaces of other libraries, a folder or a file for each.

``import casnap`` imports none of these modules. They are guests: they import ``casnap``,
``casnap.errors`` and ``casnap.extending``. Only ``dcp/`` and ``folders/`` are verbs: DCP is torch's
own interface, and ``casnap prune`` calls the other one. Begin with ``trainers.py``, which the
trainers share, or with ``dcp/``. ``versions.py`` has the versions that each was tested with.
"""
