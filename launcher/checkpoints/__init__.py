"""Checkpoints on the launcher's side: which are whole, proving their bytes, bringing them home, staging them.

Reads manifests and raw shards; never unpickles, never needs torch.
"""

from .collect import Collected, collect
from .found import Candidate, candidates, choose, explain, local_steps, newest_whole
from .hand_back import hand_back
from .needed import needed_shards, relayout
from .send_back import send_back
from .stage import stage
from .verify import Report, ShardProblem, verify

__all__ = [
    "Candidate",
    "Collected",
    "Report",
    "ShardProblem",
    "candidates",
    "choose",
    "collect",
    "explain",
    "hand_back",
    "local_steps",
    "needed_shards",
    "newest_whole",
    "relayout",
    "send_back",
    "stage",
    "verify",
]
