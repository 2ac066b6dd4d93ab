"""What travels to the cluster: the runtime (agent and engine) and the job's own tree.

Both are content-addressed: equal bytes have an equal name and are sent once.
"""

from .blob import Bundle
from .code import CodeBundle, code_bundle, code_root
from .runtime import runtime_bundle
from .tree import Wish

__all__ = ["Bundle", "CodeBundle", "Wish", "code_bundle", "code_root", "runtime_bundle"]
