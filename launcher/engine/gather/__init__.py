"""A step's first phase, parameters: gathered before use and released after, ahead by the order of use (stage 3), or on
their way during the next forward (stages 1 and 2)."""
