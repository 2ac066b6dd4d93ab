"""Fixtures of the end-to-end tests: see e2e_site.py."""

from e2e_site import laptop, leftovers, rack, site, slurm

__all__ = ["laptop", "leftovers", "rack", "site", "slurm"]
