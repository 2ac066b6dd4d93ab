"""Token files on a cluster: looked at before a job is queued, copied to nodes that keep their own."""

from .check import check, check_again, refuse_changed
from .push import Pushed, push

__all__ = ["Pushed", "check", "check_again", "push", "refuse_changed"]
