"""Floor 0: what laptop, agent and engine agree on. Standard library only, Python 3.9 and newer."""
