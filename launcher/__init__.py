"""zerun: plan, launch, watch and bring home ZeRO-partitioned training on Slurm or plain SSH.

Rooms and floors are drawn in ``docs/architecture.md``: imports point down only, and every import
inside the package is relative, because the agent and the engine travel to the nodes under another
package name (``_zerun``), where no folder of a user can shadow them.
"""

__version__ = "0.1.0"
