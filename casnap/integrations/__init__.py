"""casnap behind the checkpoint interfaces of other libraries, a folder or a file for each.

Nothing here is imported before a program asks for it.
"""
