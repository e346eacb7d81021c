"""The benchmark: casnap beside its peers and beside the limits of the machine.

``python -m tools.bench`` prints one Markdown table from one run.
"""
