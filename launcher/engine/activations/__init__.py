"""What backward needs of a forward: recomputed, partitioned over a tensor group (P_a), or in host memory (P_a+cpu)."""
