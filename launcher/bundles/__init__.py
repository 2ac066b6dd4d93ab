"""What travels to the cluster: the runtime (agent and engine) and the job's own tree.

Both are content-addressed: equal bytes have an equal name and are sent once, the tree's file by file.
"""

from .blob import Bundle
from .code import CodeBundle, code_bundle, code_root
from .runtime import runtime_bundle
from .shipment import GONE, Shipment, is_listing, keep
from .tree import NothingMatches, Wish

__all__ = [
    "GONE",
    "Bundle",
    "CodeBundle",
    "NothingMatches",
    "Shipment",
    "Wish",
    "code_bundle",
    "code_root",
    "is_listing",
    "keep",
    "runtime_bundle",
]
