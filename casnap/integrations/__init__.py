"""casnap behind the checkpoint interfaces of other libraries: mostly a module or a folder for each.

``import casnap`` imports none of these modules. They import only ``casnap``, ``casnap.errors``,
``casnap.extending`` and each other, as a plugin from outside would. Two folders also import from
inside casnap: ``dcp/``, since DCP is torch's own interface, and ``folders/``, since ``casnap
prune`` calls it. Begin with ``trainers.py``, which the modules for trainers share. ``versions.py``
has the versions that each was tested with.
"""
