"""casnap behind the checkpoint interfaces of other libraries, a folder or a file for each.

``import casnap`` imports none of these modules. They may import ``casnap``, ``casnap.extending``
and ``casnap.serving``. Begin with ``dcp/``, or with ``trainers.py``, which the trainers share.
"""
