"""What runs on every node: starts one process a slot, keeps their logs, writes what happened.

Standard library only, Python 3.9 and newer. Shipped as a zip; no package has to be installed for it.
"""
