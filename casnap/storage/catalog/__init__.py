"""The catalog: snapshots by name, what each holds, and where a store is.

Imports all other rooms of ``storage``. Begin with ``table.py``; ``opening.py`` opens a store.
"""
