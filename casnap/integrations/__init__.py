"""casnap behind the checkpoint interfaces of other libraries, a folder or a file for each.

``import casnap`` imports none of these modules. They are guests: they import ``casnap``,
``casnap.errors``, ``casnap.extending`` and ``casnap.serving``. Only ``dcp/`` is a verb on the
storage, since DCP is torch's own interface. Begin with ``trainers.py``, which the trainers share,
or with ``dcp/``. ``versions.py`` has the versions that each was tested with.
"""
