"""What ``clush -w … hostname`` does, by zerun's own means: ``hostnames.py CLUSTER.yaml``.

Reads the description, connects to every node at once, as every verb does, and prints ``node: hostname``.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    from launcher import specs
    from launcher.backends.calls import side_by_side
    from launcher.transports.open import Connector

    cluster = specs.load_cluster(Path(sys.argv[1]))
    connector = Connector(cluster)
    names = [entry.name for entry in cluster.node_list]
    try:
        said = side_by_side(lambda n: connector.transport(n).run(["hostname"]), names, cluster.ssh.connections)
        for name, done, problem in said:
            if done is None or done.returncode:
                sys.stderr.write(f"{name}: {problem.message if problem else done}\n")
                return 1
            sys.stdout.write(f"{name}: {done.stdout.decode()}")
    finally:
        connector.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
