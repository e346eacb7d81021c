"""Files of this machine, or of a network file system: safe paths, durable names, locks, errors.

This folder imports ``format``, ``runtime`` and ``errors``; it knows no backend. Backends import its
modules, the rest of casnap only the names below. Begin with ``file_io.py``, then read
``safe_paths.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from casnap.runtime.lazy_imports import imported_later

if TYPE_CHECKING:
    from casnap.backends.local_files.durability import put_whole as put_whole
    from casnap.backends.local_files.durability import sync_folder as sync_folder
    from casnap.backends.local_files.file_io import read_file as read_file
    from casnap.backends.local_files.file_io import read_run as read_run
    from casnap.backends.local_files.file_io import write_at as write_at
    from casnap.backends.local_files.file_io import write_cached as write_cached
    from casnap.backends.local_files.held_folder import HeldFolder as HeldFolder
    from casnap.backends.local_files.local_paths import as_written as as_written
    from casnap.backends.local_files.local_paths import exists as exists
    from casnap.backends.local_files.local_paths import is_file as is_file
    from casnap.backends.local_files.local_paths import is_folder as is_folder
    from casnap.backends.local_files.local_paths import is_link as is_link
    from casnap.backends.local_files.local_paths import is_taken as is_taken
    from casnap.backends.local_files.local_paths import matching as matching
    from casnap.backends.local_files.local_paths import paths_in as paths_in
    from casnap.backends.local_files.local_paths import resolved as resolved
    from casnap.backends.local_files.local_paths import status as status
    from casnap.backends.local_files.locking import lock as lock
    from casnap.backends.local_files.owners import Owners as Owners
    from casnap.backends.local_files.safe_paths import folder_at as folder_at
    from casnap.backends.local_files.safe_paths import open_file as open_file
    from casnap.backends.local_files.system_errors import ABSENT as ABSENT
    from casnap.backends.local_files.system_errors import EXHAUSTED as EXHAUSTED
    from casnap.backends.local_files.system_errors import NO_LINKS as NO_LINKS
    from casnap.backends.local_files.system_errors import NO_SPACE as NO_SPACE
    from casnap.backends.local_files.system_errors import gone_error as gone_error
    from casnap.backends.local_files.system_errors import is_of_the_place as is_of_the_place
    from casnap.backends.local_files.system_errors import translated as translated

__getattr__, __all__ = imported_later(globals())
